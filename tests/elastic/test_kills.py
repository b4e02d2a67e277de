"""Ranks that are killed at any point of a step, one or two at once, leave the others' result as it was."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

import torchestra as dist
from elastic.test_shards import unfailed
from elastic.training import STEPS, train
from torchestra.elastic import fetching, loop, shard_sum
from torchestra.elastic.loop import _Loop
from torchestra.elastic.state import State
from worlds import RankDied, outcomes, processes, store_barrier

SHARDS = 8

POINTS: dict[str, tuple[Any, str]] = {
    "when a step's facts are exchanged": (shard_sum._OwnResults, "exchange"),
    "when shares are exchanged": (shard_sum, "all_to_all_single"),
    "when shares of two are added": (shard_sum, "reduce_scatter_tensor"),
    "when results are gathered": (shard_sum, "all_gather_into_tensor"),
    "when all have a step's sum": (_Loop, "_make_update"),
    "at the update": (loop, "_update"),
    "when updates are exchanged": (State, "exchange"),
    "when a step ends": (_Loop, "_shares"),
    "when others have died": (_Loop, "_recover"),
    "when ranks meet": (_Loop, "_sync"),
    "when states are taken over": (State, "_take_over"),
    "when a state is sent": (fetching, "isend"),
    "when a state is received": (fetching, "irecv"),
    "at the end": (loop, "barrier"),
}


def kill_itself_at(point: str, count: int, after: bool) -> None:
    """Have this process killed when it comes to a function for the so many-th time, or when it leaves it."""
    owner, name = POINTS[point]
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def replacement(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        value = function(*args, **options)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    setattr(owner, name, replacement)


def train_until_killed(plan: dict[int, tuple[str, int, bool]]) -> dict[str, Any]:
    if (mine := plan.get(dist.get_rank())) is not None:
        kill_itself_at(*mine)
    store_barrier()  # or a death at the first point would abort the group that others still enter
    return train(SHARDS)[0]


def check(plan: dict[int, tuple[str, int, bool]], ranks: int) -> int:
    """Train; return how many have died."""
    ended = outcomes("processes", ranks, train_until_killed, plan)
    dead = [rank for rank, each in enumerate(ended) if isinstance(each.error, RankDied)]
    assert set(dead) <= set(plan)
    for rank, each in enumerate(ended):
        if rank not in dead:
            assert each.result() == unfailed(SHARDS), f"rank {rank} of {ranks}, {plan}"
    return len(dead)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "point",
    [
        point
        for point in POINTS
        if not point.startswith(("when a state", "when states", "when all")) and "others" not in point
    ],
)
def test_a_rank_is_killed_at_a_point_of_a_step(point: str, after: bool) -> None:
    ranks = 2 if "of two" in point else 3
    count = 1 if point in ("when ranks meet", "at the end") else 3
    # At the very end all have what they want: then nobody needs to be told of the death.
    assert check({1: (point, count, after)}, ranks) == 1


@pytest.mark.parametrize("point", ["when others have died", "when ranks meet", "when results are gathered"])
def test_another_is_killed_while_the_rest_recovers(point: str) -> None:
    second = (point, 1 if "others" in point else 2, False)
    assert check({3: ("at the update", 2, False), 0: second}, 4) == 2


@pytest.mark.parametrize("seed", range(6))
def test_ranks_are_killed_at_points_drawn_at_random(seed: int) -> None:
    dice = random.Random(seed)
    ranks = dice.randint(2, 5)
    victims = dice.sample(range(ranks), dice.randint(1, ranks - 1))
    drawn = {
        rank: (dice.choice(list(POINTS)), dice.randint(1, STEPS), dice.random() < 0.5) for rank in victims
    }
    check(drawn, ranks)


def train_slowly() -> dict[str, Any]:
    from worlds import leave_note

    return train(SHARDS, hook=lambda shard: leave_note(f"{dist.get_rank()} at {shard.step}"))[0]


def test_two_ranks_are_killed_at_once_from_outside() -> None:
    with processes(4, train_slowly) as world:
        world.await_file("0 at 2")
        for rank in (0, 2):
            world.signal(rank, signal.SIGKILL)
        ended = world.finish()
    for rank in (1, 3):
        assert ended[rank].result() == unfailed(SHARDS)
