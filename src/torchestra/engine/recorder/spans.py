"""The entries of spans: the parts of a training step, which lie around operations. A ring of their own.

A span is written once, when it ends, by whichever thread of the rank ends it: the thread that takes the
number writes the entry, so two threads write to one entry only if they are ENTRIES spans apart. Entries are
those of recorder.py, read in the same way, but for their times, which are nanoseconds of CLOCK_MONOTONIC.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.native.atomics import fetch_add, load, short_kernel, store_release
from torchestra.engine.recorder.recorder import write_entry

RECORD, ENDED, SPANS_OPENED, SPANS_AT = at.RECORD, at.ENDED, at.SPANS_OPENED, at.SPANS_AT
ENTRIES, ENTRY_BYTES = at.ENTRIES, at.ENTRY_BYTES


@short_kernel
def record_span(context, kind, began, ended, step, index, nbytes):
    """Write a span that has ended; ``index`` is -1 if it has none."""
    record = load(context + RECORD)
    number = fetch_add(record + SPANS_OPENED, 1) + 1
    entry = record + SPANS_AT + (number & (ENTRIES - 1)) * ENTRY_BYTES
    write_entry(entry, number, began, kind, step, nbytes, index + 1)
    store_release(entry + ENDED, ended)
    return 0
