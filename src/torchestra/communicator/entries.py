"""Put entries into a communicator: builtin functions that replace methods for plain calls.

For a small operation, Python would take longer than the kernel. So operations and blocking messages have
entries (engine/entries): builtin functions, set as attributes of the communicator, with the names and
parameters of the methods. They hand calls that are not plain to the method.

There are no entries if the engine has no kernels, if kernels run interpreted, or if the layout of torch's
tensors is not known (engine/entries/tensor_access.py; `torchestra doctor` tells); nor after the group was
closed, here or in a forked child.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch

from torchestra.communicator.host_staging import tensors_in
from torchestra.communicator.point_to_point import CommunicatorState
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.entries import collectives, lists, messages
from torchestra.engine.entries.running import WORDS
from torchestra.engine.entries.tensor_access import access_to_tensors, dtype_word
from torchestra.engine.entry_layout import Entry, MemoryRecord, PlanRecord, Request, TensorAccess
from torchestra.engine.native.callable_type import METH_FASTCALL_KEYWORDS, MethodDefinition
from torchestra.engine.native.kernel import address_of, is_interpreted
from torchestra.engine.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    SCATTER,
    Collective,
)
from torchestra.types import ReduceOp

if TYPE_CHECKING:
    from torchestra.engine.prepared import PreparedKernel

_ANY_DTYPE = 1
_OPS = tuple(getattr(ReduceOp, name) for name in ReduceOp._NAMES)


class _Served(NamedTuple):
    """Describe an operation that has an entry.

    Attributes:
        method: the name of the communicator's method, of the same parameters.
        row: its row of the table.
        entry: the entry's kernel.
        kernel: the name of the kernel of ``engine.kernels`` that the entry runs.
    """

    method: str
    row: Collective
    entry: Any
    kernel: str


SERVED = (
    _Served("all_reduce", ALL_REDUCE, collectives.all_reduce, "all_reduce"),
    _Served("all_reduce_list", ALL_REDUCE, lists.all_reduce_list, "all_reduce_iovec"),
    _Served("reduce", REDUCE, collectives.reduce, "all_reduce"),
    _Served("broadcast", BROADCAST, collectives.broadcast, "broadcast"),
    _Served("all_gather", ALL_GATHER, lists.all_gather, "share"),
    _Served(
        "all_gather_into_tensor", ALL_GATHER_INTO_TENSOR, collectives.all_gather_into_tensor, "all_gather"
    ),
    _Served("gather", GATHER, lists.gather, "gather"),
    _Served("scatter", SCATTER, lists.scatter, "scatter"),
    _Served("reduce_scatter", REDUCE_SCATTER, lists.reduce_scatter, "reduce_scatter"),
    _Served(
        "reduce_scatter_tensor",
        REDUCE_SCATTER_TENSOR,
        collectives.reduce_scatter_tensor,
        "reduce_scatter_even",
    ),
    _Served("all_to_all", ALL_TO_ALL, lists.all_to_all, "exchange"),
    _Served("all_to_all_single", ALL_TO_ALL_SINGLE, collectives.all_to_all_single, "all_to_all_even"),
    _Served("barrier", BARRIER, collectives.barrier, "barrier"),
)
"""The entries of collectives."""
MESSAGES = {"send": messages.send, "recv": messages.recv}
"""The entries of messages, by the communicator's method."""
_SERVED = {served.method: served for served in SERVED}

# By method: the definition that its builtins are made of, and refer to as long as they exist.
_definitions: dict[str, MethodDefinition] = {}


def _definition(method: str, kernel: Any) -> MethodDefinition:
    if method not in _definitions:
        made = MethodDefinition(method.encode(), address_of(kernel), METH_FASTCALL_KEYWORDS, None)
        _definitions.setdefault(method, made)  # one step: another thread may have been here first
    return _definitions[method]


_new_builtin = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.py_object)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)


class Entries:
    """The entries of a communicator; ``close()`` takes them out again.

    An entry is made when it is first called: programs use few of them, and a group should be made soon.
    """

    def __init__(self, communicator: CommunicatorState) -> None:
        self._communicator: CommunicatorState | None = None
        self.access: TensorAccess | None = None
        """How tensors are read; None if there are no entries."""
        access = access_to_tensors()
        if access is None or is_interpreted() or communicator.engine.kernels is None:
            return
        self.access = access
        self._communicator = communicator
        for method in (*_SERVED, *MESSAGES):
            vars(communicator)[method] = LazyEntry(self, communicator, method)

    def close(self) -> None:
        """Have every call go the general way, also calls of builtins that the program has kept."""
        communicator, self._communicator = self._communicator, None
        self.access = None
        if communicator is not None:
            communicator.queue.state.off = 1
            for method in (*_SERVED, *MESSAGES):
                vars(communicator).pop(method, None)


class LazyEntry:
    """Stand in the place of an entry until it is first called, and make it then."""

    __slots__ = ("_communicator", "_entries", "_made", "_method")

    def __init__(self, entries: Entries, communicator: CommunicatorState, method: str) -> None:
        self._entries, self._communicator, self._method = entries, communicator, method
        self._made: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self._made or self._make())(*arguments, **named)

    def _make(self) -> Callable[..., Any]:
        entries, placed, method = self._entries, vars(self._communicator), self._method
        general = MethodType(getattr(type(self._communicator), method), self._communicator)
        if (access := entries.access) is None:  # closed, and the program has kept this
            return general
        self._made = made = _builtin(self._communicator, method, general, access)
        if placed.get(method) is self:  # and not something that calls this, as of torchestra.testing
            placed[method] = made
            if entries.access is None:  # closed meanwhile
                placed.pop(method, None)
        return made


_Kind = TypeVar("_Kind", bound=Entry)


def _entry(
    kind: type[_Kind], communicator: CommunicatorState, access: TensorAccess, **in_python: Callable[..., Any]
) -> _Kind:
    """Return an entry with the fields that all entries have."""
    entry, state = kind(**in_python), communicator.queue.state
    entry.state, entry.access, entry.size = state.address, ctypes.addressof(access), communicator.size
    vars(entry)["kept"] = [state, access]
    return entry


def _finish_collective(communicator: CommunicatorState, name: str) -> Callable[..., None]:
    """Return a function that ends a collective whose kernel has not ended it."""
    engine = cast(Any, communicator.engine)
    kernel, words = getattr(engine.kernels, name), WORDS[name]

    def finish_call(timeout_s: float | None, code: int, *arguments: int) -> None:
        limit = communicator.timeout_s if timeout_s is None else timeout_s
        engine.context.finish(code, kernel, arguments[: 1 + words], limit, None)

    return finish_call


def request_of_collective(
    communicator: CommunicatorState,
    access: TensorAccess,
    in_python: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    prepared: PreparedKernel,
) -> Request:
    """Return the request by which machine code runs a collective repeatedly on the same tensors.

    Args:
        in_python: by field of the request, the functions for calls that are not plain.
    """
    request = _entry(Request, communicator, access, **in_python)
    request.finish_call = _finish_collective(communicator, prepared.name)
    request.leave = cast(Any, communicator.engine).abandon_operation
    request.which = [*WORDS].index(prepared.name)
    request.words[: len(prepared.arguments)] = prepared.arguments
    request.longest_piece, request.threshold = prepared.longest_piece()
    request.nbytes_moved = sum(tensor.nbytes for tensor in tensors)
    if prepared.tables is not None:
        request.tables, request.tables_bytes = prepared.tables.ctypes.data, prepared.tables.nbytes
    _hold_memory(request, tensors)
    vars(request)["kept"].append(prepared)
    return request


def request_of_message(
    communicator: CommunicatorState,
    access: TensorAccess,
    in_python: dict[str, Any],
    tensor: torch.Tensor,
    words: tuple[int, ...],
    *,
    sends: bool,
) -> Request:
    """Return the request by which machine code sends or receives one tensor repeatedly.

    Args:
        in_python: as of :func:`request_of_collective`.
        words: address, length, kind, rank (-1: any) and tag.
    """
    request, engine = _entry(Request, communicator, access, **in_python), cast(Any, communicator.engine)
    mailbox, address = engine.mailbox, ctypes.addressof(request)

    def finish_send(*message: int) -> None:
        mailbox.finish_send(*message, engine.waiter(communicator.timeout_s))

    def finish_recv(*message: int) -> None:
        source = mailbox.finish_recv(*message, engine.waiter(communicator.timeout_s))
        Request.from_address(address).source = source  # the request refers to this function, not the reverse

    def leave(error: BaseException) -> None:
        mailbox.abandon_operation(error, engine.waiter(communicator.timeout_s))

    request.mailbox, request.finish_call = mailbox.address, finish_send if sends else finish_recv
    request.leave, request.sends = leave, sends
    request.words[:] = words
    _hold_memory(request, [tensor])
    vars(request)["kept"].append(mailbox)
    return request


def _hold_memory(request: Request, tensors: Sequence[torch.Tensor]) -> None:
    """Note the addresses of the tensors, and have the request keep them."""
    records = (MemoryRecord * len(tensors))(
        *(MemoryRecord(id(each), each.data_ptr(), each.untyped_storage().nbytes()) for each in tensors)
    )
    request.memory, request.tensors = ctypes.addressof(records), len(tensors)
    vars(request)["kept"] += [records, list(tensors)]


def _make(method: str, kernel: Any, entry: Entry) -> Callable[..., Any]:
    builtin: Callable[..., Any] = _new_builtin(ctypes.addressof(_definition(method, kernel)), entry, None)
    return builtin


def _builtin(
    communicator: CommunicatorState, method: str, general: Callable[..., Any], access: TensorAccess
) -> Callable[..., Any]:
    """Return the entry of a method; ``general`` is the method itself."""
    entry = _entry(Entry, communicator, access, general=general)
    if method in MESSAGES:
        _serve_message(entry, communicator, method)
        return _make(method, MESSAGES[method], entry)
    served = _SERVED[method]
    _serve_collective(entry, communicator, served)
    return _make(method, served.entry, entry)


def _serve_message(entry: Entry, communicator: CommunicatorState, method: str) -> None:
    engine = cast(Any, communicator.engine)
    mailbox, records = engine.mailbox, _message_records()
    finish = mailbox.finish_send if method == "send" else mailbox.finish_recv

    def finish_call(*message: int) -> int | None:
        return finish(*message, engine.waiter(communicator.timeout_s))  # type: ignore[no-any-return]

    def leave(error: BaseException) -> None:
        mailbox.abandon_operation(error, engine.waiter(communicator.timeout_s))

    entry.mailbox, entry.plans, entry.finish_call = mailbox.address, ctypes.addressof(records), finish_call
    entry.leave = leave
    vars(entry)["kept"] += [mailbox, records]


@functools.cache
def _message_records() -> ctypes.Array[PlanRecord]:
    """Return the records that messages use for plans: the dtypes that are neither complex nor quantized."""
    codes = {
        dtype_word(dtype): code
        for dtype, code in DTYPE_CODE.items()
        if not (dtype.is_complex or str(dtype).startswith("torch.q"))
    }
    known = [PlanRecord(word, 0, 0, 1 + code) for word, code in codes.items() if word]
    return (PlanRecord * (len(known) + 1))(*known)


def _serve_collective(entry: Entry, communicator: CommunicatorState, served: _Served) -> None:
    entry.finish_call = _finish_collective(communicator, served.kernel)
    # On an exception the engine, the flight record and the other ranks are told.
    entry.leave = cast(Any, communicator.engine).abandon_operation
    plans = _Plans(entry, communicator, served.row)
    entry.make_plan = plans.make_plan
    vars(entry)["kept"].append(plans)


@functools.cache
def _parameters(method: Callable[..., Any]) -> list[str]:
    """Return the names of a method's parameters, without ``self``."""
    return list(inspect.signature(method).parameters)[1:]


_NO_PLANS = (PlanRecord * 1)()
"""The end of a table alone: what entries serve at first. Nobody writes it."""


class _Plans:
    """Hold the plans that an entry serves: those whose operation has gone the general way once."""

    def __init__(self, entry: Entry, communicator: CommunicatorState, row: Collective) -> None:
        self._entry_address = ctypes.addressof(entry)
        self._general = entry.general
        self._iovecs: list[Any] = []
        self._growing = threading.Lock()
        self._engine = cast(Any, communicator.engine)
        self._row = row
        self._known: list[tuple[int, int, int, int]] = []
        places = _parameters(entry.general.__func__)
        self._op = places.index("op") if row.reduces else None
        self._root = places.index("root") if row.root else None
        self._records: list[Any] = []
        entry.plans = ctypes.addressof(_NO_PLANS)
        if row is BARRIER:
            self._known.append((_ANY_DTYPE, 0, 0, self._engine.barrier_plan.address))
            self._write()

    def _entry(self) -> Entry:
        """Return the entry, which refers to this object; a reference back would make a cycle."""
        return Entry.from_address(self._entry_address)

    def make_plan(self, *arguments: Any) -> Any:
        """Go the general way, and serve such calls from now on."""
        work = self._general(*arguments)
        op = None if self._op is None else arguments[self._op]
        root = None if self._root is None else arguments[self._root]
        if self._row is ALL_REDUCE and arguments[0].__class__ is list:
            self._hold_list(len(arguments[0]))
        dtype = next(tensors_in(arguments)).dtype
        # Another ReduceOp of the same name may be freed, and its address reused.
        named = op is None or any(op is each for each in _OPS)
        if named and not dtype.is_complex and dtype_word(dtype):
            plan = self._engine.plan(self._row, dtype, op, root)
            record = (dtype_word(dtype), 0 if op is None else id(op), root or 0, plan.address)
            if record not in self._known:
                self._known.append(record)
                self._write()
        return work

    def _hold_list(self, number: int) -> None:
        """Make room for a table of ``number`` tensors; keep older ones, which other threads may be using."""
        with self._growing:
            if number > self._entry().longest_list:
                longest = 1 << number.bit_length()
                self._iovecs.append((ctypes.c_int64 * (2 * longest + 1))())
                self._entry().iovec = ctypes.addressof(self._iovecs[-1])
                self._entry().longest_list = longest  # last: no entry may take a table for longer than it is

    def _write(self) -> None:
        """Put all records where the entry finds them; keep older ones, which may still be read."""
        written = -1
        while written != len(self._known):  # another thread may have added one, and have written before
            written = len(self._known)
            known = [PlanRecord(*each) for each in (*self._known[:written], (0, 0, 0, 0))]
            records = (PlanRecord * len(known))(*known)
            self._records.append(records)
            self._entry().plans = ctypes.addressof(records)
