"""``torch.futures.wait_all`` and ``collect_all``, which end at the first error of torchestra's futures too.

torch's own end early only at errors that C++ has set. Those of torchestra's calls and works are set from
Python, and torch's functions see them once all other futures are done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.futures import Future

from torchestra.system.kept_errors import fail_future, fresh

__all__ = ["collect_all", "wait_all"]


def collect_all(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of the list of futures, done when all of them are, or at the first error among them.

    Raises:
        TypeError: one of them is no future.
    """
    collected = _Collected(list(futures))
    for future in collected.futures:
        future.add_done_callback(partial(collected.one_is_done, future))
    return collected.future


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all futures, and return the list of their values; at the first error, raise it.

    Raises:
        TypeError: one of them is no future.
    """
    return [future.wait() for future in collect_all(futures).wait()]


class _Collected:
    """Futures that are waited for together.

    Attributes:
        future: what :func:`collect_all` returns.
    """

    def __init__(self, futures: list[Future[Any]]) -> None:
        for future in futures:
            if not isinstance(future, Future):
                raise TypeError(f"collect_all: expected torch.futures.Future, got {type(future).__name__}")
        self.futures = futures
        self.future: Future[list[Future[Any]]] = Future()
        self._left = len(futures)
        self._lock = threading.Lock()
        if not futures:
            self.future.set_result([])

    def one_is_done(self, future: Future[Any], _: Future[Any]) -> None:
        """Complete the whole if this was the last future, or the first to fail."""
        error: BaseException | None = None
        try:
            future.wait()
        except BaseException as raised:
            error = fresh(raised)
        with self._lock:
            if self._left <= 0:
                return  # another has failed before
            self._left = 0 if error is not None else self._left - 1
            if self._left:
                return
        if error is not None:
            fail_future(self.future, error)
        else:
            self.future.set_result(self.futures)
