"""Calls that wait for their answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from torchestra.rpc.thread_state import in_same_scope

_start_future = torch._C.Future.__init__
_await_future = torch._C.Future.wait


class PendingCall(Future):  # type: ignore[type-arg]
    """The future of a call: a ``torch.futures.Future`` whose waiting thread works for the worker meanwhile.

    Attributes:
        peer: the worker called.
        function: what is called, for messages.
        began, timeout_s: when it began by the worker's clock, and how long it may take; 0 for no limit.
        keep: an object to keep alive until the answer is there.
        settler: what completes it: an answer, an error or the end of the worker, whichever came first.
        is_sent: whether it is sure to be sent, whatever interrupts come.
        has_callbacks: whether functions are to be called when it is done.
        finished, leading, latch: see leader_followers.py.
    """

    is_sent = has_callbacks = False

    def __init__(
        self,
        peer: int,
        function: Any,
        began: float,
        timeout_s: float,
        keep: object,
        await_finish: Callable[[PendingCall], None],
    ) -> None:
        _start_future(self, [])
        self.peer = peer
        self.function = function
        self.began = began
        self.timeout_s = timeout_s
        self.keep = keep
        self._await_finish = await_finish
        self.finished = False
        self.leading = False
        self.latch: threading.Lock | None = None

    def is_settled_by(self, settler: object) -> bool:
        """Return whether ``settler`` completes the call: the first to ask does, however often it asks."""
        return self.__dict__.setdefault("settler", settler) is settler

    def is_late(self, now: float) -> bool:
        """Return whether its time is over."""
        return self.timeout_s > 0 and now > self.began + self.timeout_s

    def wait(self) -> Any:
        """Wait for the result of the call and return it, or raise its exception."""
        if not self.finished:
            self._await_finish(self)
        return _await_future(self)

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
