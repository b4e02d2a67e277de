"""scan and exscan: the reductions of the tensors of the ranks up to, or before, each rank.

What kernels take is told in reduce.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import buffer_of
from torchestra.engine.kernels.waiting import arrive, end, enter, meet, publish, wait_for_step
from torchestra.engine.native.atomics import call_reduction, kernel, load, memcpy, store

RANK, RESUME, POINTERS, CHUNK, NOT_SHARED, DONE = (
    at.RANK,
    at.RESUME,
    at.POINTERS,
    at.CHUNK,
    at.NOT_SHARED,
    at.DONE,
)
PLAN_CONTEXT, PLAN_META, PLAN_UNIT = at.PLAN_CONTEXT, at.PLAN_META, at.PLAN_UNIT
PLAN_FUNCTION = at.PLAN_FUNCTION


@kernel
def scan(plan, count, address, inclusive):
    """Reduce in place the tensors of the ranks before this one, and its own if ``inclusive`` (1, else 0).

    In iteration t a rank copies chunk t of its tensor into its buffer, and reduces chunk t - 1 out of the
    buffers of the ranks up to it. Buffers are written again as in move.share.
    """
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    unit = load(plan + PLAN_UNIT)
    function = load(plan + PLAN_FUNCTION)
    rank = load(context + RANK)
    pointers = load(context + POINTERS)
    number = rank + inclusive
    chunk = load(context + CHUNK) // unit
    chunks = max(1, (count + chunk - 1) // chunk)
    iteration = load(context + RESUME)
    if iteration <= 0:
        iteration = 0
        code = enter(context, meta, count, count * unit, 1)
        if code != DONE:
            return code
    while iteration < chunks + 1:
        if iteration > 0:
            if iteration == 1:
                code = meet(context, meta, count)
            else:
                code = wait_for_step(context, iteration)
            if code != DONE:
                store(context + RESUME, iteration)
                return code
        if iteration < chunks:
            offset = iteration * chunk
            length = min(chunk, count - offset)
            memcpy(buffer_of(context, rank, iteration), address + offset * unit, length * unit)
        if iteration > 0 and number > 0:
            offset = (iteration - 1) * chunk
            for peer in range(number):
                store(pointers + peer * 8, buffer_of(context, peer, iteration - 1))
            length = min(chunk, count - offset)
            call_reduction(function, address + offset * unit, pointers, number, length)
        if iteration == 0:
            arrive(context, meta, count, NOT_SHARED)
        elif iteration < chunks:
            publish(context, iteration + 1)
        iteration += 1
    end(context)
    return DONE
