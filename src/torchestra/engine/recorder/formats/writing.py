"""Choose the format in which a flight record is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchestra.engine.recorder.formats import chakra, kineto, pytorch, tables
from torchestra.engine.recorder.formats.rows import Table, table_of
from torchestra.engine.recorder.trace import write_trace


class Format(NamedTuple):
    """A way to write a table of operations: into a file with this suffix, or ("") into a directory.

    ``write`` returns the number of files that it has written.
    """

    suffix: str
    summary: str
    write: Callable[[Path, Table], int]


FORMATS: Mapping[str, Format] = {
    "csv": Format(".csv", "one row for each operation of each rank", tables.write_csv),
    "parquet": Format(".parquet", "the same, by polars", tables.write_parquet),
    "pytorch": Format("", "for torch.distributed.flight_recorder's analyser", pytorch.write_pickles),
    "pytorch-json": Format("", "the same, to be read by people", pytorch.write_jsons),
    "kineto": Format("", "a profile of each rank, for HTA", kineto.write_kineto),
    "chakra": Format("", "an execution trace of each rank, for simulators", chakra.write_chakra),
}
"""By name, all but "trace", which write_trace() writes from what the table is made of."""


def write(path: Path, trace: Mapping[str, Any], name: str | None) -> int:
    """Write a trace in a format; return the number of files.

    Args:
        path: of a file; of a directory, which is made if need be, where the format has a file for each rank.
        name: of the format, ``"trace"`` or a key of FORMATS; default: the one that writes files with the
            path's suffix, or else ``"trace"``.

    Raises:
        DistError: what writes it is not installed.
        OSError: it cannot be written.
    """
    chosen = name or next(
        (each for each, form in FORMATS.items() if path.suffix == form.suffix != ""), "trace"
    )
    if chosen == "trace":
        write_trace(path, dict(trace))
        return 1
    return FORMATS[chosen].write(path, table_of(trace))
