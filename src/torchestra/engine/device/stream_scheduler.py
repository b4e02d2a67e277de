"""Order the streams of a device before and after an operation.

An operation is launched from the caller's current stream: it comes after what the program has launched there.
A synchronous one makes that stream wait for its end; the host does not wait. One that is asynchronous is
launched on a side stream, which waits for the program's; the program's goes on, and waits when the
:class:`DeviceEvent` is joined.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

Refuse = Callable[[], None]
"""Raises why there is nothing more to wait for, if there is not."""


class DeviceEvent(Protocol):
    """A point in a device's work.

    Attributes:
        error: the error with which the launch of the operation before it failed.
    """

    error: Exception | None

    def is_done(self) -> bool:
        """Return whether the device has reached it."""

    def join(self) -> None:
        """Order what the caller launches from now on after it."""


class StreamScheduler(Protocol):
    """Launch operations on one device."""

    device: torch.device

    def run(self, operation: Callable[[], None], *, async_op: bool) -> DeviceEvent:
        """Launch an operation: before what the caller launches next, or concurrently if ``async_op``."""

    def order_after(self, work: Any, refuse: Refuse) -> None:
        """In an operation, order later launches after a torch Work."""

    def after(self, work: Any, then: Callable[[], object] | None) -> DeviceEvent:
        """Return the end of a torch Work that runs concurrently, and of ``then``, which follows it."""

    def event(self) -> DeviceEvent:
        """Return the caller's present point in the device's work."""

    def here(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a function that makes a context in which another thread launches where the caller does."""


class _CudaEvent(DeviceEvent):
    def __init__(self, device: torch.device, event: Any, error: Exception | None = None) -> None:
        self.error = error
        self._device = device
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _EndOfWork(DeviceEvent):
    """The end of a torch Work."""

    def __init__(self, work: Any) -> None:
        self.error = None
        self._work = work

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def join(self) -> None:
        self._work.wait()


class CudaScheduler(StreamScheduler):
    """The scheduler of a CUDA device, for operations of NCCL, which has streams of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def run(self, operation: Callable[[], None], *, async_op: bool) -> DeviceEvent:
        if not async_op:
            operation()
            return self.event()
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        error: Exception | None = None
        with torch.cuda.stream(self._side):
            try:
                operation()
            except Exception as failure:
                error = failure
            return _CudaEvent(self.device, self._side.record_event(), error)

    def order_after(self, work: Any, refuse: Refuse) -> None:
        work.wait()

    def after(self, work: Any, then: Callable[[], object] | None) -> DeviceEvent:
        if then is None:
            return _EndOfWork(work)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work.wait()
            then()
            return self.event()

    def event(self) -> DeviceEvent:
        return _CudaEvent(self.device, torch.cuda.current_stream(self.device).record_event())

    def here(self) -> Callable[[], AbstractContextManager[Any]]:
        return partial(torch.cuda.stream, torch.cuda.current_stream(self.device))
