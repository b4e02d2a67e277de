"""Threads of which one runs at a time, in a fixed order, so that a recording is the same each time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torchestra.errors import DistError


class _Turns:
    """The state of one run: whose turn it is, and for what the others wait."""

    def __init__(self, size: int) -> None:
        self.ready: list[Callable[[], bool] | None] = [_at_once] * size  # None: it has ended
        self.wake = [threading.Semaphore(0) for _ in range(size)]
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def hand_on(self, mine: int) -> None:
        """Let the next thread run that can; end the run with an error if none can."""
        size = len(self.ready)
        for step in range(1, size + 1):
            other = (mine + step) % size
            is_ready = self.ready[other]
            if is_ready is not None and (self.error is not None or is_ready()):
                self.wake[other].release()
                return
        if any(is_ready is not None for is_ready in self.ready):
            self.error = DistError("every recorded rank waits for another one")
            self.hand_on(mine)
        else:
            self.ended.set()


class _Stopped(BaseException):
    """Another thread of the run has failed."""


_mine = threading.local()


def _at_once() -> bool:
    return True


def run_in_turns(tasks: Sequence[Callable[[], None]]) -> None:
    """Run each task on a thread of its own, one at a time; a task goes on until it ends or waits.

    Raises:
        DistError: all tasks that have not ended wait. What a task raises is raised too.
    """
    turns = _Turns(len(tasks))

    def run(index: int) -> None:
        _mine.turns, _mine.index = turns, index
        turns.wake[index].acquire()
        try:
            if turns.error is None:
                tasks[index]()
        except _Stopped:
            pass
        except BaseException as error:
            turns.error = turns.error or error
        turns.ready[index] = None
        turns.hand_on(index)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    turns.hand_on(-1)
    turns.ended.wait()
    for thread in threads:
        thread.join()
    if turns.error is not None:
        raise turns.error


def wait_for(has_come: Callable[[], bool]) -> None:
    """Let other threads of the run go on until ``has_come()``."""
    if has_come():
        return
    turns: _Turns = _mine.turns
    index: int = _mine.index
    turns.ready[index] = has_come
    turns.hand_on(index)
    turns.wake[index].acquire()
    if turns.error is not None:
        raise _Stopped
    turns.ready[index] = _at_once
