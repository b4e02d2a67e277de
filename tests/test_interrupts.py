"""Ctrl-C is found wherever it came, by those who go on until it comes."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from interrupts import lose_an_interrupt
from torchestra.launcher import nodes
from torchestra.launcher.node_ranks import NodeRanks
from torchestra.launcher.nodes import Nodes
from torchestra.store import HashStore
from torchestra.system.interrupts import Interrupts


def test_what_was_lost_is_found_by_the_next_wait() -> None:
    with Interrupts() as interrupts:
        lose_an_interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.wait(None)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_an_interrupt_is_raised_where_it_comes() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_nothing_is_to_be_raised_the_wait_returns() -> None:
    with Interrupts(raising=False) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.came
        assert not interrupts.wait(None)


def test_a_file_ends_the_wait() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as there, os.fdopen(writing, "w") as other, Interrupts() as interrupts:
        assert not interrupts.wait(0.0, there)
        other.write("x")
        other.flush()
        assert interrupts.wait(None, there)


def test_what_is_ignored_stays_ignored() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.came
    finally:
        signal.signal(signal.SIGINT, former)


def test_other_threads_get_none() -> None:
    waited: list[bool] = []

    def wait() -> None:
        with Interrupts() as interrupts:
            waited.append(interrupts.wait(0.0))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert waited == [False]


class Losing(HashStore):
    """A store in which nothing ever happens, and an interrupt is lost when it is asked."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        assert self.asked < 20, "the interrupt was lost"
        lose_an_interrupt()
        return False


def test_a_launcher_that_waits_for_a_place_or_a_job_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeRanks, "_take", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        NodeRanks(Losing(), [2, 2], "2-spare").wait(0)
    waits = object.__new__(Nodes)
    waits._store, waits._replica, waits.nnodes, waits.node = Losing(), None, 2, 2
    monkeypatch.setattr(nodes, "needs_spare", lambda _: False)
    with pytest.raises(KeyboardInterrupt):
        waits._await_members()
    assert waits._store.asked == 1
