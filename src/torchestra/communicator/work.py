"""The handle of an operation that runs while the program goes on."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchestra.errors import CollectiveTimeoutError, DistError
from torchestra.system.forking import forks_so_far, refusal
from torchestra.system.kept_errors import fail_future, fresh, without_frames
from torchestra.system.untraced import untraced
from torchestra.types import Timeout, timeout_seconds

_POLL_SECONDS = 1.0  # how long a waiting thread may miss an end if an interrupt has prevented its wake-up


class WorkResult(enum.IntEnum):
    """Say how an operation has ended."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2


def _result_of(future: torch.futures.Future[Any]) -> int:
    try:
        future.value()
    except CollectiveTimeoutError:
        return WorkResult.TIMEOUT
    except Exception:
        return WorkResult.COMM_ERROR
    return WorkResult.SUCCESS


class _Future(torch.futures.Future[Any]):
    """A future that passes errors on unchanged to the futures that are chained to it.

    torch's own turns an error in a chain into a RuntimeError with the traceback as its message, which an
    ``except GroupAbortedError`` does not catch.
    """

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        """Return a future of the callback's result; the callback gets this future when it is done."""
        chained = _Future()

        def run(done: torch.futures.Future[Any]) -> None:
            try:
                result = callback(done)
            except Exception as error:
                fail_future(chained, error)
            except BaseException as error:
                fail_future(chained, DistError(f"the callback of a future was interrupted: {error!r}"))
                raise
            else:
                chained.set_result(result)

        self.add_done_callback(run)
        return chained


@untraced
class Work:
    """An asynchronous operation of a group, as every collective returns it with ``async_op=True``.

    It may be dropped: the operation runs anyway, and its tensors are kept alive until it ends.
    """

    def __init__(self, description: str = "an operation", *, held: bool = False) -> None:
        self._description = description
        self.held = held
        """Whether the operation waits for the end of the ``with`` block that collects it."""
        self.progress: Callable[[], object] | None = None
        """A function that a waiting thread may call, to run the operation until it has ended."""
        self.start: Callable[[], object] | None = None
        """A function that a thread may call that waits without running the operation; has it begun now."""
        self._ended = False
        self._sleepers: list[threading.Lock] = []
        self._lock = threading.Lock()
        self._made_in = forks_so_far()
        self._exception: BaseException | None = None
        self._result: list[Any] = []
        self._keeps_result = True
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None

    @classmethod
    def finished(cls, description: str, result: list[Any]) -> Work:
        """Return the Work of an operation that has already ended well."""
        work = cls(description)
        work.finish(result)
        return work

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the operation is done.

        Args:
            timeout: how long to wait here; default, and for ``timedelta(0)``, as in torch: as long as the
                operation itself may take. Without one the calling thread runs the operation itself, if it has
                not been begun.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ``timeout`` has passed; the operation goes on, and can be waited for
                again.
            DistError: the operation has failed.
        """
        if isinstance(timeout, timedelta) and not timeout:
            timeout = None
        if timeout is not None:
            timeout_seconds(timeout, "wait")
        if not self._ended:
            if self._made_in != forks_so_far():
                raise refusal(f"{self._description} goes on elsewhere, and cannot be waited for")
            if self.held:
                raise DistError(
                    f"{self._description} is run at the end of the `with` block that collects it; wait for it"
                    " after that"
                )
            timeout_s = None if timeout is None else timeout_seconds(timeout, "wait")
            if timeout_s is None and (progress := self.progress) is not None:
                with contextlib.suppress(DistError):  # which is raised below
                    progress()
            elif (start := self.start) is not None:
                start()
            if not self.await_end(timeout_s):
                raise CollectiveTimeoutError(
                    f"{self._description} is not done after waiting {timeout_s} s for it"
                )
        if self._exception is not None:
            raise fresh(self._exception)
        return True

    def await_end(self, timeout_s: float | None = None) -> bool:
        """Wait at most ``timeout_s`` for the operation's end, well or not; return whether it has ended."""
        # An interrupt may leave a threading.Event, whose code is Python, locked for ever.
        sleeper = threading.Lock()
        sleeper.acquire()
        with self._lock:
            self._sleepers.append(sleeper)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended:
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
            if left <= 0:
                break
            sleeper.acquire(timeout=left)
        return self._ended

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self._ended

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._ended and self._exception is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed operation, or None."""
        return self._exception

    def result(self) -> list[Any]:
        """Return the tensors that the operation has filled (for some, lists of tensors), once it has ended.

        Raises:
            DistError: it has not ended yet, or it has failed.
        """
        if not self._ended:
            raise DistError(f"{self._description} has no result yet; call wait() first")
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Return the sender's rank in the group, if this is a receive that has ended; else -1."""
        return self._source

    def synchronize(self) -> None:
        """Do :meth:`wait`; then the tensors can be used on every stream of their device."""
        self.wait()

    def block_current_stream(self) -> None:
        """Have the device's current stream wait for the operation; here :meth:`wait` does, on the host."""
        self.wait()

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return a future of the outcome: 0 success, 1 time-out, 2 another error (torch's WorkResult)."""
        return self.get_future().then(_result_of)

    def _source_rank(self) -> int:
        """See :meth:`source_rank`; torch's name for it."""
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that holds :meth:`result`, or the exception, when the operation has ended.

        Callbacks added by ``then`` run on the thread that ends the operation.
        """
        with self._lock:
            if self._future is None:
                self._future = _Future()
                if self._ended:
                    self._complete_future(self._future)
            future = self._future
        if (start := self.start) is not None:
            start()
        return future

    def has_future(self) -> bool:
        """Return whether :meth:`get_future` has been called: its callbacks may do anything."""
        return self._future is not None

    def is_in_callbacks(self) -> bool:
        """Return whether the operation has ended, and there is a future that is told so, or has been."""
        return self._ended and self._future is not None

    def finish(self, result: list[Any], source: int = -1, dequeue: Callable[[], None] | None = None) -> None:
        """Note, for the group, that the operation has ended well.

        ``dequeue`` is called before waiting threads are woken, but after the callbacks of the future,
        which may call operations that are to come first.
        """
        with self._lock:
            self._result = result if self._keeps_result else []
        self._source = source
        self._end(dequeue)

    def forget_result(self) -> None:
        """Keep the tensors only while the operation runs; afterwards :meth:`result` is empty."""
        with self._lock:
            self._keeps_result = False
            self._result = []

    def fail(self, exception: BaseException, dequeue: Callable[[], None] | None = None) -> None:
        """Note, for the group, that the operation has failed."""
        self._exception = without_frames(exception)
        self._end(dequeue)

    def _end(self, dequeue: Callable[[], None] | None) -> None:
        with self._lock:
            future = self._future
            if future is None and dequeue is not None:
                dequeue()
            self._ended = True
            for sleeper in self._sleepers:
                with contextlib.suppress(RuntimeError):  # it has been woken before an interrupt
                    sleeper.release()
        self.progress = self.start = None  # they refer to this
        if future is not None:
            if not future.done():
                self._complete_future(future)
            if dequeue is not None:
                dequeue()

    def _complete_future(self, future: torch.futures.Future[Any]) -> None:
        if self._exception is None:
            future.set_result(self._result)
            return
        error = self._exception
        if not isinstance(error, Exception):
            error = DistError(f"{self._description} was interrupted: {error!r}")
        fail_future(future, error)

    def __repr__(self) -> str:
        if not self._ended:
            state = "running"
        else:
            state = "done" if self._exception is None else f"failed: {self._exception!r}"
        return f"<Work {self._description}, {state}>"
