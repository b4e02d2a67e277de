"""Files of traces (trace.py), read again: whatever is no trace, or a damaged one, is refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torchestra.engine.recorder.formats.rows import Table, table_of
from torchestra.engine.recorder.trace import merged
from torchestra.errors import InvalidArgumentError

_EVENT_KEYS = {"ph", "pid", "tid", "name"}
_MAX_RANKS = 1 << 20  # not as many
_RANKS = ("rank", "root", "peer", "waited_for", "callee", "caller", "size")
_MAY_BE_NEGATIVE = ("tag", "caller")


def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Return one trace of those in some files, or directories of them.

    Raises:
        InvalidArgumentError: there are none, or one is something else.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise InvalidArgumentError(f"there are no traces (*.json) in {', '.join(map(str, paths))}")
    return merged([_read(file) for file in files])


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_bytes())
        if not all(event.keys() >= _EVENT_KEYS for event in trace["traceEvents"]):
            raise ValueError("its events are of another kind")
        _check(table_of(trace))
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{path} is not a trace that torchestra has written, or it is damaged: {error!r:.200}"
        ) from error
    return dict(trace)


def _check(table: Table) -> None:
    """Refuse values that no record has (JSON has any), by a ValueError or a TypeError."""
    if not isinstance(table.clock, str) or not math.isfinite(table.epoch_us):
        raise ValueError("its clock is none")
    sizes: dict[int, int] = {}
    for group in table.groups:
        _check_value("size", group.size, (int,), _MAX_RANKS)
        for name, kind, values in (
            ("rank", int, group.pids.keys()),
            ("pid", int, group.pids.values()),
            ("host", str, (group.name, *group.hosts.values())),
        ):
            for value in values:
                _check_value(name, value, (kind,), group.size)
        sizes[group.number] = group.size
    rows_of_kinds: Sequence[Sequence[Any]] = (table.rows, table.spans, table.samples, table.calls)
    for rows in rows_of_kinds:
        kinds = _kinds(rows[0]) if rows else {}
        for row in rows:
            for name, types in kinds.items():
                _check_value(name, getattr(row, name), types, sizes[row.group])


def _check_value(name: str, value: object, kinds: tuple[type, ...], size: int) -> None:
    if type(value) not in kinds or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError(f"{name} is {value!r:.50}")
    if isinstance(value, int):
        least = -(1 << 63) if name in _MAY_BE_NEGATIVE else 0
        bound = size if name in _RANKS else 1 << 63
        if not least <= value < bound:
            raise ValueError(f"{name} is {value}")


def _kinds(row: Any) -> Mapping[str, tuple[type, ...]]:
    """Return the types that the values of a row have, by their names."""
    found = {}
    for name, hint in get_type_hints(type(row)).items():
        kinds = get_args(hint) or (hint,)
        found[name] = (*kinds, int) if float in kinds else kinds
    return found
