"""Faults are injected on the rank, and before the operation, that they name."""

from __future__ import annotations

import signal

import pytest
import torch

import torchestra as dist
import worlds
from torchestra.testing import faults

SIZE = 3


def reduce_until(calls: int) -> int:
    done = 0
    for _ in range(calls):
        dist.all_reduce(torch.ones(2))
        done += 1
    return done


def killed_at_the_third() -> int:
    with faults.kill(rank=1, at="all_reduce", nth=3):
        return reduce_until(5)


def test_kill_of_a_thread_comes_at_the_chosen_call() -> None:
    ended = worlds.outcomes("threads", SIZE, killed_at_the_third)
    assert isinstance(ended[1].error, faults.RankKilled)
    for rank in (0, 2):
        assert isinstance(ended[rank].error, dist.GroupAbortedError)
        assert "rank 1" in ended[rank].message


def test_kill_of_a_process_is_a_real_death() -> None:
    ended = worlds.outcomes("processes", SIZE, killed_at_the_third)
    assert ended[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        error = ended[rank].error
        assert isinstance(error, dist.RankFailedError)
        assert error.ranks == (1,)


def stay_away() -> int:
    with faults.drop_out(rank=0, at="barrier", nth=2):
        worlds.meet_and_set_timeout(1.0)
        dist.barrier()
    return 0


def test_a_rank_that_drops_out_is_missed_and_let_go() -> None:
    ended = worlds.outcomes("threads", SIZE, stay_away)
    assert isinstance(ended[0].error, faults.DroppedOut)
    for rank in (1, 2):
        assert isinstance(ended[rank].error, dist.DistError)
        assert "rank 0" in ended[rank].message


@pytest.mark.ranks(2)
def test_operations_without_a_method_of_their_own_are_counted_once_too() -> None:
    with faults.delay(rank=1, seconds=0.0, at="gather", nth=2) as fault:
        for _ in range(2):
            dist.gather(torch.ones(1), [torch.ones(1) for _ in range(2)] if dist.get_rank() == 0 else None)
        dist.all_reduce(torch.ones(2, 2).t())
    assert fault.calls == (2 if dist.get_rank() == 1 else 0)


def late_for_one() -> tuple[int, int]:
    with faults.delay(rank=1, seconds=0.01, at="all_reduce", nth=2) as fault:
        done = reduce_until(3)
        dist.barrier()
    return done, fault.calls


def test_a_delay_delays_and_nothing_else() -> None:
    assert worlds.run("threads", SIZE, late_for_one) == [(3, 0), (3, 3), (3, 0)]


def straggle() -> int:
    with faults.slow(rank=2, factor=3.0):
        return reduce_until(5)


def test_a_straggler_is_only_slow() -> None:
    assert worlds.run("threads", SIZE, straggle) == [5] * SIZE


def drawn() -> list[tuple[int, str | None, int | None]]:
    found = []
    for seed in range(20):
        with faults.draw(seed, operations=("all_reduce", "barrier")) as fault:
            found.append((fault.rank, fault.at, fault.nth))
    return found


def test_a_seed_draws_the_same_fault_on_every_rank() -> None:
    first, *others = worlds.run("threads", SIZE, drawn)
    assert all(other == first for other in others)
    assert len(set(first)) > 10


def misuse() -> None:
    with pytest.raises(dist.InvalidArgumentError, match="at must be one of"):
        faults.kill(0, at="allreduce")
    with pytest.raises(dist.InvalidArgumentError, match="rank must be in 0 to 1"):
        faults.kill(2)
    with pytest.raises(dist.InvalidArgumentError, match="counts from 1"):
        faults.delay(0, 1.0, nth=0)
    with pytest.raises(dist.InvalidArgumentError, match="factor"):
        faults.slow(0, 0.5)
    assert reduce_until(1) == 1


def test_misuse_is_refused_and_leaves_nothing() -> None:
    worlds.run("threads", 2, misuse)
