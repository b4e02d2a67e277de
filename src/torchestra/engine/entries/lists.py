"""The entries of collectives that take a list of tensors; see collectives.py.

Where a list has a tensor for each rank, its addresses and lengths go into the kernels' tables by peer. They
are the operation's that runs; and none does, and none can begin, while the interpreter's lock is held in a
call that was found free to run (entry_layout.State).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import entry_layout as e
from torchestra.engine import layout as at
from torchestra.engine.entries.plain_calls import (
    dtype_of,
    is_int,
    is_list,
    plan_for,
    read_view,
    slow_path,
)
from torchestra.engine.entries.python_interface import list_item, list_length, word_of
from torchestra.engine.entries.running import (
    ALL_REDUCE_IOVEC,
    EXCHANGE,
    GATHER,
    REDUCE_SCATTER,
    SCATTER,
    SHARE,
    is_free,
    make_plan,
    run,
    timeout_of,
)
from torchestra.engine.native.atomics import kernel, load, store

PLAN_UNIT, RANK, UNKNOWN = at.PLAN_UNIT, at.RANK, at.UNKNOWN
SOURCES, SOURCE_BYTES, TARGETS, TARGET_BYTES = at.SOURCES, at.SOURCE_BYTES, at.TARGETS, at.TARGET_BYTES
_NOTHING, _OP, _ROOT = range(3)  # what comes after the tensors


@kernel
def _fill(table, ranks, value):
    for peer in range(ranks):
        store(table + peer * 8, value)


@kernel
def _read_list(entry, tensors, like, table, written):
    """Write the addresses of a list of tensors, one for each rank, into a table by peer.

    Returns whether they are plain, of the dtype and the length of the view ``like``; if they are to be
    ``written``, no two may share memory.
    """
    access = load(entry + e.ACCESS)
    ranks = load(entry + e.SIZE)
    if not is_list(access, tensors) or list_length(tensors) != ranks:
        return False
    view = like + e.VIEW_BYTES
    length = load(like + e.VIEW_LENGTH)
    for peer in range(ranks):
        if not read_view(access, list_item(tensors, peer), view):
            return False
        if dtype_of(view) != dtype_of(like) or load(view + e.VIEW_LENGTH) != length:
            return False
        address = load(view + e.VIEW_DATA)
        if written:
            for before in range(peer):
                distance = address - load(table + before * 8)
                if -length < distance < length:
                    return False
        store(table + peer * 8, address)
    return True


@kernel
def _by_rank(own, arguments, number, keywords, which, listed, third):
    """Run an operation on one tensor and a list with one for each rank: an output and an input.

    ``listed`` is the place of the list, 0 for the output; ``third`` is what comes after them. Of a rooted
    operation only the root has the list, others None.
    """
    entry = load(own + e.HEADER)
    access = load(entry + e.ACCESS)
    view = entry + e.VIEWS
    required = 2 if third == _NOTHING else 3
    if (
        not is_free(entry, arguments, number, keywords, required)
        or (third == _ROOT and not is_int(access, load(arguments + 16)))
        or not read_view(access, load(arguments + (1 - listed) * 8), view)
    ):
        return slow_path(entry, arguments, number, keywords)
    context = load(load(entry + e.STATE) + e.CONTEXT)
    ranks = load(entry + e.SIZE)
    length = load(view + e.VIEW_LENGTH)
    root = word_of(load(arguments + 16), entry + e.ARGUMENTS_AT) if third == _ROOT else load(context + RANK)
    table = load(context + SOURCES) if listed else load(context + TARGETS)
    lengths = load(context + SOURCE_BYTES) if listed else load(context + TARGET_BYTES)
    tensors = load(arguments + listed * 8)
    if root == load(context + RANK):
        if not _read_list(entry, tensors, view, table, listed == 0):
            return slow_path(entry, arguments, number, keywords)
    elif tensors == load(access + e.NONE):
        _fill(table, ranks, 0)
    else:
        return slow_path(entry, arguments, number, keywords)
    op = load(arguments + 16) if third == _OP else 0
    plan = plan_for(entry, dtype_of(view), op, root if third == _ROOT else 0)
    if plan == 0:
        return make_plan(entry, arguments, number)
    _fill(lengths, ranks, length)
    address = load(view + e.VIEW_DATA)
    if which == SCATTER:
        _fill(lengths, ranks, length if root == load(context + RANK) else 0)
        _fill(load(context + TARGETS), ranks, 0)
        _fill(load(context + TARGET_BYTES), ranks, 0)
        store(load(context + TARGETS) + root * 8, address)
        store(load(context + TARGET_BYTES) + root * 8, length)
    count = load(view + e.VIEW_COUNT)
    timeout = timeout_of(entry, arguments, number, required)
    # Of the words behind the address only reduce_scatter reads one: the count of the longest piece.
    return run(entry, which, plan, count, address, count, length * ranks, timeout, arguments, number)


@kernel
def all_gather(own, arguments, number, keywords):
    """Run ``all_gather(outputs, tensor, async_op=False, timeout_s=None)``."""
    return _by_rank(own, arguments, number, keywords, SHARE, 0, _NOTHING)


@kernel
def gather(own, arguments, number, keywords):
    """Run ``gather(outputs, tensor, root, async_op=False, timeout_s=None)``."""
    return _by_rank(own, arguments, number, keywords, GATHER, 0, _ROOT)


@kernel
def scatter(own, arguments, number, keywords):
    """Run ``scatter(output, tensors, root, async_op=False, timeout_s=None)``."""
    return _by_rank(own, arguments, number, keywords, SCATTER, 1, _ROOT)


@kernel
def reduce_scatter(own, arguments, number, keywords):
    """Run ``reduce_scatter(output, tensors, op, async_op=False, timeout_s=None)``."""
    return _by_rank(own, arguments, number, keywords, REDUCE_SCATTER, 1, _OP)


@kernel
def _read_pieces(entry, tensors, dtype, table, lengths, written):
    """Write the addresses and the lengths of a list of tensors, one for each rank, into tables by peer.

    Returns their dtype if they are plain and all have this one (0: any), else 0; if they are to be
    ``written``, no two may share memory.
    """
    access = load(entry + e.ACCESS)
    ranks = load(entry + e.SIZE)
    view = entry + e.VIEWS
    if not is_list(access, tensors) or list_length(tensors) != ranks:
        return 0
    for peer in range(ranks):
        if not read_view(access, list_item(tensors, peer), view):
            return 0
        if dtype == 0:
            dtype = dtype_of(view)
        if dtype_of(view) != dtype:
            return 0
        address = load(view + e.VIEW_DATA)
        length = load(view + e.VIEW_LENGTH)
        if written:
            for before in range(peer):
                distance = address - load(table + before * 8)
                end = load(lengths + before * 8)
                if -length < distance < end:
                    return 0
        store(table + peer * 8, address)
        store(lengths + peer * 8, length)
    return dtype


@kernel
def all_to_all(own, arguments, number, keywords):
    """Run ``all_to_all(outputs, tensors, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    if not is_free(entry, arguments, number, keywords, 2):
        return slow_path(entry, arguments, number, keywords)
    context = load(load(entry + e.STATE) + e.CONTEXT)
    sources = load(context + SOURCES)
    sent = load(context + SOURCE_BYTES)
    targets = load(context + TARGETS)
    expected = load(context + TARGET_BYTES)
    dtype = _read_pieces(entry, load(arguments + 8), 0, sources, sent, 0)
    if dtype == 0 or _read_pieces(entry, load(arguments), dtype, targets, expected, 1) == 0:
        return slow_path(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype, 0, 0)
    if plan == 0:
        return make_plan(entry, arguments, number)
    nbytes = 0
    for peer in range(load(entry + e.SIZE)):
        nbytes += load(sent + peer * 8)
    timeout = timeout_of(entry, arguments, number, 2)
    return run(entry, EXCHANGE, plan, UNKNOWN, 0, 0, nbytes, timeout, arguments, number)


@kernel
def _write_iovec(entry, tensors, number):
    """Write the iovec of some tensors (kernels/iovec.py); whether they are plain, and of one dtype."""
    access = load(entry + e.ACCESS)
    view = entry + e.VIEWS
    starts = load(entry + e.IOVEC)
    addresses = starts + (number + 1) * 8
    count = 0
    dtype = 0
    for index in range(number):
        if not read_view(access, list_item(tensors, index), view):
            return False
        if index > 0 and dtype_of(view) != dtype:
            return False
        dtype = dtype_of(view)
        store(starts + index * 8, count)
        store(addresses + index * 8, load(view + e.VIEW_DATA))
        count += load(view + e.VIEW_COUNT)
    store(starts + number * 8, count)
    return True


@kernel
def all_reduce_list(own, arguments, number, keywords):
    """Run ``all_reduce_list(tensors, op, async_op=False, timeout_s=None)``."""
    entry = load(own + e.HEADER)
    if (
        not is_free(entry, arguments, number, keywords, 2)
        or not is_list(load(entry + e.ACCESS), load(arguments))
        or list_length(load(arguments)) < 1
    ):
        return slow_path(entry, arguments, number, keywords)
    tensors = list_length(load(arguments))
    if tensors > load(entry + e.LONGEST_LIST):
        return make_plan(entry, arguments, number)
    if not _write_iovec(entry, load(arguments), tensors):
        return slow_path(entry, arguments, number, keywords)
    plan = plan_for(entry, dtype_of(entry + e.VIEWS), load(arguments + 8), 0)
    if plan == 0:
        return make_plan(entry, arguments, number)
    iovec = load(entry + e.IOVEC)
    count = load(iovec + tensors * 8)
    timeout = timeout_of(entry, arguments, number, 2)
    nbytes = count * load(plan + PLAN_UNIT)
    return run(entry, ALL_REDUCE_IOVEC, plan, count, iovec, tensors, nbytes, timeout, arguments, number)
