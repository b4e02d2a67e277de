"""Ranks that share cores, spread over them evenly.

With more ranks than cores an operation is as slow as the fullest core. Linux spreads waiting ranks well
in the long run, but after they have slept it may take a tenth of a second, hundreds of operations, until
three ranks on one core and one on the other have become two and two. The ranks know who of them is where,
so they need not wait for that: now and then a wait that yields writes down its core, counts how many
ranks every core has, and the last rank on a core that has too many moves itself to the emptiest.

To move, a thread narrows its affinity to that core and takes back what it had, so the system stays free
to move it elsewhere: this is a push, not a pin. Should the system have had its reasons and undo it, the
pushes become rarer, each time by half.

What the ranks read of each other may be old. Then a rank moves too often or too late, which costs time and
nothing else.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import platform

from torchestra.engine import layout as at
from torchestra.engine.native.atomics import (
    External,
    kernel,
    load,
    load_acquire,
    store,
    store_release,
    syscall,
)

_SET_AFFINITY = {"x86_64": 203, "aarch64": 122, "riscv64": 122, "ppc64le": 222}.get(platform.machine(), 122)
_GET_AFFINITY = {"x86_64": 204, "aarch64": 123, "riscv64": 123, "ppc64le": 223}.get(platform.machine(), 123)
_sched_getcpu = External("sched_getcpu", "i32")

REBALANCE_EVERY = 64
_RAREST = 1 << 14
_MASK_BYTES = at.MASK_BYTES
_MASK_WORDS = at.MASK_BYTES // 8

RANK, SIZE, CONTROL, CONTROL_BYTES, CORE = at.RANK, at.SIZE, at.CONTROL, at.CONTROL_BYTES, at.CORE
CORES, MASKS, UNTIL_REBALANCE, NEXT_REBALANCE = at.CORES, at.MASKS, at.UNTIL_REBALANCE, at.NEXT_REBALANCE


@kernel
def ranks_on(context, core):
    """Return how many ranks have last been seen on a core."""
    control = load(context + CONTROL) + CORE
    number = 0
    for rank in range(load(context + SIZE)):
        if load_acquire(control + rank * CONTROL_BYTES) == core + 1:
            number += 1
    return number


@kernel
def _is_last_on(context, core):
    control = load(context + CONTROL) + CORE
    for rank in range(load(context + RANK) + 1, load(context + SIZE)):
        if load_acquire(control + rank * CONTROL_BYTES) == core + 1:
            return False
    return True


@kernel
def _least_loaded(context, words):
    """Of the cores in the affinity mask, one with the fewest ranks; -1 if there is none."""
    masks = load(context + MASKS)
    chosen = -1
    fewest = 0
    for word in range(words):
        bits = load(masks + 8 * word)
        for bit in range(64):
            if (bits >> bit) & 1:
                number = ranks_on(context, word * 64 + bit)
                if chosen < 0 or number < fewest:
                    chosen, fewest = word * 64 + bit, number
    return chosen


@kernel
def _move(context, core, length):
    """Bring the calling thread to a core, and let it go where it might before."""
    masks = load(context + MASKS)
    narrow = masks + _MASK_BYTES
    for word in range(_MASK_WORDS):
        store(narrow + 8 * word, 0)
    store(narrow + 8 * (core >> 6), 1 << (core & 63))
    if syscall(_SET_AFFINITY, 0, length, narrow, 0, 0, 0) == 0:
        syscall(_SET_AFFINITY, 0, length, masks, 0, 0, 0)


@kernel
def rebalance(context):
    """Write down this rank's core, and move to another one if too many ranks are on it."""
    control = load(context + CONTROL) + load(context + RANK) * CONTROL_BYTES
    core = _sched_getcpu()
    store_release(control + CORE, core + 1)
    store(context + UNTIL_REBALANCE, REBALANCE_EVERY)
    ranks_here = ranks_on(context, core)
    if ranks_here * load(context + CORES) < load(context + SIZE) + load(context + CORES):
        store(context + NEXT_REBALANCE, REBALANCE_EVERY)
        return
    if not _is_last_on(context, core):
        return
    length = syscall(_GET_AFFINITY, 0, _MASK_BYTES, load(context + MASKS), 0, 0, 0)
    if length <= 0:
        return
    other = _least_loaded(context, length >> 3)
    if other < 0 or ranks_here - ranks_on(context, other) < 2:
        return
    _move(context, other, length)
    store_release(control + CORE, other + 1)
    later = min(2 * load(context + NEXT_REBALANCE), _RAREST)
    store(context + NEXT_REBALANCE, later)
    store(context + UNTIL_REBALANCE, later)


@kernel
def rebalance_sometimes(context):
    """Do :func:`rebalance` in every REBALANCE_EVERY-th wait that yields; every one of these calls."""
    left = load(context + UNTIL_REBALANCE) - 1
    store(context + UNTIL_REBALANCE, left)
    if left < 0:
        rebalance(context)
