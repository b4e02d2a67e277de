"""Keep a group's flight record when its arena goes: a trace file in the directory TORCHESTRA_RECORD."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from torchestra.engine import layout as at
from torchestra.engine.recorder.flight_record import Readable, read_flight_record
from torchestra.engine.recorder.trace import trace_of, write_trace

_NAME_LETTERS = 100


def dump_flight_record(arena: Readable, directory: str | None = None, ended: float | None = None) -> None:
    """Write the record of all ranks into a file of the directory; never raises.

    Args:
        directory: default: the one that the environment names, if any.
        ended: by ``time.monotonic()``, when the ranks were stopped, if that was not just now. Operations in
            progress are shown until then.
    """
    directory = directory or os.environ.get(at.RECORD_VARIABLE)
    if not directory:
        return
    try:
        record = read_flight_record(arena)
        if ended is not None:
            record = replace(record, taken=ended, taken_at=record.taken_at + ended - record.taken)
        # Groups of one name, one after the other or of several jobs, were made at different times.
        whose = "-".join([record.group, *(host.name for host in record.hosts)])
        name = f"{quote(whose, safe='')[:_NAME_LETTERS]}-{arena.load_word(at.HEADER_NANOSECONDS):x}.json"
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_trace(Path(directory, name), trace_of([record]))
    except OSError as error:
        print(f"torchestra: the flight record cannot be kept in {directory} ({error})", file=sys.stderr)
