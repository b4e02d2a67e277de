"""The entries of collectives: what a call does before and after its kernel, compiled together with it.

An entry is a builtin function (METH_FASTCALL | METH_KEYWORDS): ``own`` is its ``self``, an Entry
(entry_layout.py), ``arguments`` the address of ``number`` objects, ``keywords`` the names of more, or 0.
A call is *plain* if

* it is synchronous and by position, with the group's or its own time-out;
* the group is open, nothing is queued, no other thread runs an operation of it, and no profiler is on;
* its tensors are plain (plain_calls.py), have one dtype, and the sizes that the operation wants;
* the operation on this dtype, with this reduce operation and root, has gone the general way before, which has
  checked it: then there is a plan.

A plain call is handed to the kernel. Every other call goes to ``general`` with the very same arguments, and
gives the same results, or the same errors. A kernel that has not ended (it waits for long, the ranks called
different operations) is brought to its end by ``go_on``, in Python.

The interpreter's lock. Among ranks that are processes a small operation keeps it for as long as its kernel
only spins, some 3 µs: to give it away and take it back costs as much as the operation. The word
HOLDS_INTERPRETER has a wait return PENDING before it yields; then the lock is released, and the kernel goes
on where it was. Large operations, and those of ranks that are threads, release it first.

Signals. Handlers run between bytecodes, so never in here: no interrupt can leave INSIDE set, or the operation
begun, but one within ``go_on``, and that is seen here (:func:`leave_halfway`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine import layout as at
from torchestra.engine.entries.plain_calls import (
    OBJECT_CLASS,
    dtype_of,
    general_way,
    is_profiled,
    leave_halfway,
    look_at,
    plan_for,
)
from torchestra.engine.entries.python_interface import (
    add_reference,
    call_object,
    drop_reference,
    int_of,
    list_item,
    list_length,
    release_interpreter,
    take_interpreter,
    word_of,
)
from torchestra.engine.kernels import move, reduce
from torchestra.engine.kernels.waiting import EVERYBODY, FUTEX, FUTEX_WAKE
from torchestra.engine.native.atomics import kernel, load, store, syscall

DONE, PENDING, HOLDS_INTERPRETER, PLAN_UNIT = at.DONE, at.PENDING, at.HOLDS_INTERPRETER, at.PLAN_UNIT

ALL_REDUCE, ALL_REDUCE_LIST, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER = range(7)
LARGEST_KEPT = 1 << 14  # bytes: larger operations release the interpreter's lock first
_LOW = 0xFFFF_FFFF


@kernel
def _run_kernel(which, plan, first, second, third):
    if which == ALL_REDUCE:
        return reduce.all_reduce(plan, first, second)
    if which == ALL_REDUCE_LIST:
        return reduce.all_reduce_iovec(plan, first, second, third)
    if which == BROADCAST:
        return move.broadcast(plan, first, second)
    if which == ALL_GATHER:
        return move.all_gather(plan, first, second, third)
    if which == REDUCE_SCATTER:
        return reduce.reduce_scatter_even(plan, first, second, third)
    if which == ALL_TO_ALL:
        return move.all_to_all_even(plan, first, second, third)
    return move.barrier(plan, first)


@kernel
def _is_plain(entry, arguments, number, keywords, required):
    """Return whether all but the tensors is plain; ``required`` arguments come before async_op."""
    if keywords != 0 or number < required or number > required + 2:
        return False
    state = load(entry + e.STATE)
    access = load(entry + e.ACCESS)
    if load(state + e.OFF) | load(state + e.PENDING_OPERATIONS) != 0:
        return False
    if load(state + e.GENERAL) | load(state + e.INSIDE) != 0:
        return False
    if number > required and load(arguments + required * 8) != load(access + e.FALSE):
        return False
    return not is_profiled(access)


@kernel
def _timeout(entry, arguments, number, required):
    """Return the time-out that was given, an object."""
    if number > required + 1:
        return load(arguments + (required + 1) * 8)
    return load(load(entry + e.ACCESS) + e.NONE)


@kernel
def _learn(entry, arguments, number):
    return call_object(load(entry + e.LEARN), arguments, number, 0)


@kernel
def _end(state):
    """Let others use the group, and wake who waits for it."""
    store(state + e.INSIDE, 0)
    if load(state + e.WANTED) != 0:
        syscall(FUTEX, state + e.INSIDE, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@kernel
def _run(entry, which, plan, first, second, third, nbytes, timeout):
    """Run the operation of a plain call; returns None, or 0 with an exception."""
    state = load(entry + e.STATE)
    context = load(state + e.CONTEXT)
    store(state + e.INSIDE, 1)
    code = PENDING
    if nbytes <= LARGEST_KEPT and load(state + e.RELEASES) == 0:
        store(context + HOLDS_INTERPRETER, 1)
        code = _run_kernel(which, plan, first, second, third)
        store(context + HOLDS_INTERPRETER, 0)
    if code == PENDING:
        thread = release_interpreter()
        code = _run_kernel(which, plan, first, second, third)
        take_interpreter(thread)
    if code != DONE:
        return _go_on(entry, code, timeout, plan, first, second, third)
    _end(state)
    none = load(load(entry + e.ACCESS) + e.NONE)
    add_reference(none)
    return none


@kernel
def _go_on(entry, code, timeout, plan, first, second, third):
    given = entry + e.ARGUMENTS_AT
    store(given, timeout)
    store(given + 8, int_of(code))
    store(given + 16, int_of(plan))
    store(given + 24, int_of(first))
    store(given + 32, int_of(second))
    store(given + 40, int_of(third))
    result = call_object(load(entry + e.GO_ON), given, 6, 0)
    for place in range(1, 6):
        drop_reference(load(given + place * 8))
    if result == 0:
        leave_halfway(entry)
    _end(load(entry + e.STATE))
    return result


@kernel
def all_reduce(own, arguments, number, keywords):
    """Run ``all_reduce(tensor, op, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    view = entry + e.VIEWS
    if not _is_plain(entry, arguments, number, keywords, 2) or not look_at(
        load(entry + e.ACCESS), load(arguments), view
    ):
        return general_way(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(view), load(arguments + 8), 0)
    if plan == 0:
        return _learn(entry, arguments, number)
    count = load(view + e.VIEW_COUNT)
    nbytes = load(view + e.VIEW_LENGTH)
    timeout = _timeout(entry, arguments, number, 2)
    return _run(entry, ALL_REDUCE, plan, count, load(view + e.VIEW_DATA), 0, nbytes, timeout)


@kernel
def _list_plainly(entry, tensors, number):
    """Write the iovec of some tensors (kernels/iovec.py); whether they are plain, and of one dtype."""
    access = load(entry + e.ACCESS)
    view = entry + e.VIEWS
    starts = load(entry + e.IOVEC)
    addresses = starts + (number + 1) * 8
    count = 0
    dtype = 0
    for place in range(number):
        if not look_at(access, list_item(tensors, place), view):
            return False
        if place > 0 and dtype_of(view) != dtype:
            return False
        dtype = dtype_of(view)
        store(starts + place * 8, count)
        store(addresses + place * 8, load(view + e.VIEW_DATA))
        count += load(view + e.VIEW_COUNT)
    store(starts + number * 8, count)
    return True


@kernel
def all_reduce_list(own, arguments, number, keywords):
    """Run ``all_reduce_list(tensors, op, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    if (
        not _is_plain(entry, arguments, number, keywords, 2)
        or load(load(arguments) + OBJECT_CLASS) != load(load(entry + e.ACCESS) + e.LIST)
        or list_length(load(arguments)) < 1
    ):
        return general_way(entry, arguments, number, keywords)
    tensors = list_length(load(arguments))
    if tensors > load(entry + e.LONGEST_LIST):
        return _learn(entry, arguments, number)
    if not _list_plainly(entry, load(arguments), tensors):
        return general_way(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(entry + e.VIEWS), load(arguments + 8), 0)
    if plan == 0:
        return _learn(entry, arguments, number)
    iovec = load(entry + e.IOVEC)
    count = load(iovec + tensors * 8)
    timeout = _timeout(entry, arguments, number, 2)
    nbytes = count * load(plan + PLAN_UNIT)
    return _run(entry, ALL_REDUCE_LIST, plan, count, iovec, tensors, nbytes, timeout)


@kernel
def broadcast(own, arguments, number, keywords):
    """Run ``broadcast(tensor, root, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    view = entry + e.VIEWS
    access = load(entry + e.ACCESS)
    if (
        not _is_plain(entry, arguments, number, keywords, 2)
        or load(load(arguments + 8) + OBJECT_CLASS) != load(access + e.INTEGER)
        or not look_at(access, load(arguments), view)
    ):
        return general_way(entry, arguments, number, keywords)
    store(entry + e.ARGUMENTS_AT, 0)
    root = word_of(load(arguments + 8), entry + e.ARGUMENTS_AT)
    plan = plan_for(entry, dtype_of(view), 0, root)
    if plan == 0:
        return _learn(entry, arguments, number)
    count = load(view + e.VIEW_COUNT)
    nbytes = load(view + e.VIEW_LENGTH)
    timeout = _timeout(entry, arguments, number, 2)
    return _run(entry, BROADCAST, plan, count, load(view + e.VIEW_DATA), 0, nbytes, timeout)


@kernel
def _are_plain(entry, arguments, number, keywords, required):
    """Return whether a call is plain whose first arguments are an output and an input of one dtype."""
    if not _is_plain(entry, arguments, number, keywords, required):
        return False
    output = entry + e.VIEWS
    given = output + e.VIEW_BYTES
    access = load(entry + e.ACCESS)
    if not look_at(access, load(arguments), output) or not look_at(access, load(arguments + 8), given):
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
        return general_way(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(given), 0, 0)
    if plan == 0:
        return _learn(entry, arguments, number)
    count = load(given + e.VIEW_COUNT)
    nbytes = load(output + e.VIEW_LENGTH)
    source = load(given + e.VIEW_DATA)
    timeout = _timeout(entry, arguments, number, 2)
    return _run(entry, ALL_GATHER, plan, count, source, load(output + e.VIEW_DATA), nbytes, timeout)


@kernel
def reduce_scatter_tensor(own, arguments, number, keywords):
    """Run ``reduce_scatter_tensor(output, tensor, op, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    output = entry + e.VIEWS
    given = output + e.VIEW_BYTES
    if not _are_plain(entry, arguments, number, keywords, 3) or load(given + e.VIEW_COUNT) != load(
        output + e.VIEW_COUNT
    ) * load(entry + e.SIZE):
        return general_way(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(given), load(arguments + 16), 0)
    if plan == 0:
        return _learn(entry, arguments, number)
    count = load(output + e.VIEW_COUNT)
    nbytes = load(given + e.VIEW_LENGTH)
    source = load(given + e.VIEW_DATA)
    timeout = _timeout(entry, arguments, number, 3)
    return _run(entry, REDUCE_SCATTER, plan, count, source, load(output + e.VIEW_DATA), nbytes, timeout)


@kernel
def _have_equal_rows(output, given, ranks):
    """Return whether two views have one shape, of rows that ``ranks`` divides."""
    dimensions = load(output + e.VIEW_DIMENSIONS) & _LOW
    if dimensions == 0 or load(given + e.VIEW_DIMENSIONS) & _LOW != dimensions:
        return False
    shape = load(output + e.VIEW_SHAPE)
    for place in range(dimensions):
        if load(shape + place * 8) != load(load(given + e.VIEW_SHAPE) + place * 8):
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
        return general_way(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(given), 0, 0)
    if plan == 0:
        return _learn(entry, arguments, number)
    nbytes = load(given + e.VIEW_LENGTH)
    source = load(given + e.VIEW_DATA)
    timeout = _timeout(entry, arguments, number, 4)
    target = load(output + e.VIEW_DATA)
    return _run(entry, ALL_TO_ALL, plan, nbytes // ranks, source, target, nbytes, timeout)


@kernel
def barrier(own, arguments, number, keywords):
    """Run ``barrier(async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    if (
        not _is_plain(entry, arguments, number, keywords, 0)
        or load(load(entry + e.STATE) + e.USES_DEVICE) != 0
    ):
        return general_way(entry, arguments, number, keywords)
    plan = load(load(entry + e.PLANS) + e.PLAN)
    return _run(entry, BARRIER, plan, 0, 0, 0, 0, _timeout(entry, arguments, number, 0))
