"""Persistent operations that machine code runs (engine/entries/persistent.py), and the choice of the kind.

A collective that has one meeting is begun by its ``start()`` without the group's queue: its kernel is called,
and publishes this rank's piece. The rest is for this rank alone. ``wait()`` does it, or the queue before it
runs the group's next operation (:meth:`NativeCollective.end_started`), on whatever thread.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.entries import request_of_collective, request_of_message
from torchestra.communicator.host_staging import is_on_gpu, tensors_in
from torchestra.communicator.persistent import (
    PersistentCall,
    PersistentCollective,
    PersistentMessage,
    PersistentOperation,
    copies_between,
)
from torchestra.communicator.work import Work
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.entries import persistent as native
from torchestra.engine.entries.running import WORDS
from torchestra.engine.entry_layout import ENDED, FAILED, INACTIVE, QUEUED, STARTED, Request
from torchestra.engine.native.callable_type import NativeCallable, add_method, bind
from torchestra.engine.native.kernel import address_of
from torchestra.engine.operations import Collective
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import DistError
from torchestra.system.kept_errors import fresh, without_frames
from torchestra.tensors.arguments import check_call
from torchestra.tensors.override import OverriddenError
from torchestra.types import ReduceOp, Timeout

_KNOWN = (torch.Tensor, torch.nn.Parameter)


class _Native(NativeCallable, PersistentOperation):
    """A persistent operation that machine code runs once it has a request; else Python does."""

    _request: Request | None = None

    def __init__(self, *arguments: Any) -> None:
        _add_methods()
        super().__init__(*arguments)
        # Until there is a request, use one that has only the general way.
        self._unbound = Request(**self._in_python())
        self._bind(native.call_slow_path, self._unbound)

    @classmethod
    def _in_python(cls) -> dict[str, Any]:
        """Return the functions that a request has for calls that are not plain."""
        return {
            "general": cls._call_by_python,
            "start": PersistentOperation.start,
            "wait": cls._wait_by_python,
        }

    @staticmethod
    def _call_by_python(operation: Any) -> None:
        """Run a call in Python."""
        raise NotImplementedError

    def is_active(self) -> bool:
        """See :meth:`PersistentOperation.is_active`."""
        return self._state() != INACTIVE or super().is_active()

    def _state(self) -> int:
        return INACTIVE if self._request is None else self._request.active

    def _wait_by_python(self, timeout: Timeout | None = None) -> bool:
        """Do what :meth:`wait` does, where machine code cannot."""
        if self._state() == ENDED:
            self._set_work(None)
        return PersistentOperation.wait(self, timeout)

    def _bind(self, function: Any, request: Request) -> None:
        bind(self, address_of(function), ctypes.addressof(request))

    def _set_work(self, work: Work | None) -> None:
        super()._set_work(work)
        if self._request is not None:
            self._request.active = INACTIVE if work is None else QUEUED

    def _may_be_bound(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether machine code can read the tensors."""
        return self._request is None and all(type(tensor) in _KNOWN for tensor in tensors)


class NativeCollective(_Native, PersistentCollective):
    """A collective that machine code runs, starts and ends from its second start on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._failure: BaseException | None = None
        self._site = ""

    @classmethod
    def _in_python(cls) -> dict[str, Any]:
        return {**super()._in_python(), "hand_over": cls._hand_over}

    @staticmethod
    def _call_by_python(operation: Any) -> None:
        PersistentCollective.__call__(operation)

    def is_completed(self) -> bool:
        """See :meth:`PersistentOperation.is_completed`; has the progress thread end it."""
        if self._state() == STARTED:
            self._hand_over()
        return super().is_completed()

    def _wait_by_python(self, timeout: Timeout | None = None) -> bool:
        state = self._state()
        if state == STARTED:
            self._hand_over()
        elif state == FAILED:
            self._set_work(None)
            self._tell_end()
        return super()._wait_by_python(timeout)

    def _hand_over(self) -> None:
        """Have the group's queue end the operation, which machine code has started."""
        work = self._queue.run(lambda site: self._tell_end(), self.name, True, operations=0)
        self._set_work(work)

    def _tell_end(self) -> list[Any]:
        """Raise the error of the operation, which has ended, if it has failed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise fresh(failure)
        return []

    def end_started(self) -> None:
        """End the operation that machine code has started; called by the queue when it has the group.

        It may be called again after an interrupt. Whoever waits for the operation gets its error.

        Raises:
            KeyboardInterrupt: and any other BaseException that is no Exception.
        """
        request, error = cast(Request, self._request), None
        try:
            self._finish_kernel()
        except BaseException as caught:
            error = caught
        finally:
            self._queue.state.started = 0
        interrupt = None if isinstance(error, Exception) else error
        if interrupt is not None and self._queue.engine.is_aborted:
            error = cast(Any, self._queue.engine).context.aborted()
        if isinstance(error, Exception):
            self._failure = without_frames(error)
        if request.active == STARTED:
            request.active = ENDED if self._failure is None else FAILED
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))  # that of STARTED
        if interrupt is not None:
            raise interrupt

    def _finish_kernel(self) -> None:
        """Run the kernel to its end; abort the group if that cannot be."""
        engine, direct = cast(Any, self._queue.engine), cast(Any, self._direct)
        if moved := self._moved():
            error = DistError(f"{self.name}: {moved}")
            engine.abandon_operation(error)
            raise error
        if engine.is_unfinished:  # not if an interrupt came just behind the end
            direct(self._communicator.timeout_s, self._site)
        elif engine.is_aborted:
            raise engine.context.aborted()

    def _perform(self, site: str | None) -> list[Any]:
        result = super()._perform(site)
        access, direct = self._communicator.entries.access, cast(Any, self._direct)
        tensors = [tensor for tensor, _, _ in self._memory]
        if access is not None and direct is not None and direct.name in WORDS and self._may_be_bound(tensors):
            # A start leaves no line of the program; the first tells which operation it was.
            self._site = f"{site or call_site()} (at its first start)"
            made = request_of_collective(self._communicator, access, self._in_python(), tensors, direct)
            made.active = INACTIVE if self._work is None else QUEUED
            self._request = made
            self._bind(native.collective, made)
        return result


@functools.cache
def _add_methods() -> None:
    """Give the classes the methods that are machine code."""
    starts, waits = PersistentOperation.start.__doc__, PersistentOperation.wait.__doc__
    add_method(NativeCollective, "start", address_of(native.start), starts)
    add_method(NativeMessage, "start", address_of(native.start_message), starts)
    add_method(_Native, "wait", address_of(native.wait), waits)


class NativeMessage(_Native, PersistentMessage):
    """A message that machine code sends or receives."""

    @staticmethod
    def _call_by_python(operation: Any) -> None:
        PersistentMessage.__call__(operation)

    def __init__(
        self, communicator: Communicator, name: str, tensor: torch.Tensor, rank: int | None, tag: int
    ) -> None:
        super().__init__(communicator, name, tensor, rank, tag)
        access = communicator.entries.access
        if access is None or copies_between([self._buffer], [tensor]) or not self._may_be_bound([tensor]):
            return
        kind, peer = DTYPE_CODE[tensor.dtype], -1 if rank is None else rank
        words = (tensor.data_ptr(), tensor.nbytes, kind, peer, self._tag)
        in_python, sends = self._in_python(), self._sends
        self._request = request_of_message(communicator, access, in_python, tensor, words, sends=sends)
        self._request.source = -1
        self._bind(native.send if self._sends else native.recv, self._request)

    def source_rank(self) -> int:
        return self._source if self._request is None or self._sends else self._request.source

    def _end(self, work: Work) -> None:
        super()._end(work)
        if self._request is not None:
            self._request.source = self._source


def persistent_collective(
    communicator: Communicator,
    row: Collective,
    output: Any,
    input: Any,  # noqa: A002 - the row's word
    op: ReduceOp | None,
    root: int | None,
    splits: tuple[Any, Any],
) -> PersistentOperation:
    """Return :meth:`Communicator.collective` as a persistent operation."""
    engine, name = communicator.engine, f"{row.name}_init"
    communicator.queue.refuse_if_closed(name)
    ordinary = partial(communicator.collective, row, output, input, op, root, splits, async_op=True)
    if engine.delegates:
        return PersistentCall(communicator, row.name, ordinary)
    try:
        call = check_call(
            replace(row, name=name),
            output,
            input,
            op,
            root,
            splits,
            engine.rank,
            engine.size,
            not engine.is_fake,
        )
    except OverriddenError:
        return PersistentCall(communicator, row.name, ordinary)
    given = list(tensors_in([output, input]))
    if not engine.is_fake and not all(tensor.is_cpu for tensor in given):
        return PersistentCall(communicator, row.name, ordinary)
    kind = PersistentCollective if communicator.entries.access is None else NativeCollective
    return kind(communicator, row, call, given, op, root)


def persistent_message(
    communicator: Communicator, name: str, tensor: torch.Tensor, rank: int | None, tag: int
) -> PersistentOperation:
    """Return a persistent ``send`` or ``recv`` (its ``name``); ``rank`` is None to receive from any."""
    communicator.queue.refuse_if_closed(f"{name}_init")
    if communicator.engine.delegates or (isinstance(tensor, torch.Tensor) and is_on_gpu(tensor)):
        begin = communicator.isend if name == "send" else communicator.irecv
        return PersistentCall(communicator, name, partial(begin, tensor, rank, tag))  # type: ignore[arg-type]
    kind = PersistentMessage if communicator.entries.access is None else NativeMessage
    return kind(communicator, name, tensor, rank, tag)
