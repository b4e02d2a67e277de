"""Messages between two ranks of a group: argument checks, time-outs, layouts; blocking and not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import profiler

from torchestra.arguments.annotations import check_integer
from torchestra.communicator import profiling
from torchestra.communicator.device_routing import messages_of
from torchestra.communicator.fake_tensors import or_fake
from torchestra.communicator.host_staging import receive_buffer, send_buffer
from torchestra.communicator.queue import OperationQueue
from torchestra.communicator.work import Work
from torchestra.engine.interface import Engine
from torchestra.errors import DistError
from torchestra.tensors import checks
from torchestra.tensors.contiguity import make_contiguous, write_back


class CommunicatorState(Protocol):
    """What messages and entries ask of a Communicator."""

    engine: Engine
    queue: OperationQueue
    size: int
    timeout_s: float

    def limit(self, timeout_s: float | None) -> float:
        """Return how long an operation may wait, in seconds."""


class Messages(Protocol):
    """Messages of tensors of a device, which do not go through the host."""

    def batch(
        self, messages: Sequence[tuple[bool, torch.Tensor, int]], timeout_s: float | None = None
    ) -> list[Work]:
        """Begin to send (True) and receive tensors to and from ranks, in no order; return a Work for each."""


@or_fake
def send(
    communicator: CommunicatorState, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float | None
) -> None:
    """See :meth:`Communicator.send`."""
    name = "send"
    if profiler._is_profiler_enabled and profiling.wanted():
        with profiling.recorded(name, [tensor]):
            return send(communicator, tensor, rank, tag, timeout_s)
    if (work := _by_device(communicator, name, tensor, rank, tag, timeout_s)) is not None:
        work.wait()
        return None
    if communicator.engine.delegates:
        isend(communicator, tensor, rank, tag, timeout_s).wait()
        return None
    buffer, tag = checked(communicator, send_buffer(tensor), tag, name, written=False)
    communicator.engine.send(buffer, rank, tag, communicator.limit(timeout_s))
    return None


@or_fake
def recv(
    communicator: CommunicatorState, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float | None
) -> int:
    """See :meth:`Communicator.recv`."""
    name = "recv"
    if profiler._is_profiler_enabled and profiling.wanted():
        with profiling.recorded("recvAnySource" if rank is None else name, [tensor]):
            return recv(communicator, tensor, rank, tag, timeout_s)
    work = _by_device(communicator, name, tensor, rank, tag, timeout_s)
    if work is None and communicator.engine.delegates:
        work = irecv(communicator, tensor, rank, tag, timeout_s)
    if work is not None:
        work.wait()
        return work._source_rank() if rank is None else rank
    target, copy_back = receive_buffer(tensor)
    buffer, tag = checked(communicator, target, tag, name, written=True)
    source = communicator.engine.receive(buffer, rank, tag, communicator.limit(timeout_s))
    if not communicator.engine.is_fake:
        write_back([target], [buffer])
        copy_back()
    return source


@or_fake
def isend(
    communicator: CommunicatorState, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float | None
) -> Work:
    """See :meth:`Communicator.isend`."""
    name, engine = "isend", communicator.engine
    if profiler._is_profiler_enabled and profiling.wanted():
        with profiling.recorded("send", [tensor]):
            return isend(communicator, tensor, rank, tag, timeout_s)
    if (work := _by_device(communicator, name, tensor, rank, tag, timeout_s)) is not None:
        return work
    if engine.delegates:
        return engine.begin_send(tensor, rank, tag, communicator.limit(timeout_s), _ignore)  # type: ignore[no-any-return]
    buffer, tag = checked(communicator, send_buffer(tensor), tag, name, written=False)
    return begin_send(communicator, tensor, buffer, rank, tag, timeout_s)


def begin_send(
    communicator: CommunicatorState,
    tensor: torch.Tensor,
    buffer: torch.Tensor,
    rank: int,
    tag: int,
    timeout_s: float | None = None,
) -> Work:
    """Begin to send a tensor that was checked; its elements are in the buffer."""
    work = Work(f"isend to rank {rank} of group {communicator.queue.name!r}")
    end = partial(_end, work, tensor, buffer, None)
    limit = communicator.limit(timeout_s)
    return _waitable(communicator, work, communicator.engine.begin_send(buffer, rank, tag, limit, end))


@or_fake
def irecv(
    communicator: CommunicatorState, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float | None
) -> Work:
    """See :meth:`Communicator.irecv`."""
    name, engine = "irecv", communicator.engine
    if profiler._is_profiler_enabled and profiling.wanted():
        with profiling.recorded("recvAnySource" if rank is None else "recv", [tensor]):
            return irecv(communicator, tensor, rank, tag, timeout_s)
    if (work := _by_device(communicator, name, tensor, rank, tag, timeout_s)) is not None:
        return work
    if engine.delegates:
        return engine.begin_receive(tensor, rank, tag, communicator.limit(timeout_s), _ignore)  # type: ignore[no-any-return]
    target, copy_back = receive_buffer(tensor)
    buffer, tag = checked(communicator, target, tag, name, written=True)

    def put() -> None:
        write_back([target], [buffer])
        copy_back()

    return begin_receive(communicator, tensor, buffer, rank, tag, timeout_s, put)


def begin_receive(
    communicator: CommunicatorState,
    tensor: torch.Tensor,
    buffer: torch.Tensor,
    rank: int | None,
    tag: int,
    timeout_s: float | None = None,
    put: Callable[[], object] | None = None,
) -> Work:
    """Begin to receive into a buffer that was checked; ``put`` copies from it, by default to the tensor."""
    source = "any rank" if rank is None else f"rank {rank}"
    work = Work(f"irecv from {source} of group {communicator.queue.name!r}")
    if put is None:
        put = partial(write_back, [tensor], [buffer])
    end = partial(_end, work, tensor, buffer, None if communicator.engine.is_fake else put)
    limit = communicator.limit(timeout_s)
    return _waitable(communicator, work, communicator.engine.begin_receive(buffer, rank, tag, limit, end))


def put(communicator: CommunicatorState, tensor: torch.Tensor, rank: int, window: int, offset: int) -> Work:
    """Begin to write a tensor into what a rank on another host has exposed (:meth:`Engine.begin_put`)."""
    communicator.queue.refuse_if_closed("put")
    work = Work(f"put to rank {rank} of group {communicator.queue.name!r}")
    end, limit = partial(_end, work, tensor, tensor, None), communicator.limit(None)
    transfer = communicator.engine.begin_put(tensor, rank, window, offset, limit, end)
    return _waitable(communicator, work, transfer)


def _by_device(
    communicator: CommunicatorState,
    name: str,
    tensor: torch.Tensor,
    rank: int | None,
    tag: int,
    timeout_s: float | None,
) -> Work | None:
    """Begin a message of a device's tensor, if the device's communicator serves it; else return None."""
    messages = messages_of(communicator, name, tensor, rank, tag)
    if messages is None or rank is None:
        return None
    return messages.batch([("send" in name, tensor, rank)], timeout_s)[0]  # type: ignore[no-any-return]


def checked(
    communicator: CommunicatorState, tensor: torch.Tensor, tag: int, name: str, *, written: bool
) -> tuple[torch.Tensor, int]:
    """Return the contiguous memory of a message's tensor, and its tag."""
    is_fake = communicator.engine.is_fake
    checks.check_tensor(tensor, "tensor", name, written=written, real=not is_fake)
    communicator.queue.refuse_if_closed(name)
    return tensor if is_fake else make_contiguous(tensor), check_integer(tag, "tag", name)


def _waitable(communicator: CommunicatorState, work: Work, transfer: Any) -> Work:
    """Return the Work of a message; while the program waits for it, the engine makes progress."""
    work.progress = partial(communicator.engine.complete, transfer)
    if work.is_completed():  # maybe before that was set
        work.progress = None
    return work


def _end(
    work: Work, tensor: torch.Tensor, buffer: torch.Tensor, put: Callable[[], object] | None, transfer: Any
) -> None:
    if transfer.error is not None:
        work.fail(transfer.error)
        return
    try:
        if put is not None:
            put()
    except BaseException as error:
        if isinstance(error, Exception):
            work.fail(error)
            return
        # The thread that runs this gets the interrupt itself; those that wait for the message get this.
        work.fail(DistError(f"a message was received, but not copied to its tensor: {error!r}"))
        raise
    work.finish([tensor], transfer.source)


def _ignore(_: object) -> None:
    pass
