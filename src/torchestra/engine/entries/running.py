"""How an entry runs the operation of a plain call: turns, the interpreter's lock, and what has not ended.

The interpreter's lock. Among ranks that are processes a small operation keeps it for as long as its kernel
only spins, some 3 µs: to give it away and take it back costs as much as the operation. The word
HOLDS_INTERPRETER has a wait return PENDING before it yields; then the lock is released, and the kernel goes
on where it was. Large operations, and those of ranks that are threads, release it first.

A kernel that has not ended (it waits for long, the ranks called different operations) is brought to its end
by ``finish_call``, in Python.

Memory. While the lock is released, other threads may change a list that the call was given: the call holds
the tensors that were in it. If an interrupt, or the end of a long wait, leaves a peer behind that is a thread
and may still use the tensors (engine/reclaiming.py), they are never freed.

Signals. Handlers run between bytecodes, so never in here: no interrupt can leave INSIDE set, or the operation
begun, but one within ``finish_call``, and that is seen here (:func:`abandon_operation`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine import layout as at
from torchestra.engine.entries.plain_calls import (
    abandon_operation,
    is_intercepted,
    is_list,
    is_profiled,
    slow_path,
)
from torchestra.engine.entries.python_interface import (
    add_reference,
    call_object,
    clear_error,
    drop_reference,
    int_of,
    list_as_tuple,
    release_interpreter,
    take_interpreter,
)
from torchestra.engine.kernels import exchange, move, reduce
from torchestra.engine.kernels.shared_words import mark_aborted, next_reader
from torchestra.engine.kernels.waiting import ALL_WAITERS, FUTEX, FUTEX_WAKE, stop_waiting, wait_again
from torchestra.engine.native.atomics import kernel, load, store, syscall

DONE, PENDING, HOLDS_INTERPRETER = at.DONE, at.PENDING, at.HOLDS_INTERPRETER
RESUME, SIZE = at.RESUME, at.SIZE
NO_MEMORY = -1  # no code of a kernel

WORDS = {
    "all_reduce": 2,
    "all_reduce_iovec": 3,
    "broadcast": 2,
    "all_gather": 3,
    "reduce_scatter_even": 3,
    "all_to_all_even": 3,
    "reduce_scatter": 3,
    "share": 2,
    "gather": 2,
    "scatter": 2,
    "exchange": 1,
    "barrier": 1,
}
"""The kernels that entries run, by name as in engine/local.py: how many words each takes after a plan."""
(
    ALL_REDUCE,
    ALL_REDUCE_IOVEC,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER_EVEN,
    ALL_TO_ALL_EVEN,
    REDUCE_SCATTER,
    SHARE,
    GATHER,
    SCATTER,
    EXCHANGE,
    BARRIER,
) = range(len(WORDS))
LARGEST_KEPT = 1 << 14  # bytes: larger operations release the interpreter's lock first


@kernel
def run_kernel(which, plan, first, second, third):
    """Call the kernel of a number, with as many of the words as it takes."""
    if which == ALL_REDUCE:
        return reduce.all_reduce(plan, first, second)
    if which == ALL_REDUCE_IOVEC:
        return reduce.all_reduce_iovec(plan, first, second, third)
    if which == BROADCAST:
        return move.broadcast(plan, first, second)
    if which == ALL_GATHER:
        return move.all_gather(plan, first, second, third)
    if which == REDUCE_SCATTER_EVEN:
        return reduce.reduce_scatter_even(plan, first, second, third)
    if which == ALL_TO_ALL_EVEN:
        return exchange.all_to_all_even(plan, first, second, third)
    if which == REDUCE_SCATTER:
        return reduce.reduce_scatter(plan, first, second, third)
    if which == SHARE:
        return move.share(plan, first, second)
    if which == GATHER:
        return move.gather(plan, first, second)
    if which == SCATTER:
        return move.scatter(plan, first, second)
    if which == EXCHANGE:
        return exchange.exchange(plan, first)
    return move.barrier(plan, first)


@kernel
def is_free(entry, arguments, number, keywords, required):
    """Return whether all but the tensors is plain; ``required`` arguments come before async_op."""
    if keywords != 0 or number < required or number > required + 2:
        return False
    state = load(entry + e.STATE)
    access = load(entry + e.ACCESS)
    if load(state + e.OFF) | load(state + e.PENDING_OPERATIONS) != 0:
        return False
    if load(state + e.GENERAL) | load(state + e.INSIDE) | load(state + e.STARTED_OPERATION) != 0:
        return False
    if number > required and load(arguments + required * 8) != load(access + e.FALSE):
        return False
    return not is_profiled(access) and not is_intercepted(access)


@kernel
def timeout_of(entry, arguments, number, required):
    """Return the time-out that was given, an object."""
    if number > required + 1:
        return load(arguments + (required + 1) * 8)
    return load(load(entry + e.ACCESS) + e.NONE)


@kernel
def make_plan(entry, arguments, number):
    """Hand a call that only lacks its plan to Python, which runs it and makes the plan known."""
    return call_object(load(entry + e.MAKE_PLAN), arguments, number, 0)


@kernel
def end(state):
    """Let others use the group, and wake who waits for it."""
    store(state + e.INSIDE, 0)
    if load(state + e.WANTED) != 0:
        syscall(FUTEX, state + e.INSIDE, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)


@kernel
def run(entry, which, plan, first, second, third, nbytes, timeout, arguments, number):
    """Run the operation of a plain call with these arguments; returns None, or 0 with an exception.

    A persistent operation is its own argument.
    """
    state = load(entry + e.STATE)
    context = load(state + e.CONTEXT)
    store(state + e.INSIDE, 1)
    code = PENDING
    if nbytes <= LARGEST_KEPT and load(state + e.RELEASES) == 0:
        store(context + HOLDS_INTERPRETER, 1)
        code = run_kernel(which, plan, first, second, third)
        store(context + HOLDS_INTERPRETER, 0)
    if code != DONE:
        return _run_holding(entry, which, code, timeout, plan, first, second, third, arguments, number)
    end(state)
    none = load(load(entry + e.ACCESS) + e.NONE)
    add_reference(none)
    return none


@kernel
def _hold(entry, arguments, number, index):
    """Return a tuple of what is in an argument that is a list; -1 with an exception; 0 if it is none."""
    if index >= number or not is_list(load(entry + e.ACCESS), load(arguments + index * 8)):
        return 0
    held = list_as_tuple(load(arguments + index * 8))
    return held if held != 0 else -1


@kernel
def _run_holding(entry, which, code, timeout, plan, first, second, third, arguments, number):
    """Bring an operation to its end that may not have begun, while this holds the tensors of its lists."""
    state = load(entry + e.STATE)
    held = _hold(entry, arguments, number, 0)
    also_held = _hold(entry, arguments, number, 1)
    begun = load(load(state + e.CONTEXT) + RESUME) != 0
    result = 0
    if held < 0 or also_held < 0:
        code = NO_MEMORY
    elif code == PENDING:
        thread = release_interpreter()
        code = run_kernel(which, plan, first, second, third)
        take_interpreter(thread)
    if code == DONE:
        result = load(load(entry + e.ACCESS) + e.NONE)
        add_reference(result)
    elif code != NO_MEMORY:
        result = _continue_call(entry, code, timeout, plan, first, second, third)
    if result == 0 and (code != NO_MEMORY or begun) and _abandon(entry, arguments, number):
        held = 0
        also_held = 0
    end(state)
    drop_reference(max(held, 0))
    drop_reference(max(also_held, 0))
    if code == NO_MEMORY and not begun:
        clear_error()
        return slow_path(entry, arguments, number, 0)
    return result


@kernel
def _abandon(entry, arguments, number):
    """Leave an operation halfway, whatever interrupts Python at that.

    Return whether peers may still use its tensors; then they are kept for good.
    """
    state = load(entry + e.STATE)
    context = load(state + e.CONTEXT)
    abandon_operation(entry, 1)
    if load(context + RESUME) == 0:
        return False
    mark_aborted(context)
    if load(state + e.RELEASES) == 0 or next_reader(context, 0) == load(context + SIZE):
        return False
    for index in range(number):
        add_reference(load(arguments + index * 8))
    return True


@kernel
def start(request, which, plan, first, second, third, nbytes):
    """Begin an operation that has one meeting, and wait for nobody; returns what its kernel does.

    To be ended by :func:`run` with the same words, unless this returns DONE.
    """
    state = load(request + e.STATE)
    context = load(state + e.CONTEXT)
    store(state + e.INSIDE, 1)
    spins = stop_waiting(context)
    if nbytes <= LARGEST_KEPT:
        code = run_kernel(which, plan, first, second, third)
    else:
        thread = release_interpreter()
        code = run_kernel(which, plan, first, second, third)
        take_interpreter(thread)
    wait_again(context, spins)
    end(state)
    return code


@kernel
def _continue_call(entry, code, timeout, plan, first, second, third):
    # Another thread that calls the same persistent operation writes its own arguments in the same place: what
    # is to be dropped is kept here. Python has taken the arguments out before it runs anything.
    code_number = int_of(code)
    plan_number = int_of(plan)
    first_number = int_of(first)
    second_number = int_of(second)
    third_number = int_of(third)
    given = entry + e.ARGUMENTS_AT
    store(given, timeout)
    store(given + 8, code_number)
    store(given + 16, plan_number)
    store(given + 24, first_number)
    store(given + 32, second_number)
    store(given + 40, third_number)
    result = call_object(load(entry + e.FINISH_CALL), given, 6, 0)
    drop_reference(code_number)
    drop_reference(plan_number)
    drop_reference(first_number)
    drop_reference(second_number)
    drop_reference(third_number)
    return result
