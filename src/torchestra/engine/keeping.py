"""Keeping a group's flight record when its arena goes: a trace file in the directory TORCHESTRA_RECORD."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import quote

from torchestra.engine import layout as at
from torchestra.engine.arena import Arena
from torchestra.engine.flight import read_flight_record
from torchestra.engine.trace import trace_of, write_trace

__all__ = ["VARIABLE", "keep_record"]

VARIABLE = "TORCHESTRA_RECORD"
_NAME_LETTERS = 100


def keep_record(arena: Arena) -> None:
    """Write the record of all ranks, if the environment names a directory for it; never raises."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    try:
        record = read_flight_record(arena)
        # Groups of one name, one after the other or of several jobs, were made at different times.
        name = f"{quote(record.group, safe='')[:_NAME_LETTERS]}-{arena.word(at.HEADER_NANOSECONDS):x}.json"
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_trace(Path(directory, name), trace_of([record]))
    except OSError as error:
        print(f"torchestra: {VARIABLE}: the flight record cannot be written ({error})", file=sys.stderr)
