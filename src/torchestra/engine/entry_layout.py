"""Structures that Python fills and entries (machine code) read: their operation and their group.

A builtin's ``self`` is an :class:`Entry`, whose memory machine code finds by HEADER; the entry has the
address of its group's :class:`State` and of :class:`TensorAccess`.
"""

from __future__ import annotations

import ctypes
from typing import Any

_WORD: Any = ctypes.c_int64
_OBJECT: Any = ctypes.py_object

VIEW_BYTES = 80
ARGUMENTS = 8


_STATE_WORDS = (
    "off", "pending", "general", "inside", "wanted", "uses_device", "releases", "context", "started"
)  # fmt: skip
_ACCESS_WORDS = (
    "describe", "implementation", "keys", "storage", "data", "nbytes", "plain", "optional", "modes"
)  # fmt: skip
_ACCESS_OBJECTS = (
    "tensor", "parameter", "integer", "list", "none", "false", "true", "profiler", "profiler_flag"
)  # fmt: skip
_RECORD_WORDS = ("dtype", "op", "root", "plan")
_ENTRY_WORDS = ("state", "access", "plans", "size", "iovec", "longest_list", "mailbox")
_MEMORY_WORDS = ("tensor", "address", "nbytes")
_REQUEST_WORDS = (
    "active", "memory", "tensors", "which", "nbytes_moved", "tables", "tables_bytes", "source",
    "longest_piece", "threshold", "sends",
)  # fmt: skip
_ENTRY_OBJECTS = ("general", "make_plan", "finish_call", "leave")
_REQUEST_OBJECTS = ("start", "wait", "hand_over")


class State(ctypes.Structure):
    """The state of a group on one rank, which every entry checks before it does anything.

    Mutual exclusion. A rank runs one operation of a group at a time. An entry has the group while INSIDE is
    1, the general way while it holds the queue's lock and GENERAL is 1 (communicator/queue.py). Both words
    change only with the interpreter's lock held, and no thread reads them without it: an entry that finds
    either set goes the general way; the thread that holds the queue's lock sets GENERAL, so that no entry
    begins, and then waits while INSIDE is set. As an entry may release the interpreter's lock only while
    INSIDE is 1, neither begins while the other is at work. A waiting thread sets WANTED first, so the thread
    that clears INSIDE wakes it.

    A persistent operation that was started (entries/persistent.py) has begun in the kernels' context, and is
    to end there before another begins. So STARTED is looked at by whoever would begin one: an entry that
    finds it set goes the general way, and that, once it has the group, ends the operation first
    (communicator/queue.py). It is set and cleared by whoever has the group.

    Attributes:
        off: the general way serves every call: the group is closed, was left halfway, or has other kernels.
        pending: how many operations are queued, and must come before.
        general: the general way runs an operation.
        inside: an entry runs one.
        wanted: a thread sleeps until ``inside`` is 0.
        uses_device: a barrier must wait for a device, too.
        releases: ranks are threads, which need the interpreter's lock while this one waits.
        context: address of the kernels' context (engine/layout.py).
        started: address of the persistent operation that was started and has not ended, with a reference of
            its own; or 0.
    """

    off: int
    pending: int
    general: int
    inside: int
    wanted: int
    uses_device: int
    releases: int
    context: int
    started: int
    _fields_ = [(name, _WORD) for name in _STATE_WORDS]

    @property
    def address(self) -> int:
        """The address of this structure."""
        return ctypes.addressof(self)


class TensorAccess(ctypes.Structure):
    """Hold the addresses by which entries read tensors (tensor_access.py), and objects to compare with.

    Attributes:
        describe: the function of DLPack's C exchange API that fills a DLTensor.
        implementation: the byte offset, in a tensor's object, of the address of its TensorImpl,
        keys: the offset of the dispatch keys in that,
        storage: the offset there of the address of its StorageImpl,
        data, nbytes: the offsets in the StorageImpl of the memory's address and length.
        plain: the dispatch keys of a plain CPU tensor, including the ``optional`` ones, which all plain
            tensors have except those made in inference mode.
        modes: the function of torch that returns whether a dispatch mode is on in this thread; 0 if unknown.
        tensor, parameter, integer, list: the classes torch.Tensor, torch.nn.Parameter, int and list.
        none, false, true: the objects None, False and True.
        profiler, profiler_flag: a dict, and the key under which it has False while no profiler is on.
    """

    _fields_ = [
        *((name, _WORD) for name in _ACCESS_WORDS),
        *((name, _OBJECT) for name in _ACCESS_OBJECTS),
    ]


class PlanRecord(ctypes.Structure):
    """A plan that an entry serves, and for what; the list of them ends with a dtype of 0.

    Attributes:
        dtype: bits 32 to 63 of a DLTensor's third word: code, bits and lanes.
        op: the address of the ReduceOp, or 0.
        root: the root, or 0.
        plan: the address of the plan (engine/layout.py); for messages, 1 + the code of the dtype.
    """

    dtype: int
    op: int
    root: int
    plan: int
    _fields_ = [(name, _WORD) for name in _RECORD_WORDS]


class Entry(ctypes.Structure):
    """An operation of a group.

    Attributes:
        state, access: addresses of the group's State and of TensorAccess.
        plans: address of the first PlanRecord.
        size: how many ranks the group has.
        iovec, longest_list: address of the memory for the table of a list of tensors, and how many it holds.
        mailbox: for messages, the address of the mailbox's state (engine/p2p/layout.py).
        general: called with the very same arguments where the call is not plain.
        make_plan: the same, where only the plan is not known.
        finish_call: called with what the kernel has returned if it is not done; returns when it is, or
            raises. Its result is the call's.
        leave: called with the exception that ``finish_call`` has raised.
        views: scratch: two DLTensors, each with the number of elements and of bytes.
        arguments: scratch: those of ``finish_call``.
    """

    state: int
    access: int
    plans: int
    size: int
    iovec: int
    longest_list: int
    mailbox: int
    general: Any
    make_plan: Any
    finish_call: Any
    leave: Any
    _fields_ = [
        *((name, _WORD) for name in _ENTRY_WORDS),
        *((name, _OBJECT) for name in _ENTRY_OBJECTS),
        ("views", _WORD * (2 * VIEW_BYTES // 8)),
        ("arguments", _WORD * ARGUMENTS),
    ]


class MemoryRecord(ctypes.Structure):
    """Where a tensor was when a persistent operation was set up.

    Attributes:
        tensor: the address of its object.
        address: of its first element.
        nbytes: the length of its storage.
    """

    tensor: int
    address: int
    nbytes: int
    _fields_ = [(name, _WORD) for name in _MEMORY_WORDS]


class Request(Entry):
    """A persistent operation: an entry, and all that its kernel is called with.

    Attributes:
        active: INACTIVE, or where it stands since it was started: QUEUED for the group's progress thread,
            STARTED by machine code, ENDED or FAILED with nobody having waited for it since.
        memory, tensors: address of the first MemoryRecord, and how many there are.
        which: the kernel of a collective, by its number (entries/running.py).
        nbytes_moved: how much it moves, which decides whether the interpreter's lock is kept.
        tables, tables_bytes: address and length of the values for the tables by peer; 0 if it uses none.
        source: of a receive, the rank that sent last; else -1.
        longest_piece, threshold: of a collective, bytes of the longest piece of any rank, and which word of
            the context has how long it may be for the operation to have one meeting.
        sends: of a message, whether it is sent.
        words: the kernel's arguments: of a collective, the plan comes first; of a message, the address.
        start, wait: called with the operation and the arguments of a ``start()`` or ``wait()`` not plain.
        hand_over: called with a collective that is started but must wait for peers to be published.
    """

    active: int
    memory: int
    tensors: int
    which: int
    nbytes_moved: int
    tables: int
    tables_bytes: int
    source: int
    longest_piece: int
    threshold: int
    sends: int
    words: Any
    start: Any
    wait: Any
    hand_over: Any
    _fields_ = [
        *((name, _WORD) for name in _REQUEST_WORDS),
        ("words", _WORD * 5),
        *((name, _OBJECT) for name in _REQUEST_OBJECTS),
    ]


def _at(structure: type[ctypes.Structure], field: str) -> int:
    offset: int = getattr(structure, field).offset
    return offset


HEADER = object.__basicsize__
"""At which byte of a ctypes object the address of its memory lies: behind the header that all objects have.
(It has 16 bytes, and 32 in a Python that is built to run without the interpreter's lock.)"""
OBJECT_CLASS = HEADER - 8
"""At which byte of an object the address of its class lies."""

STATE, ACCESS, PLANS, SIZE, IOVEC, LONGEST_LIST, MAILBOX = (_at(Entry, name) for name in _ENTRY_WORDS)
SLOW_PATH, MAKE_PLAN, FINISH_CALL, LEAVE = (_at(Entry, name) for name in _ENTRY_OBJECTS)
VIEWS, ARGUMENTS_AT = _at(Entry, "views"), _at(Entry, "arguments")

OFF, PENDING_OPERATIONS, GENERAL, INSIDE, WANTED, USES_DEVICE, RELEASES, CONTEXT, STARTED_OPERATION = (
    _at(State, name) for name in _STATE_WORDS
)

DESCRIBE, IMPLEMENTATION, KEYS, STORAGE, DATA, NBYTES, PLAIN, OPTIONAL, MODES = (
    _at(TensorAccess, name) for name in _ACCESS_WORDS
)
TENSOR, PARAMETER, INTEGER, LIST, NONE, FALSE, TRUE, PROFILER, PROFILER_FLAG = (
    _at(TensorAccess, name) for name in _ACCESS_OBJECTS
)

PLAN_DTYPE, PLAN_OP, PLAN_ROOT, PLAN = (_at(PlanRecord, name) for name in _RECORD_WORDS)
PLAN_RECORD_BYTES = ctypes.sizeof(PlanRecord)

MEMORY_TENSOR, MEMORY_ADDRESS, MEMORY_NBYTES = (_at(MemoryRecord, name) for name in _MEMORY_WORDS)
MEMORY_RECORD_BYTES = ctypes.sizeof(MemoryRecord)

(
    ACTIVE, MEMORY, TENSORS, WHICH, NBYTES_MOVED, TABLES, TABLES_BYTES, SOURCE, LONGEST_PIECE, THRESHOLD,
    SENDS,
) = (_at(Request, name) for name in _REQUEST_WORDS)  # fmt: skip
WORDS_AT = _at(Request, "words")
START_WAY, WAIT_WAY, HAND_OVER = (_at(Request, name) for name in _REQUEST_OBJECTS)

# Values of ACTIVE.
INACTIVE, QUEUED, STARTED, ENDED, FAILED = range(5)

# A view: a DLTensor (data, device, dimensions and dtype, shape, strides, offset), and its sizes.
VIEW_DATA = 0
VIEW_DEVICE = 8
VIEW_DIMENSIONS = 16
VIEW_DTYPE = 20
VIEW_SHAPE = 24
VIEW_STRIDES = 32
VIEW_OFFSET = 40
VIEW_COUNT = 48
VIEW_LENGTH = 56
