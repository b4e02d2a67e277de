"""Calls that wait for their answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.futures import Future

from torchestra.errors import RpcError
from torchestra.rpc.thread_state import in_same_scope
from torchestra.system.kept_errors import fail_future

_start_future = torch._C.Future.__init__
_await_future = torch._C.Future.wait
_set_result = torch._C.Future.set_result
_PAUSE_SECONDS = 0.001


class Pool(Protocol):
    """The threads of a worker: a LeaderFollowersPool."""

    def wait(self, waitable: PendingCall) -> None:
        """Wait until it is finished."""

    def wake(self, waitable: PendingCall) -> bool:
        """Wake the thread that waits for this."""


class PendingCall:
    """A call that waits for its answer. The thread that waits for it works for the worker meanwhile.

    Attributes:
        peer: the worker called.
        function: what is called, for messages.
        began, timeout_s: when it began by the worker's clock, and how long it may take; 0 for no limit.
        keep: an object to keep alive until the answer is there.
        pool: whose threads wait for it.
        settler: what completes it: an answer, an error or the end of the worker, whichever came first.
        is_sent: whether it is sure to be sent, whatever interrupts come.
        finished, leading, latch: see leader_followers.py.
    """

    is_sent = finished = leading = False
    latch: threading.Lock | None = None
    _value: Any = None
    _error: BaseException | None = None

    def __init__(
        self,
        peer: int,
        function: Any,
        began: float,
        timeout_s: float,
        keep: object,
        pool: Pool,
    ) -> None:
        self.peer = peer
        self.function = function
        self.began = began
        self.timeout_s = timeout_s
        self.keep = keep
        self.pool = pool

    def is_settled_by(self, settler: object) -> bool:
        """Return whether ``settler`` completes the call: the first to ask does, however often it asks."""
        return self.__dict__.setdefault("settler", settler) is settler

    def is_late(self, now: float) -> bool:
        """Return whether its time is over."""
        return self.timeout_s > 0 and now > self.began + self.timeout_s

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Set its result, and wake the thread that waits; with the same result it may be done again."""
        self.keep = None
        self._value, self._error = value, error
        self.finished = True
        if self.latch is not None or self.leading:
            self.pool.wake(self)

    def wait(self) -> Any:
        """Wait for the result of the call and return it, or raise its exception."""
        if not self.finished:
            self.pool.wait(self)
            while not self.finished:  # the worker is being closed, and will say so
                time.sleep(_PAUSE_SECONDS)
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # the error refers to this frame


class FutureCall(PendingCall, Future):  # type: ignore[type-arg]
    """A pending call that is a ``torch.futures.Future`` as well.

    Attributes:
        has_callbacks: whether functions are to be called when it is done.
    """

    has_callbacks = False

    def __init__(self, *arguments: Any) -> None:
        _start_future(self, [])
        super().__init__(*arguments)

    def complete(self, value: Any, error: BaseException | None) -> None:
        """See :class:`PendingCall`."""
        self.keep = None
        self.finished = True  # before callbacks ask it
        if not self.done():
            if error is None:
                _set_result(self, value)
            else:
                fail_future(self, error)
        if self.latch is not None or self.leading:
            self.pool.wake(self)

    def wait(self) -> Any:
        """See :class:`PendingCall`."""
        if not self.finished:
            self.pool.wait(self)
        try:
            return _await_future(self)
        finally:
            # What is raised refers to this frame, and is referred to by the future from C++, where no garbage
            # collector looks: the caller's frame and all that it knows would stay for ever.
            del self

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of what the callback returns, which is called in this thread's scope."""
        self.has_callbacks = True
        return super().then(in_same_scope(callback))

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have a callback run, in this thread's scope, when the future is done."""
        self.has_callbacks = True
        super().add_done_callback(in_same_scope(callback))


class Label:
    """Stands for something that is called, in messages."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name


def name_of(function: object) -> str:
    """Return the name of a function, for messages."""
    return (
        getattr(function, "__qualname__", None)
        or getattr(function, "__name__", None)
        or type(function).__name__
    )


def refuse_other_than_future(result: Any) -> None:
    """Refuse what a marked function has returned, unless it is a future.

    Raises:
        RpcError: it is something else.
    """
    if not isinstance(result, torch._C.Future):
        raise RpcError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future"
            f" object, but got {type(result)}"
        )
