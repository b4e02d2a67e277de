"""Tracebacks that end in the user's code: an error that explains itself needs no frames beneath it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torchestra
from torchestra.errors import DistError

VARIABLE = "TORCHESTRA_TRACEBACK"

_OURS = str(Path(torchestra.__file__).parent) + "/"
_TORCH = importlib.util.find_spec("torch")  # not imported: those who use this may do without it
_TORCHS = str(Path(_TORCH.origin).parent) + "/" if _TORCH is not None and _TORCH.origin else _OURS
_TORCHS_FUNCTIONS = "/torch/distributed/distributed_c10d.py"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_ours(path: str) -> bool:
    """Return whether a file belongs to torchestra."""
    return path.startswith(_OURS)


def is_users(path: str) -> bool:
    """Return whether a file belongs to neither torchestra, nor torch, nor other libraries, nor Python."""
    return not path.startswith((_OURS, _TORCHS, "<", *_LIBRARIES))


def end_in_users_code(error: BaseException) -> None:
    """Remove the frames of torchestra and of torch beneath the user's code from tracebacks, for good.

    This applies to each error of the chain that is torchestra's own, or that a function of torch.distributed
    raises itself: these say what has happened and what to do. Any other error keeps all its frames, as its
    cause may be anywhere; and so do all where ``TORCHESTRA_TRACEBACK=full``.
    """
    if os.environ.get(VARIABLE) == "full":
        return
    for each in _chain(error):
        if isinstance(each, DistError) or _innermost(each.__traceback__).endswith(_TORCHS_FUNCTIONS):
            with contextlib.suppress(TypeError):  # an exception that refuses it keeps its traceback
                each.__traceback__ = _shortened(each.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _innermost(trace: TracebackType | None) -> str:
    path = ""
    while trace is not None:
        path, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return path


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    entry = trace
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    paths = [each.tb_frame.f_code.co_filename for each in entries]
    last = max((number for number, path in enumerate(paths) if is_users(path)), default=None)
    if last is None:
        return trace
    kept = [each for each, path in zip(entries[: last + 1], paths, strict=False) if not is_ours(path)]
    for one, following in zip(kept, [*kept[1:], None], strict=True):
        one.tb_next = following
    return kept[0]
