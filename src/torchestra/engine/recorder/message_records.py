"""The entries of messages to and from other hosts: a ring of its own, as recorder.py has them.

Who writes: one thread at a time, which holds the lock of the rank's recorder (multihost/message_recorder.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.native.atomics import fetch_add, load, short_kernel, store, store_release
from torchestra.engine.recorder.clock import now
from torchestra.engine.recorder.recorder import tally_entry, write_entry

RECORD, STAMP, BEGAN, ENDED = at.RECORD, at.STAMP, at.BEGAN, at.ENDED
WHAT, WAITED, OTHER, BACKGROUND = at.WHAT, at.WAITED, at.OTHER, at.BACKGROUND
TALLIES_AT, REMOTE_KINDS = at.TALLIES_AT, at.REMOTE_KINDS
ENTRIES, ENTRY_BYTES, MESSAGES_OPENED = at.ENTRIES, at.ENTRY_BYTES, at.MESSAGES_OPENED
REMOTE_MESSAGES_AT, REMOTE_MESSAGES_BYTES, REMOTE_MESSAGES_WAITED = (
    at.REMOTE_MESSAGES_AT,
    at.REMOTE_MESSAGES_BYTES,
    at.REMOTE_MESSAGES_WAITED,
)


@short_kernel
def open_remote_message(context, what, tag, nbytes, other):
    """Begin a message to or from another host; return its number."""
    record = load(context + RECORD)
    number = fetch_add(record + MESSAGES_OPENED, 1) + 1
    write_entry(_remote_message(record, number), number, now(context), what, tag, nbytes, other)
    return number


@short_kernel
def remote_message_came(context, number, source):
    """Note that what a receive wants has begun to come."""
    record = load(context + RECORD)
    entry = _remote_message(record, number)
    if load(entry + STAMP) == number:
        _note_source(record, entry, source, now(context))
    return 0


@short_kernel
def close_remote_message(context, number, source, nbytes, well):
    """End a message to or from another host; ``source`` is -1 unless one was received."""
    record = load(context + RECORD)
    entry = _remote_message(record, number)
    if well != 0:
        store(record + REMOTE_MESSAGES_BYTES, load(record + REMOTE_MESSAGES_BYTES) + nbytes)
    if load(entry + STAMP) == number:
        ended = now(context)
        if source >= 0 and load(entry + WAITED) == 0:
            _note_source(record, entry, source, ended)
        if well != 0:
            tally_entry(record + TALLIES_AT, entry, nbytes, REMOTE_KINDS, ended)
        store_release(entry + ENDED, ended if well != 0 else -ended)
    return 0


@short_kernel
def _note_source(record, entry, source, time):
    waited = time - load(entry + BEGAN)
    store(entry + WAITED, waited)
    store(entry + OTHER, source + 1)
    if load(entry + WHAT) & BACKGROUND == 0:
        store(record + REMOTE_MESSAGES_WAITED, load(record + REMOTE_MESSAGES_WAITED) + waited)


@short_kernel
def _remote_message(record, number):
    return record + REMOTE_MESSAGES_AT + (number & (ENTRIES - 1)) * ENTRY_BYTES
