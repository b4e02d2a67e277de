"""A torch backend that the first operation creates, and the launch of operations on it.

The first operation with a peer connects, and may have to wait for the other ranks inside of torch; a thread
of its own launches it, so that the caller can be interrupted.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from torchestra.engine.device.completion import CompletionThread, PendingOperation
from torchestra.engine.device.stream_scheduler import StreamScheduler
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import DistError
from torchestra.system.deadline import Deadline

ALL_RANKS = "everybody"
"""With whom an operation of the whole group connects."""

_CAUSE_SECONDS = 1.0
_CAUSE_POLL_SECONDS = 0.05
_CONNECT_POLL_SECONDS = 2e-3
_CLOSE_SECONDS = 5.0


class LateBackend:
    """One rank's backend, created late.

    Args:
        context: this rank in the group.
        scheduler: how operations are launched on the device.
        name: of the group.
        open_backend: makes the backend, and an object that must live as long.

    Attributes:
        scheduler: the argument.
        watch: watches the operations under way.
        launched: how many operations this rank has begun.
    """

    def __init__(
        self,
        context: RankContext,
        scheduler: StreamScheduler,
        name: str,
        open_backend: Callable[[], tuple[Any, Any]],
    ) -> None:
        self.scheduler = scheduler
        self.watch = CompletionThread(context, name, self._abort)
        self.launched = 0
        self._context = context
        self._open_backend = open_backend
        self._backend: Any = None
        self._held: Any = None
        self._connected: set[Hashable] = set()
        _backends.add(self)

    def refuse(self) -> None:
        """Raise if no operation can be begun, or waited for, any more."""
        if self._context.is_aborted or self.watch.failure is not None:
            with self.watch.looking:
                failure = self.watch.failure
            raise self._context.aborted() if failure is None else failure.with_traceback(None)

    def launch(
        self, doing: str, seconds: float, site: str | None, begin: Callable[[Any], Any], ends: set[Hashable]
    ) -> Any:
        """Begin an operation; return torch's Work.

        Args:
            doing: what it is, for messages.
            seconds: how long it may take.
            site: the line of the program that called; default: that of the caller.
            begin: given the backend, begins it.
            ends: the peers that it connects with, if it has not yet.
        """
        self.refuse()
        self.launched += 1
        site = site or call_site()
        try:
            if ends <= self._connected:
                work = begin(self._backend)
            else:
                work = self._connect(doing, seconds, site, begin)
                self._connected |= ends
        except RuntimeError as error:
            self._raise_cause(doing, error)
        self.watch.add(PendingOperation(doing, work.is_completed, Deadline(seconds), site))
        return work

    def order_after(self, work: Any, doing: str) -> None:
        """Order later launches after this Work."""
        try:
            self.scheduler.order_after(work, self.refuse)
        except RuntimeError as error:
            self._raise_cause(doing, error)

    def close(self) -> None:
        """Shut the backend down when all operations have ended, else abort it."""
        self.watch.close()
        backend, self._backend = self._backend, None
        if backend is None or self.watch.failure is not None:
            return  # or the watch has aborted it
        end = backend.abort if self._context.is_aborted else backend.shutdown
        thread = threading.Thread(target=end, name="torchestra-devices-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

    def _connect(self, doing: str, seconds: float, site: str, begin: Callable[[Any], Any]) -> Any:
        """Launch an operation from another thread, because torch may wait for the other ranks in it."""
        here, ended = self.scheduler.here(), threading.Event()
        outcome: list[Any] = []

        def launch() -> None:
            try:
                with here():
                    if self._backend is None:
                        self._backend, self._held = self._open_backend()
                    outcome.append(begin(self._backend))
            except Exception as error:
                outcome.append(error)
            finally:
                ended.set()

        threading.Thread(target=launch, name="torchestra-devices-connect", daemon=True).start()
        self.watch.add(PendingOperation(doing, ended.is_set, Deadline(seconds), site))
        while not ended.wait(_CONNECT_POLL_SECONDS):
            self.refuse()
        (result,) = outcome
        if isinstance(result, Exception):
            raise result
        return result

    def _raise_cause(self, doing: str, error: RuntimeError) -> NoReturn:
        """Raise why an operation has failed inside of torch, as far as this group knows or soon learns."""
        if isinstance(error, DistError):
            raise error
        context, suspect = self._context, None
        try:
            for _ in Deadline(_CAUSE_SECONDS).polls(_CAUSE_POLL_SECONDS):
                self.refuse()
                suspect = context.check(doing, None, None, suspect, alone=True)
            context.abort(f"rank {context.group_rank}: {doing} failed: {str(error).splitlines()[0]}")
            raise context.aborted()
        except DistError as cause:
            self.watch.fail(cause)
            raise cause from error

    def _abort(self) -> None:
        if (backend := self._backend) is not None:
            backend.abort()


_backends: weakref.WeakSet[LateBackend] = weakref.WeakSet()


def _close_all() -> None:
    """Close all at exit: no torch thread may outlive the interpreter."""
    for backend in tuple(_backends):
        backend.close()


atexit.register(_close_all)
