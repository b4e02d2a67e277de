"""The entries of collectives: what a call does before and after its kernel, compiled together with it.

An entry is a builtin function (METH_FASTCALL | METH_KEYWORDS): ``own`` is its ``self``, an Entry
(entry_layout.py), ``arguments`` the address of ``number`` objects, ``keywords`` the names of more, or 0.
A call is *plain* if

* it is synchronous and by position, with the group's or its own time-out;
* the group is open, nothing is queued, no other thread runs an operation of it, and no profiler is on;
* its tensors are plain (plain_calls.py), have one dtype, and the sizes that the operation wants;
* the operation on this dtype, with this reduce operation and root, has gone the general way before, which has
  checked it: then there is a plan.

A plain call is handed to the kernel (running.py). Every other call goes to ``general`` with the very same
arguments, and gives the same results, or the same errors.

Here are the operations on one tensor, and on an output and an input; those on lists are in lists.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine.entries.plain_calls import (
    dtype_of,
    is_int,
    plan_for,
    read_view,
    slow_path,
)
from torchestra.engine.entries.python_interface import word_of
from torchestra.engine.entries.running import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL_EVEN,
    BARRIER,
    BROADCAST,
    REDUCE_SCATTER_EVEN,
    is_free,
    make_plan,
    run,
    timeout_of,
)
from torchestra.engine.native.atomics import kernel, load

_LOW = 0xFFFF_FFFF


@kernel
def _in_place(own, arguments, number, keywords, which, reduces, rooted):
    """Run an operation on one tensor; an op comes after it if it ``reduces``, a root if it is ``rooted``."""
    entry = load(own + e.HEADER)
    view = entry + e.VIEWS
    access = load(entry + e.ACCESS)
    required = 1 + reduces + rooted
    if (
        not is_free(entry, arguments, number, keywords, required)
        or (rooted and not is_int(access, load(arguments + (1 + reduces) * 8)))
        or not read_view(access, load(arguments), view)
    ):
        return slow_path(entry, arguments, number, keywords)
    op = load(arguments + 8) if reduces else 0
    root = word_of(load(arguments + (1 + reduces) * 8), entry + e.ARGUMENTS_AT) if rooted else 0
    plan = plan_for(entry, dtype_of(view), op, root)
    if plan == 0:
        return make_plan(entry, arguments, number)
    count = load(view + e.VIEW_COUNT)
    nbytes = load(view + e.VIEW_LENGTH)
    timeout = timeout_of(entry, arguments, number, required)
    return run(entry, which, plan, count, load(view + e.VIEW_DATA), 0, nbytes, timeout, arguments, number)


@kernel
def all_reduce(own, arguments, number, keywords):
    """Run ``all_reduce(tensor, op, async_op=False, timeout_s=None)``."""
    return _in_place(own, arguments, number, keywords, ALL_REDUCE, 1, 0)


@kernel
def reduce(own, arguments, number, keywords):
    """Run ``reduce(tensor, op, root, async_op=False, timeout_s=None)``."""
    return _in_place(own, arguments, number, keywords, ALL_REDUCE, 1, 1)


@kernel
def broadcast(own, arguments, number, keywords):
    """Run ``broadcast(tensor, root, async_op=False, timeout_s=None)``."""
    return _in_place(own, arguments, number, keywords, BROADCAST, 0, 1)


@kernel
def _are_plain(entry, arguments, number, keywords, required):
    """Return whether a call is plain whose first arguments are an output and an input of one dtype."""
    if not is_free(entry, arguments, number, keywords, required):
        return False
    output = entry + e.VIEWS
    given = output + e.VIEW_BYTES
    access = load(entry + e.ACCESS)
    if not read_view(access, load(arguments), output) or not read_view(access, load(arguments + 8), given):
        return False
    return dtype_of(output) == dtype_of(given)


@kernel
def all_gather_into_tensor(own, arguments, number, keywords):
    """Run ``all_gather_into_tensor(output, tensor, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    output = entry + e.VIEWS
    given = output + e.VIEW_BYTES
    if not _are_plain(entry, arguments, number, keywords, 2) or load(output + e.VIEW_COUNT) != load(
        given + e.VIEW_COUNT
    ) * load(entry + e.SIZE):
        return slow_path(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(given), 0, 0)
    if plan == 0:
        return make_plan(entry, arguments, number)
    count = load(given + e.VIEW_COUNT)
    nbytes = load(output + e.VIEW_LENGTH)
    source = load(given + e.VIEW_DATA)
    timeout = timeout_of(entry, arguments, number, 2)
    return run(
        entry, ALL_GATHER, plan, count, source, load(output + e.VIEW_DATA), nbytes, timeout, arguments, number
    )


@kernel
def reduce_scatter_tensor(own, arguments, number, keywords):
    """Run ``reduce_scatter_tensor(output, tensor, op, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    output = entry + e.VIEWS
    given = output + e.VIEW_BYTES
    if not _are_plain(entry, arguments, number, keywords, 3) or load(given + e.VIEW_COUNT) != load(
        output + e.VIEW_COUNT
    ) * load(entry + e.SIZE):
        return slow_path(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(given), load(arguments + 16), 0)
    if plan == 0:
        return make_plan(entry, arguments, number)
    count = load(output + e.VIEW_COUNT)
    nbytes = load(given + e.VIEW_LENGTH)
    source = load(given + e.VIEW_DATA)
    timeout = timeout_of(entry, arguments, number, 3)
    return run(
        entry,
        REDUCE_SCATTER_EVEN,
        plan,
        count,
        source,
        load(output + e.VIEW_DATA),
        nbytes,
        timeout,
        arguments,
        number,
    )


@kernel
def _have_equal_rows(output, given, ranks):
    """Return whether two views have one shape, of rows that ``ranks`` divides."""
    dimensions = load(output + e.VIEW_DIMENSIONS) & _LOW
    if dimensions == 0 or load(given + e.VIEW_DIMENSIONS) & _LOW != dimensions:
        return False
    shape = load(output + e.VIEW_SHAPE)
    for dimension in range(dimensions):
        if load(shape + dimension * 8) != load(load(given + e.VIEW_SHAPE) + dimension * 8):
            return False
    return load(shape) % ranks == 0


@kernel
def all_to_all_single(own, arguments, number, keywords):
    """Run ``all_to_all_single(output, tensor, None, None, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    output = entry + e.VIEWS
    given = output + e.VIEW_BYTES
    ranks = load(entry + e.SIZE)
    none = load(load(entry + e.ACCESS) + e.NONE)
    if (
        not _are_plain(entry, arguments, number, keywords, 4)
        or load(arguments + 16) != none
        or load(arguments + 24) != none
        or not _have_equal_rows(output, given, ranks)
    ):
        return slow_path(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(given), 0, 0)
    if plan == 0:
        return make_plan(entry, arguments, number)
    nbytes = load(given + e.VIEW_LENGTH)
    source = load(given + e.VIEW_DATA)
    timeout = timeout_of(entry, arguments, number, 4)
    target = load(output + e.VIEW_DATA)
    return run(
        entry, ALL_TO_ALL_EVEN, plan, nbytes // ranks, source, target, nbytes, timeout, arguments, number
    )


@kernel
def barrier(own, arguments, number, keywords):
    """Run ``barrier(async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    if not is_free(entry, arguments, number, keywords, 0) or load(load(entry + e.STATE) + e.USES_DEVICE) != 0:
        return slow_path(entry, arguments, number, keywords)
    plan = load(load(entry + e.PLANS) + e.PLAN)
    timeout = timeout_of(entry, arguments, number, 0)
    return run(entry, BARRIER, plan, 0, 0, 0, 0, timeout, arguments, number)
