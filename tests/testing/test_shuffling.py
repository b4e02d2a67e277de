"""Thread ranks in an order that a seed decides: right results, the same order again, and races that show."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import torchestra as dist
import worlds
from torchestra.testing import shuffle

SIZE = 3


def work() -> float:
    tensor = torch.arange(4.0) + dist.get_rank()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 1)
    if dist.get_rank() == 0:
        dist.send(tensor, 2)
    elif dist.get_rank() == 2:
        dist.recv(tensor, 0)
    dist.barrier()
    return float(tensor.sum())


def shuffled(seed: int) -> tuple[float, list[int]]:
    with shuffle(seed) as schedule:
        result = work()
    return result, schedule.turns


def test_results_are_right_in_every_order_and_the_order_comes_again() -> None:
    expected = worlds.run("threads", SIZE, work)
    orders = set()
    for seed in range(5):
        first = worlds.run("threads", SIZE, shuffled, seed)
        again = worlds.run("threads", SIZE, shuffled, seed)
        assert [result for result, _ in first] == expected
        assert first[0][1] == again[0][1]
        assert set(first[0][1]) == set(range(SIZE))
        orders.add(tuple(first[0][1]))
    assert len(orders) > 1


counter = 0


def race(seed: int) -> None:
    """Reads, lets others run, and writes: an update may get lost."""
    global counter
    with shuffle(seed):
        for _ in range(3):
            seen = counter
            dist.barrier()
            counter = seen + 1
            dist.barrier()


def ends_with(seed: int) -> int:
    global counter
    counter = 0
    worlds.run("threads", SIZE, race, seed)
    return counter


def test_a_race_shows_and_can_be_had_again() -> None:
    assert ends_with(1) == ends_with(1) < 3 * SIZE


def first_come(seed: int, winners: list[int]) -> None:
    """A race that one rank wins: who comes first to what stands unguarded."""
    with shuffle(seed):
        dist.barrier()
        if not winners:
            winners.append(dist.get_rank())


def test_seeds_let_different_ranks_win() -> None:
    wins: Counter[int] = Counter()
    for seed in range(12):
        winners: list[int] = []
        worlds.run("threads", SIZE, first_come, seed, winners)
        wins.update(winners)
    assert len(wins) > 1


def state() -> tuple[set[str], set[str], list[list[int]]]:
    communicator = dist.group.WORLD.communicator  # type: ignore[union-attr]
    context = communicator.engine.context
    return set(vars(communicator)), set(vars(context)), context.sleep_times.times.tolist()


def before_and_after() -> bool:
    before = state()
    with shuffle(0):
        dist.barrier()
    return state() == before


def test_nothing_of_it_is_left_afterwards() -> None:
    assert worlds.run("threads", 2, before_and_after) == [True, True]


def as_processes() -> None:
    with pytest.raises(dist.InvalidArgumentError, match="must be threads"), shuffle(0):
        pass


def test_processes_are_refused() -> None:
    worlds.run("processes", 2, as_processes)


def with_other_seeds() -> None:
    with shuffle(dist.get_rank()):
        dist.barrier()


def test_different_seeds_are_refused() -> None:
    errors = [outcome.error for outcome in worlds.outcomes("threads", 2, with_other_seeds)]
    assert any("another rank" in str(error) for error in errors)
    assert all(isinstance(error, dist.DistError) for error in errors)
