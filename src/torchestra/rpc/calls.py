"""A call that waits for its answer, and the future that the caller has of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from torchestra.rpc.thread_state import in_same_context

_LONGEST_LOOK = 0.5


class RpcFuture(Future):  # type: ignore[type-arg]
    """A ``torch.futures.Future`` whose waiting thread works for the worker meanwhile."""

    call: Call | None = None

    def wait(self) -> Any:
        """The result of the call, when it is there; its exception is raised."""
        call = self.call
        if call is not None and not call.done:
            call.await_end(call)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future of what the callback returns, which is called in this thread's autograd context."""
        return super().then(in_same_context(callback))

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have a callback called, in this thread's autograd context, when the future is done."""
        super().add_done_callback(in_same_context(callback))


class Call:
    """What a worker knows of a call that it has made.

    Attributes:
        future: what the caller has; None when it is done.
        peer: the worker called.
        doing: what is called, for messages.
        began, deadline: ``time.monotonic()``; the deadline is None where there is no time-out.
        keep: what must live until the answer is there.
        done, leading, latch: see leader_followers.py.
    """

    __slots__ = (
        "await_end",
        "began",
        "deadline",
        "doing",
        "done",
        "future",
        "keep",
        "latch",
        "leading",
        "peer",
    )

    def __init__(
        self,
        peer: int,
        doing: Any,
        began: float,
        deadline: float | None,
        keep: object,
        await_end: Callable[[Call], None],
    ) -> None:
        self.future: Any = RpcFuture()
        self.future.call = self
        self.peer = peer
        self.doing = doing
        self.began = began
        self.deadline = deadline
        self.keep = keep
        self.await_end = await_end
        self.done = False
        self.leading = False
        self.latch: threading.Lock | None = None


class Pauses:
    """Has time in which this process was stopped not count for calls. Told by who looks after them."""

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def look(self, now: float, *calls: dict[int, Call]) -> None:
        """Put off the deadlines of calls that were under way in a pause, if there was one."""
        since, self._looked = self._looked, now
        for each in calls if now - since > _LONGEST_LOOK else ():
            for call in each.copy().values():
                pause = now - max(since, call.began) - _LONGEST_LOOK
                if call.deadline is not None and pause > 0:
                    call.began += pause
                    call.deadline += pause


class Named:
    """Something that is called, for messages."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name


def name_of(fn: object) -> str:
    """What to call a function in a message."""
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
