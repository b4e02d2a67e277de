"""The handle of an operation that runs while the program goes on."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torchestra.errors import CollectiveTimeoutError, DistError
from torchestra.types import Timeout, timeout_seconds

__all__ = ["Work"]


class Work:
    """An asynchronous operation of a group, as every collective returns it with ``async_op=True``.

    It may be dropped: the operation runs all the same, and its tensors are kept alive until then.
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._exception: BaseException | None = None
        self._result: list[torch.Tensor] = []
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the operation is done.

        Args:
            timeout: how long to wait here; default: as long as the operation itself may take.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ``timeout`` has passed; the operation goes on, and can be waited for
            again. DistError: what the operation failed with.
        """
        if not self._done.is_set():
            seconds = None if timeout is None else timeout_seconds(timeout)
            if not self._done.wait(seconds):
                raise CollectiveTimeoutError(
                    f"{self._description} is not done after waiting {seconds} s for it"
                )
        if self._exception is not None:
            raise self._exception
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._done.is_set() and self._exception is None

    def exception(self) -> BaseException | None:
        """What the operation failed with, or None."""
        return self._exception

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation has filled, once it has ended well.

        Raises:
            DistError: it has not ended yet, or what it failed with.
        """
        if not self._done.is_set():
            raise DistError(f"{self._description} has no result yet; call wait() first")
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Of a receive that has ended: the rank that sent, in the group's numbering, or -1."""
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that holds :meth:`result`, or the exception, when the operation has ended.

        Callbacks added by ``then`` run on the thread that ends the operation.
        """
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._settle(self._future)
            return self._future

    def finish(self, result: list[torch.Tensor], source: int = -1) -> None:
        """For the group: the operation has ended well."""
        self._result = result
        self._source = source
        self._end()

    def fail(self, exception: BaseException) -> None:
        """For the group: the operation has failed."""
        self._exception = exception
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._exception is None:
            future.set_result(self._result)
        elif isinstance(self._exception, Exception):
            future.set_exception(self._exception)
        else:
            future.set_exception(DistError(f"{self._description} was interrupted: {self._exception!r}"))

    def __repr__(self) -> str:
        if not self._done.is_set():
            state = "running"
        else:
            state = "done" if self._exception is None else f"failed: {self._exception!r}"
        return f"<Work {self._description}, {state}>"
