"""Linked lists of records: a list is two words (FIRST, LAST), its links are the NEXT of the records."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.native.atomics import kernel, load, store
from torchestra.engine.p2p import layout as w


@kernel
def append(queue, record):
    """Put ``record`` at the end of the list."""
    store(record + w.NEXT, 0)
    if load(queue + w.FIRST) == 0:
        store(queue + w.FIRST, record)
    else:
        store(load(queue + w.LAST) + w.NEXT, record)
    store(queue + w.LAST, record)


@kernel
def unlink(queue, before, record):
    """Take ``record`` out of the list; ``before`` is the one whose link leads to it (0: it is the first)."""
    after = load(record + w.NEXT)
    if before == 0:
        store(queue + w.FIRST, after)
    else:
        store(before + w.NEXT, after)
    if after == 0:
        store(queue + w.LAST, before)


@kernel
def remove(queue, record):
    """Unlink ``record`` if it is in the list."""
    before = 0
    found = load(queue + w.FIRST)
    while found != 0:
        if found == record:
            unlink(queue, before, found)
            return
        before = found
        found = load(found + w.NEXT)


@kernel
def find(queue, peer, tag):
    """Unlink the oldest record for a peer (or for any) with a tag: its address, or 0."""
    before = 0
    found = load(queue + w.FIRST)
    while found != 0:
        wanted = load(found + w.PEER)
        if load(found + w.TAG) == tag and (wanted == peer or wanted < 0):
            unlink(queue, before, found)
            return found
        before = found
        found = load(found + w.NEXT)
    return 0
