"""The checks that entries of collectives and of messages share: whether a call is plain."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine.entries.python_interface import (
    call_object,
    clear_error,
    dict_item,
    drop_reference,
    fetch_error,
    normalize_error,
    restore_error,
)
from torchestra.engine.native.atomics import call_function, kernel, load, store

_LOW = 0xFFFF_FFFF
_TRUE = 0xFF
_CPU = 1
_ONE_LANE = 1


@kernel
def is_int(access, value):
    """Return whether an object is an int, and no bool."""
    return load(value + e.OBJECT_CLASS) == load(access + e.INTEGER)


@kernel
def is_list(access, value):
    """Return whether an object is a list."""
    return load(value + e.OBJECT_CLASS) == load(access + e.LIST)


@kernel
def read_view(access, tensor, view):
    """Fill a view; return whether the tensor is plain.

    That is one of torch's own classes, dense, on the CPU, contiguous, with elements, in memory that it has. A
    DLTensor does not tell of a negative bit, nor that the memory is gone or too short: the dispatch keys and
    the storage do.
    """
    kind = load(tensor + e.OBJECT_CLASS)
    if kind != load(access + e.TENSOR) and kind != load(access + e.PARAMETER):
        return False
    implementation = load(tensor + load(access + e.IMPLEMENTATION))
    if load(implementation + load(access + e.KEYS)) | load(access + e.OPTIONAL) != load(access + e.PLAIN):
        return False
    if call_function(load(access + e.DESCRIBE), tensor, view) & _LOW != 0:
        clear_error()
        return False
    dimensions = load(view + e.VIEW_DIMENSIONS) & _LOW
    shape = load(view + e.VIEW_SHAPE)
    strides = load(view + e.VIEW_STRIDES)
    count = 1
    for behind in range(dimensions):
        offset = (dimensions - 1 - behind) * 8
        length = load(shape + offset)
        if length != 1 and load(strides + offset) != count:
            return False
        count = count * length
    bits = load(view + e.VIEW_DIMENSIONS) >> 40 & 0xFF
    lanes = load(view + e.VIEW_DIMENSIONS) >> 48 & 0xFFFF
    address = load(view + e.VIEW_DATA)
    nbytes = count * (bits >> 3)
    storage = load(implementation + load(access + e.STORAGE))
    begins = load(storage + load(access + e.DATA))
    ends = begins + load(storage + load(access + e.NBYTES))
    if (
        lanes != _ONE_LANE
        or load(view + e.VIEW_DEVICE) & _LOW != _CPU
        or load(view + e.VIEW_OFFSET) != 0
        or nbytes <= 0
        or address == 0
        or address < begins
        or address + nbytes > ends
    ):
        return False
    store(view + e.VIEW_COUNT, count)
    store(view + e.VIEW_LENGTH, nbytes)
    return True


@kernel
def dtype_of(view):
    """Return the dtype of a view, as entry_layout.PlanRecord has it."""
    return load(view + e.VIEW_DIMENSIONS) >> 32 & _LOW


@kernel
def is_profiled(access):
    """Return whether a profiler is on."""
    flag = dict_item(load(access + e.PROFILER), load(access + e.PROFILER_FLAG))
    return flag != load(access + e.FALSE)


@kernel
def is_intercepted(access):
    """Return whether this thread has a dispatch mode on, which may count operations (comm_debug.py)."""
    modes = load(access + e.MODES)
    return modes != 0 and call_function(modes, 1, 0) & _TRUE != 0


@kernel
def plan_for(entry, dtype, op, root):
    """Return the plan for a dtype, a reduce operation and a root; 0 if there is none yet."""
    record = load(entry + e.PLANS)
    while load(record + e.PLAN_DTYPE) != 0:
        if (
            load(record + e.PLAN_DTYPE) == dtype
            and load(record + e.PLAN_OP) == op
            and load(record + e.PLAN_ROOT) == root
        ):
            return load(record + e.PLAN)
        record += e.PLAN_RECORD_BYTES
    return 0


@kernel
def slow_path(entry, arguments, number, keywords):
    """Hand a call that is not plain to the method, with the very same arguments."""
    return call_object(load(entry + e.SLOW_PATH), arguments, number, keywords)


@kernel
def abandon_operation(entry, is_collective):
    """Have Python see to what an exception has left, which may be the operation's end.

    Of a collective it is done when OFF is set, and what Python raises after that replaces the exception.
    Meanwhile other threads may write their arguments where this one has had the exception written to.
    """
    given = entry + e.ARGUMENTS_AT
    fetch_error(given, given + 8, given + 16)
    normalize_error(given, given + 8, given + 16)
    kind = load(given)
    error = load(given + 8)
    trace = load(given + 16)
    off = load(entry + e.STATE) + e.OFF
    result = call_object(load(entry + e.LEAVE), given + 8, 1, 0)
    if result == 0 and (is_collective == 0 or load(off) == 0):  # a second interrupt, in its first lines
        clear_error()
        store(given + 8, error)
        result = call_object(load(entry + e.LEAVE), given + 8, 1, 0)
    if result == 0 and is_collective != 0 and load(off) != 0:
        drop_reference(kind)
        drop_reference(error)
        drop_reference(trace)
        return
    if result == 0:
        clear_error()
    else:
        drop_reference(result)
    restore_error(kind, error, trace)
