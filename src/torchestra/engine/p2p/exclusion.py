"""How a blocking call takes a mailbox's state for itself, if nothing is under way, and gives it back.

Whoever queues a transfer sets QUEUEING and then tries for BUSY; a blocking call gives BUSY back before it
reads QUEUEING. So either they find BUSY free, or QUEUED_MEANWHILE tells the call to post what they have
queued.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.layout import DONE
from torchestra.engine.native.atomics import (
    compare_exchange,
    kernel,
    load_acquire,
    load_ordered,
    store_ordered,
)
from torchestra.engine.p2p import layout as w


@kernel
def enter(state, token):
    """Take the state, if nothing is under way with anybody: whether it was taken."""
    if load_acquire(state + w.QUEUEING) != 0 or compare_exchange(state + w.BUSY, 0, token) != 0:
        return False
    if load_acquire(state + w.QUEUEING) != 0:
        store_ordered(state + w.BUSY, 0)
        return False
    return True


@kernel
def leave(state):
    """Give the state back: DONE, or QUEUED_MEANWHILE."""
    store_ordered(state + w.BUSY, 0)
    return DONE if load_ordered(state + w.QUEUEING) == 0 else w.QUEUED_MEANWHILE
