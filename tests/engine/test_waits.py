"""Test how ranks sleep and wake: no wake-up is lost, few are in vain, and waiting costs nothing."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
from kernel_variants import Rule, broken, edited

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels import move
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.local import LocalEngine
from torchestra.engine.memory.arena import Arena
from torchestra.engine.native.kernel import Kernel
from worlds import KINDS, await_note, leave_note, run

# The first test compiles kernels, 6 seconds on an idle machine.
pytestmark = pytest.mark.timeout(300)

ROUNDS = 1000
POLL_INTERVAL = 10.0
SECONDS = 60.0
MOST = 0.05


class Waits(NamedTuple):
    """Of one rank.

    Attributes:
        longest: seconds that the longest operation took.
        pending: how often a kernel returned PENDING.
    """

    longest: float
    pending: int


def sleepy_engine(poll_interval_s: float) -> LocalEngine:
    """The engine of this rank, which neither spins nor yields, and sleeps for one poll interval at a time."""
    engine = dist.group.WORLD.communicator.engine
    engine.context.store_word(at.SPINS, 0)
    engine.context.store_word(at.YIELDS, 0)
    engine.context.sleep_times.set(poll_interval_s)
    return engine


def count_pending(engine: LocalEngine, attribute: str) -> list[int]:
    """Count, in the list that is returned, how often a kernel of the engine returns PENDING."""
    kernel = getattr(engine.kernels, attribute)
    pending = [0]

    def counting(*arguments: int) -> int:
        code = kernel(*arguments)
        pending[0] += code == at.PENDING
        return code

    setattr(engine.kernels, attribute, counting)
    return pending


def sleep_and_wake(poll_interval_s: float, rounds: int, gate: threading.Barrier | None) -> Waits:
    """Barriers, small all_reduces, and all_reduces of six steps.

    The gate keeps ranks from beginning the next operation, which would also wake whoever still sleeps.
    """
    engine = sleepy_engine(poll_interval_s)
    engine.choices = Choices(direct=1024, chunk=1024, share=1024)
    counts = [count_pending(engine, attribute) for attribute in ("barrier", "all_reduce")]
    small, chunked = torch.zeros(8), torch.zeros(5 * 256)
    longest = 0.0
    for _ in range(rounds):
        for operation, arguments in (
            (dist.barrier, ()),
            (dist.all_reduce, (small,)),
            (dist.all_reduce, (chunked,)),
        ):
            started = time.monotonic()
            operation(*arguments)
            longest = max(longest, time.monotonic() - started)
            if gate is not None:
                gate.wait(SECONDS)
    return Waits(longest, sum(count[0] for count in counts))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_wake_up_is_lost(kind: str, size: int) -> None:
    """waiting.py: "No wake-up is lost". A sleeper that nobody wakes would sleep for a whole
    poll interval, so no operation may take that long; and it is rare that Python has to look around."""
    gate = threading.Barrier(size) if kind == "threads" else None
    for waits in run(kind, size, sleep_and_wake, POLL_INTERVAL, ROUNDS, gate, limit=250):
        assert waits.longest < POLL_INTERVAL
        assert waits.pending < 3 * ROUNDS / 100


def longest_barrier(barrier: Kernel, poll_interval_s: float, rounds: int, gate: threading.Barrier) -> float:
    """In seconds."""
    engine = sleepy_engine(poll_interval_s)
    engine.kernels.barrier = barrier
    longest = 0.0
    for _ in range(rounds):
        started = time.monotonic()
        engine.barrier(SECONDS)
        longest = max(longest, time.monotonic() - started)
        gate.wait(SECONDS)
    return longest


def test_a_rank_looks_for_sleepers_after_it_has_written() -> None:
    """waiting.py: "the publisher ``write PROGRESS; read WAITERS``". The other way round wake-ups are lost,
    and the test above would see it."""
    barrier, gate = edited(move.barrier), threading.Barrier(2)
    assert max(run("threads", 2, longest_barrier, barrier, POLL_INTERVAL, 100, gate)) < POLL_INTERVAL
    with broken(Rule.WRITE_BEFORE_LOOKING_FOR_SLEEPERS):
        longest = (max(run("threads", 2, longest_barrier, barrier, 0.04, 100, gate)) for _ in range(5))
        assert any(seconds >= 0.04 for seconds in longest)


def counted_sleepers(rounds: int) -> tuple[Arena, int]:
    engine = sleepy_engine(POLL_INTERVAL)
    for _ in range(rounds):
        engine.barrier(SECONDS)
    return engine.context.arena, engine.size


def test_a_rank_that_has_woken_is_not_counted_as_a_sleeper_any_more() -> None:
    """Else every later step would cost a system call."""
    arena, size = run("threads", 3, counted_sleepers, 100)[0]
    assert [arena.load_word(arena.control(rank) + at.WAITERS) for rank in range(size)] == [0] * size


def cost_of_waiting(asynchronous: bool) -> float:
    """Rank 0: the share of a core that it takes while it waits for rank 1, past the first second."""
    dist.barrier()
    if dist.get_rank() == 1:
        await_note("measured")
        dist.all_reduce(torch.zeros(1))
        return 0.0
    context = dist.group.WORLD.communicator.engine.context
    context.store_word(at.SPINS, 100)
    context.store_word(at.YIELDS, 1000)
    shares = [1.0]

    def measure() -> None:
        # From then on the wait is meant to cost nothing.
        while context.load_word(at.SPINS) or context.load_word(at.YIELDS):
            time.sleep(0.01)
        for _ in range(10):  # a host that counts its own time as the process's can only add to it
            started, before = time.monotonic(), time.process_time()
            time.sleep(1.5)
            shares.append((time.process_time() - before) / (time.monotonic() - started))
            if shares[-1] < MOST:
                break
        leave_note("measured")

    observer = threading.Thread(target=measure)
    observer.start()
    if asynchronous:
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
    else:
        dist.all_reduce(torch.zeros(1))
    observer.join()
    assert (context.load_word(at.SPINS), context.load_word(at.YIELDS)) == (100, 1000)
    return min(shares)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_process_that_waits_for_long_takes_next_to_no_time_of_a_core(asynchronous: bool) -> None:
    """What it does is wake every 50 ms and look around."""
    share, _ = run("processes", 2, cost_of_waiting, asynchronous)
    assert share < MOST


def sleeps_while_alone(looks: int) -> list[float]:
    """Rank 0: how long the kernel sleeps after each look, until rank 1 comes; then, how long it would."""
    context = dist.group.WORLD.communicator.engine.context
    if dist.get_rank() == 1:
        await_note("looked")
        dist.barrier()
        return []
    check, found = context.check, []

    def look(*args: Any, **named: Any) -> int | None:
        suspect = check(*args, **named)
        found.append(context.sleep_times.times[0].tolist())
        if len(found) == looks:
            leave_note("looked")
        return suspect

    context.check = look
    dist.barrier()
    return [seconds + ns * 1e-9 for seconds, ns in (*found[:looks], context.sleep_times.times[0].tolist())]


def test_a_wait_looks_soon_whether_peers_live_and_then_seldom() -> None:
    """A peer that died before a collective began is noticed after the first sleep."""
    # With two ranks a wait sleeps for 20 ms at most.
    slept = run("processes", 2, sleeps_while_alone, 6)[0]
    assert slept == pytest.approx([0.005, 0.01, 0.02, 0.02, 0.02, 0.02, 0.005])
