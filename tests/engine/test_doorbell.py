"""Test the doorbell of a queue (engine/kernels/doorbell.py): no wake-up is lost, whatever happens when.

The kernels are run as Python, one access to the shared words at a time, in every order in which those of two
threads can follow each other.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

from torchestra.engine.kernels import doorbell
from torchestra.engine.kernels.waiting import FUTEX_WAIT, FUTEX_WAKE

LIMIT_S = 60.0
# Of close() and ring(), what comes after these accesses is of no consequence for the sleeper.
DECISIVE = 4


class Actor(threading.Thread):
    """Runs a kernel as Python, up to the next access each time it is told to."""

    def __init__(self, kernel: Any, words: dict[int, int]) -> None:
        super().__init__(daemon=True)
        self.words = words
        self.asleep_on: int | None = None
        self.others: list[Actor] = []
        self.result: int | None = None
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        own = {
            "load_ordered": self._load,
            "load_acquire": self._load,
            "store_ordered": self._store,
            "fetch_add": self._add,
            "syscall": self._futex,
            "SHORT_SLEEPS": 0,  # it sleeps as soon as there is nothing to do
        }
        scope = {**vars(doorbell), **own}
        for name in ("ring", "start_now"):
            scope[name] = FunctionType(getattr(doorbell, name).function.__code__, scope, name)
        self._function: Callable[[int], int] = FunctionType(kernel.function.__code__, scope)
        self.start()
        self._stands.acquire()

    def run(self) -> None:
        self._stands.release()
        self._go.acquire()
        self.result = self._function(0)
        self._stands.release()

    def step(self) -> bool:
        """Let it make one access, and what follows up to the next; whether it could."""
        if self.result is not None or self.asleep_on is not None:
            return False
        self._go.release()
        assert self._stands.acquire(timeout=LIMIT_S)
        return True

    def _pause(self) -> None:
        self._stands.release()
        self._go.acquire()

    def _load(self, address: int) -> int:
        self._pause()
        return self.words[address]

    def _store(self, address: int, value: int) -> None:
        self._pause()
        self.words[address] = value

    def _add(self, address: int, amount: int) -> int:
        self._pause()
        self.words[address] += amount
        return self.words[address] - amount

    def _futex(self, _: int, address: int, what: int, value: int, timespec: int, *rest: int) -> None:
        self._pause()
        if what == FUTEX_WAKE:
            for other in self.others:
                if other.asleep_on == address:
                    other.asleep_on = None
        elif what == FUTEX_WAIT and self.words[address] == value and not timespec:
            self.asleep_on = address
            self._pause()


def orders(first: int, second: int) -> Iterator[list[int]]:
    for places in itertools.combinations(range(first + second), second):
        yield [int(index in places) for index in range(first + second)]


def sleepers_end(kernel: Any, order: list[int]) -> int | None:
    """Return what await_task returns when another thread runs the kernel; None if it sleeps for ever."""
    words = dict.fromkeys(range(0, 8 * doorbell.DOORBELL_WORDS, 8), 0)
    sleeper, other = Actor(doorbell.await_task, words), Actor(kernel, words)
    sleeper.others, other.others = [other], [sleeper]
    for turn in order:
        (sleeper, other)[turn].step()
    rounds = deque(range(100))
    while rounds and (other.step() or sleeper.step()):
        rounds.popleft()
    assert other.result is not None
    if sleeper.asleep_on is not None:
        return None
    assert rounds, "await_task goes round without end"
    return sleeper.result


@pytest.mark.parametrize("kernel", [doorbell.ring, doorbell.close], ids=["ring", "close"])
def test_a_sleeper_sees_what_is_told_it_at_any_moment(kernel: Any) -> None:
    # The sleeper's accesses: three words, CLOSED, ASLEEP, SUBMITTED and CLOSED again, the futex; once round.
    for order in orders(9, DECISIVE):
        assert sleepers_end(kernel, order) is not None, f"the sleeper was not woken in the order {order}"
