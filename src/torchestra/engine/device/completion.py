"""Watches the operations that are under way on a device: one thread for each group that has any.

The host does not wait for them, so no caller sees that a rank has died or that time is up. This thread does:
while anything is under way it checks whether that has ended, whether the group was aborted, whether a rank
has died, and whether an operation's time is over. On failure it aborts the group, for all ranks, and torch's
communicator, which ends the waits on the device; the contents of the operations' tensors are then undefined,
and every later operation raises the error. It also tells the Works of asynchronous operations that these have
ended.

It sleeps when nothing is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torchestra.engine.membership.rank_context import RankContext
from torchestra.errors import CollectiveTimeoutError, DistBackendError
from torchestra.system.deadline import Deadline

_POLL_SECONDS = 1e-3
_LIVENESS_SECONDS = 0.05
_CLOSE_SECONDS = 5.0


class PendingOperation(NamedTuple):
    """A torch operation that is under way.

    Attributes:
        doing: what it is, for messages.
        is_done: returns whether it has ended.
        deadline: by which it must have ended.
        site: the line of the program that called.
    """

    doing: str
    is_done: Callable[[], bool]
    deadline: Deadline
    site: str


class CompletionThread:
    """Watch a group's operations on a device, in a thread.

    Args:
        context: this rank in the group.
        name: of the group.
        give_up: ends waits on the device with an error; may take long.
    """

    def __init__(self, context: RankContext, name: str, give_up: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        """Why no operation can be begun any more."""
        self.looking = threading.RLock()
        """Held while the thread looks, so that who sees the group aborted may wait for what it has found."""
        self._context = context
        self._name = name
        self._give_up = give_up
        self._pending: deque[PendingOperation] = deque()
        # The second is called once the first returns True; with None, or the group's error.
        self._waiting: deque[tuple[Callable[[], bool], Callable[[BaseException | None], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._suspect: int | None = None
        self._next_check = 0.0

    def add(self, pending: PendingOperation) -> None:
        """Watch an operation."""
        with self._changed:
            self._pending.append(pending)
            self._wake()

    def tell(self, is_done: Callable[[], bool], end: Callable[[BaseException | None], None]) -> None:
        """Call ``end`` with None when ``is_done()``, or with the reason when the group has failed."""
        with self._changed:
            self._waiting.append((is_done, end))
            self._wake()

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until nothing is under way; return whether that is so."""
        return any(not (self._pending or self._waiting) for _ in Deadline(seconds).polls(_POLL_SECONDS))

    def close(self) -> None:
        """End the thread, and give up what is still under way."""
        with self._changed:
            self._is_closed = True
            under_way = bool(self._pending or self._waiting)
            self._changed.notify()
        if under_way and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _wake(self) -> None:
        if self._thread is None:
            name = f"torchestra-devices-{self._name}-{self._context.group_rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._pending or self._waiting or self._is_closed):
                    self._changed.wait()
                if self._is_closed and not (self._pending or self._waiting):
                    return
            with self.looking:
                try:
                    if self._is_closed:
                        raise DistBackendError(f"group {self._name!r} was destroyed while it was under way")
                    self._check_all()
                except Exception as error:
                    self.fail(error)
            time.sleep(_POLL_SECONDS)

    def _check_all(self) -> None:
        # An entry stays in its queue while it is checked: drain() takes one that is in neither queue for
        # ended.
        for _ in range(len(self._waiting)):
            is_done, end = self._waiting[0]
            if is_done():
                self._waiting.popleft()
                end(None)
            else:
                self._waiting.rotate(-1)
        for _ in range(len(self._pending)):
            if self._pending[0].is_done():
                self._pending.popleft()
            else:
                self._pending.rotate(-1)
        now = time.monotonic()
        if not self._pending:
            self._suspect = None
        elif now >= self._next_check:
            self._next_check = now + _LIVENESS_SECONDS
            for pending in tuple(self._pending):
                self._check(pending)

    def _check(self, pending: PendingOperation) -> None:
        """Raise if waiting for this operation any longer is in vain."""
        context, doing = self._context, pending.doing
        self._suspect = context.check(doing, None, None, self._suspect, alone=True, site=pending.site)
        if not pending.deadline.expired():
            return
        message = (
            f"{doing} of group {self._name!r} timed out after {pending.deadline.elapsed():.1f} s on rank"
            f" {context.group_rank} (the timeout is {pending.deadline.timeout_s:g} s); it was called at"
            f" {pending.site}."
        )
        elsewhere = context.ask_elsewhere()
        context.abort(message, explain=partial(context.report, range(context.size), pending.site, elsewhere))
        raise CollectiveTimeoutError(str(context.aborted()))

    def fail(self, error: Exception) -> None:
        """Give up all operations under way, and refuse new ones."""
        if self.failure is None:
            self.failure = error
        if not self._context.is_aborted and not self._is_closed:
            self._context.abort(f"rank {self._context.group_rank}: {error}")
        threading.Thread(target=self._give_up, name="torchestra-devices-abort", daemon=True).start()
        with self.looking:
            self._pending.clear()
            while self._waiting:
                _, end = self._waiting.popleft()
                end(self.failure)
