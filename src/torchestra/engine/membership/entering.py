"""Enter a group in a thread of its own, so that the rank's program keeps looking at what else happens."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torchestra.system.deadline import Deadline
from torchestra.system.limits import start_thread


class EnteredGroup(Protocol):
    """A rank's part in a group that it has entered."""

    def close(self) -> None:
        """Leave it."""


E = TypeVar("E", bound=EnteredGroup)


class EntryThread(Generic[E]):
    """A rank on its way into a new group.

    Args:
        enter: enters it.
        error_delay_s: for how long an error waits for another reason to give the group up: it may be because
            of another rank's death, which will be known.
        cancel: makes ``enter`` end soon, if the group is given up meanwhile; it may be called by several
            ranks.

    Attributes:
        entered: what ``enter`` has returned; None before.
        error: what it has raised.
    """

    def __init__(
        self, enter: Callable[[], E], error_delay_s: float, cancel: Callable[[], None] | None = None
    ) -> None:
        self.entered: E | None = None
        self.error: BaseException | None = None
        self._error_delay_s, self._error_deadline = error_delay_s, Deadline()
        self._abandoned = False
        self._lock = threading.Lock()
        self._enter, self._cancel = enter, cancel
        # In the context of the rank, so that the group's objects know which rank they are of.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run,), name="torchestra-entering", daemon=True
        )
        start_thread(self._thread)

    def has_entered(self) -> bool:
        """Return whether the rank has entered the group.

        Raises:
            BaseException: the error that entering has ended with, some time ago.
        """
        if self._thread.is_alive():
            return False
        if self.error is not None:
            if self._error_deadline.timeout_s == float("inf"):
                self._error_deadline = Deadline(self._error_delay_s)
            if self._error_deadline.expired():
                raise self.error
        return self.entered is not None

    def has_ended(self) -> bool:
        """Return whether the rank is on its way no more."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Sleep until the rank has entered the group, or has failed to, at most so long."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        else:
            time.sleep(seconds)

    def abandon(self) -> None:
        """Leave the group, now or when it has been entered."""
        with self._lock:
            self._abandoned = True
            entered = self.entered
        if entered is not None:
            entered.close()
        elif self._cancel is not None and self._thread.is_alive():
            self._cancel()

    def _run(self) -> None:
        try:
            entered = self._enter()
        except BaseException as error:
            self.error = error
            return
        with self._lock:
            self.entered = entered
            abandoned = self._abandoned
        if abandoned:
            entered.close()
