"""An optimizer whose state is divided between ranks loses nothing with a rank, as others keep replicas."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchestra as dist
from elastic import test_shards
from elastic.test_elastic_joining import Gone, Job
from elastic.test_kills import POINTS, kill_itself_at
from elastic.test_shards import leave_at, results, unfailed
from elastic.training import STEPS, digest, go_on, make, train
from torchestra import elastic
from torchestra.elastic.sharded_optimizer import assign_holders
from torchestra.optim import ZeroRedundancyOptimizer
from worlds import RankDied, outcomes, run, store_barrier

SHARDS = 6


def check(told: list[dict[str, Any]], copies: int) -> None:
    """Compare what ranks have with an unfailed training; each part is on so many of them."""
    expected = unfailed(SHARDS)
    for each in told:
        assert each.items() <= expected.items()
        assert {"step", "loss", "lr", "head.weight"} <= each.keys()
    for name in (name for name in expected if name.endswith(".exp_avg")):
        assert sum(name in each for each in told) == copies, name


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 0), (3, 1), (4, 2)])
def test_ranks_train_as_one_would_and_keep_so_many_replicas(ranks: int, replicas: int) -> None:
    told = run("threads", ranks, lambda: train(SHARDS, zero=True, replicas=replicas)[0])
    check(told, min(ranks, replicas + 1))


def train_until_gone(plan: dict[int, int], replicas: int) -> dict[str, Any]:
    return train(SHARDS, hook=leave_at(plan), zero=True, replicas=replicas)[0]


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_ranks_that_leave_in_the_middle_of_steps_change_nothing(drawn: st.DataObject) -> None:
    ranks = drawn.draw(st.integers(2, 5), "ranks")
    leaving = drawn.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1), "leaving")
    plan = {rank: drawn.draw(st.integers(1, STEPS), f"{rank} leaves in its shard") for rank in leaving}
    told = results(outcomes("threads", ranks, train_until_gone, plan, len(leaving)))
    assert len(told) == ranks - len(leaving)
    check(told, min(len(told), len(leaving) + 1))


def train_until_killed(plan: dict[int, tuple[str, int, bool]]) -> dict[str, Any]:
    if (mine := plan.get(dist.get_rank())) is not None:
        kill_itself_at(*mine)
    store_barrier()  # or a death at the first point would abort the group that others still enter
    return train(SHARDS, zero=True)[0]


@pytest.mark.parametrize(
    ("point", "count", "after"),
    [
        ("when all have a step's sum", 3, False),
        ("when all have a step's sum", 3, True),
        ("at the update", 3, True),
        ("when updates are exchanged", 3, False),
        ("when updates are exchanged", 3, True),
    ],
)
def test_a_rank_is_killed_between_the_sum_and_the_end_of_a_step(point: str, count: int, after: bool) -> None:
    ended = outcomes("processes", 3, train_until_killed, {1: (point, count, after)})
    assert [isinstance(each.error, RankDied) for each in ended] == [False, True, False]
    check([ended[rank].result() for rank in (0, 2)], 2)


def test_another_is_killed_while_the_parts_of_the_first_are_divided() -> None:
    plan = {3: ("at the update", 2, True), 0: ("when states are taken over", 2, True)}
    ended = outcomes("processes", 4, train_until_killed, plan)
    assert [isinstance(each.error, RankDied) for each in ended] == [True, False, False, True]
    check([ended[rank].result() for rank in (1, 2)], 2)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_killed_at_points_drawn_at_random(seed: int) -> None:
    dice = random.Random(seed)
    plan = {dice.randrange(4): (dice.choice(list(POINTS)), dice.randint(1, STEPS), dice.random() < 0.5)}
    ended = outcomes("processes", 4, train_until_killed, plan)
    left = [each.result() for rank, each in enumerate(ended) if rank not in plan]
    for each in left:
        assert each.items() <= unfailed(SHARDS).items(), plan


def test_a_joiner_gets_its_part_from_those_that_hold_it() -> None:
    job, count = Job(), 0

    def body(hook: Any = lambda shard: None) -> dict[str, Any]:
        network, optimizer, scheduler = make(dist.get_rank(), 0.0, zero=True)
        state = elastic.State(network, optimizer, scheduler=scheduler)
        go_on(state, SHARDS, STEPS, hook, minimum=3)
        return digest(state)

    def leave(shard: elastic.Shard) -> None:
        nonlocal count
        count += 1
        if count == 5:
            job.start(1, None, body)
            raise Gone

    for rank in range(3):
        job.start(rank, 3, functools.partial(body, leave) if rank == 1 else body)
    check(job.finish(), 2)


def test_what_no_rank_has_any_more_is_an_error_on_all() -> None:
    ended = outcomes("threads", 3, train_until_gone, {1: 3}, 0)
    assert isinstance(ended[1].error, test_shards.Gone)
    for rank in (0, 2):
        assert isinstance(ended[rank].error, dist.DistError)
        assert "parameters is lost: all ranks that kept it are gone" in ended[rank].message
        assert "Each part was kept on 1 ranks: give elastic.State more `replicas`" in ended[rank].message


def test_what_no_rank_has_any_more_is_read_from_a_checkpoint_and_divided_anew(tmp_path: Path) -> None:
    """Rank 1 leaves in step 3, when the checkpoint of step 2 is on the disk."""

    def body() -> dict[str, Any]:
        checkpoints = elastic.Checkpoints(tmp_path, every=2)

        def leave(shard: elastic.Shard) -> None:
            if shard.step == 3 and shard.index % 2 == 0 and dist.get_world_size() == 3:
                checkpoints.wait()
                store_barrier()  # in the first of each rank's two shards; no operation, which a death ends
                if dist.get_rank() == 1:
                    raise test_shards.Gone

        told, state = train(SHARDS, hook=leave, zero=True, replicas=0, checkpoints=checkpoints)
        assert [each.step for each in state.changes] == [2]
        checkpoints.wait()
        return told

    check(results(outcomes("threads", 3, body)), 1)


def test_what_cannot_be_kept_is_refused() -> None:
    def body() -> None:
        module = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)
        state = elastic.State(module, optimizer)
        with pytest.raises(dist.InvalidArgumentError, match=r"whose steps elastic\.shards\(\) must make"):
            state.sync()
        for wrong in (-1, None):
            with pytest.raises(dist.InvalidArgumentError, match="`replicas` must be a number from 0"):
                elastic.State(module, replicas=wrong)  # type: ignore[arg-type]
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        with pytest.raises(dist.InvalidArgumentError, match="ZeroRedundancyOptimizer that has made steps"):
            elastic.State(module, optimizer)

    run("threads", 1, body)


SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=20)


@settings(deadline=None)
@given(SIZES, st.integers(1, 8), st.integers(1, 4))
def test_parts_are_placed_evenly_and_stay_where_they_are(sizes: list[int], ranks: int, copies: int) -> None:
    here = [0] * ranks
    placed = assign_holders(sizes, [[] for _ in sizes], here, copies)
    copies = min(copies, ranks)
    assert all(len(set(each)) == copies for each in placed)
    loads = [
        sum(size for size, each in zip(sizes, placed, strict=True) if rank in each) for rank in range(ranks)
    ]
    assert max(loads) <= sum(sizes) * copies / ranks + max(sizes) + 1
    again = assign_holders(sizes, placed, here, copies)
    assert [set(each) for each in again] == [set(each) for each in placed]


@settings(deadline=None)
@given(SIZES, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_parts_are_placed_on_as_many_hosts_as_there_can_be(
    sizes: list[int], host_of: list[int], copies: int, drawn: st.DataObject
) -> None:
    """Wherever they were before; and they stay there then."""
    ranks = range(len(host_of))
    held = [sorted(drawn.draw(st.sets(st.sampled_from(ranks)), "held")) for _ in sizes]
    placed = assign_holders(sizes, held, host_of, copies)
    assert all(len(set(each)) == min(copies, len(ranks)) for each in placed)
    for each in placed:
        assert len({host_of[rank] for rank in each}) == min(copies, len(set(host_of)))
    again = assign_holders(sizes, placed, host_of, copies)
    assert [set(each) for each in assign_holders(sizes, again, host_of, copies)] == [
        set(each) for each in again
    ]
