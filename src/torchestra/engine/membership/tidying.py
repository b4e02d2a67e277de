"""Do what nobody waits for a moment later: the ranks of a new group train again by then.

Where ranks have no cores to spare, whatever one of them does while the others wait for it is a part of their
pause, and so is what the processes do that serve the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from torchestra.errors import DistError
from torchestra.system.limits import start_thread

_DELAY_S = 0.25


def tidy_later(task: Callable[[], object]) -> None:
    """Carry out a task in a while, in a thread; it may be left out, as where the store is gone by then."""
    thread = threading.Thread(target=_tidy, args=(_DELAY_S, task), name="torchestra-tidying", daemon=True)
    try:
        start_thread(thread)
    except DistError:  # there is no room for a thread
        _tidy(0.0, task)


def _tidy(delay_s: float, task: Callable[[], object]) -> None:
    time.sleep(delay_s)
    with contextlib.suppress(DistError, OSError):
        task()
