"""Ctrl-C is found wherever it came, by those who go on until it comes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from interrupts import interrupted_at, lose_an_interrupt
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


FIRST_IN_A_PROCESS = """
from interrupts import interrupted_at

def call():
    return abs(1)

try:
    with interrupted_at(0, ["<string>"]) as where:
        call()
except KeyboardInterrupt:
    print(*where)
"""


def test_the_first_one_that_is_raised_in_a_process_is_raised() -> None:
    """Python 3.12 gives no opcodes to a process that has not asked for them before it asked for a trace."""
    run = [sys.executable, "-c", FIRST_IN_A_PROCESS]
    output = subprocess.check_output(run, cwd=Path(__file__).parent, text=True, timeout=60)
    assert output.startswith("call:")


def _three() -> Iterator[int]:
    yield from (1, 2, 3)


def _takes_one() -> None:
    next(_three())  # and closes the rest, on the way out of which Python looks for no signal


def test_none_is_raised_where_python_looks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[object] = []  # as what closing a generator raises
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    points: list[str] = []
    for place in itertools.count():
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, [__file__]) as where:
            _takes_one()
        if not where:
            break
        points += where
    assert any(each.startswith("_takes_one:") for each in points)
    assert not ignored, points
