"""Training on shards gives the same bits on any ranks, however many die and whenever."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchestra as dist
from elastic.training import FEATURES, STEPS, alone, digest, go_on, train
from torchestra import elastic
from torchestra.elastic.randomness import epoch_order
from torchestra.elastic.shard_tree import ShardTree
from worlds import KINDS, Outcome, outcomes, run

unfailed = functools.lru_cache(alone)


class Gone(Exception):
    """End a rank that leaves."""


def results(ended: list[Outcome]) -> list[Any]:
    return [each.result() for each in ended if not isinstance(each.error, Gone)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "shards"), [(2, 4), (2, 5), (3, 8), (4, 3)])
def test_ranks_train_as_one_would(kind: str, ranks: int, shards: int) -> None:
    for told, _ in run(kind, ranks, train_and_tell, shards):
        assert told == unfailed(shards)


def train_with_dropout() -> dict[str, Any]:
    return train(4, dropout=0.3)[0]


def test_dropout_and_noise_do_not_depend_on_who_computes() -> None:
    for told in run("processes", 3, train_with_dropout):
        assert told == unfailed(4, dropout=0.3)
    assert unfailed(4, dropout=0.3) != unfailed(4)


def train_and_tell(shards: int) -> tuple[dict[str, Any], int]:
    told, state = train(shards)
    return told, state.step


def leave_at(plan: dict[int, int]) -> Callable[[elastic.Shard], None]:
    """Leave in the middle of the shard that the plan gives for this rank: how many of its own come before."""
    rank, count = dist.get_rank(), 0

    def hook(shard: elastic.Shard) -> None:
        nonlocal count
        count += 1
        if plan.get(rank) == count:
            raise Gone

    return hook


def train_until(plan: dict[int, int], shards: int) -> dict[str, Any]:
    return train(shards, hook=leave_at(plan))[0]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_ranks_that_leave_in_the_middle_of_steps_change_nothing(drawn: st.DataObject) -> None:
    ranks = drawn.draw(st.integers(2, 6), "ranks")
    shards = drawn.draw(st.integers(ranks, 9), "shards")
    leaving = drawn.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1), "leaving")
    most = STEPS * (shards // ranks)  # a rank has at least so many, so it does leave
    plan = {rank: drawn.draw(st.integers(1, most), f"{rank} leaves in its shard") for rank in leaving}
    told = results(outcomes("threads", ranks, train_until, plan, shards))
    assert len(told) == ranks - len(leaving)
    for each in told:
        assert each == unfailed(shards)


def wrong_loops() -> dict[str, Callable[[elastic.State], object]]:
    linear = nn.Linear(2, 2)
    return {
        "`state` must be an elastic.State": lambda _: elastic.shards(linear, 3),  # type: ignore[arg-type]
        "`steps` must be a number from 0": lambda state: elastic.shards(state, -1),
        "`shards` must be a number from 1": lambda state: elastic.shards(state, 3, 0),
        "`minimum` must be a number from 1": lambda state: elastic.shards(state, 3, minimum=0),
        "has a SyncBatchNorm": lambda _: elastic.shards(elastic.State(nn.SyncBatchNorm(3)), 3),
        "neither a module nor an optimizer": lambda _: elastic.shards(elastic.State(torch.ones(1)), 3),
    }


@pytest.mark.parametrize("text", list(wrong_loops()))
def test_wrong_arguments_are_refused_before_anything_is_sent(text: str) -> None:
    with pytest.raises(dist.InvalidArgumentError, match=text):
        next(iter(wrong_loops()[text](elastic.State(nn.Linear(2, 2)))))  # type: ignore[call-overload]


def test_a_body_that_raises_or_ends_early_leaves_the_state_before_the_step() -> None:
    def body() -> dict[str, Any]:
        told, state = train(4, 2)
        for stop in (RuntimeError, None):
            with contextlib.suppress(RuntimeError):
                for shard in elastic.shards(state, STEPS, 4, seed=3):
                    state.modules[0](torch.ones(3, FEATURES), 0).sum().backward()
                    if shard.index == 1 and stop is None:
                        break
                    if shard.index == 1:
                        raise RuntimeError
            assert digest(state) == told
            assert all(each.grad is None for each in state.modules[0].parameters())
        go_on(state, 4, STEPS)
        return digest(state)

    assert run("threads", 1, body) == [unfailed(4)]


def test_a_step_without_any_loss_is_an_error_on_all_ranks() -> None:
    def body() -> None:
        for _ in elastic.shards(elastic.State(nn.Linear(2, 2)), 1, 4):
            pass

    for each in outcomes("threads", 2, body):
        assert isinstance(each.error, dist.NotReadyError)
        assert "no shard of this step called shard.backward()" in each.message


def test_every_sample_is_in_one_shard_of_an_epoch() -> None:
    def of(step: int, index: int, **options: Any) -> list[int]:
        order = functools.partial(epoch_order, 3)
        return elastic.Shard(step, index, 3, 0, order).indices(50, 20, **options).tolist()

    epochs = [
        sorted(each for step in steps for index in range(3) for each in of(step, index))
        for steps in (range(3), range(3, 6))
    ]
    assert epochs == [list(range(50))] * 2
    assert of(0, 0) != of(3, 0), "an epoch's order is its own"
    assert of(1, 0, shuffle=False) == list(range(20, 27))
    assert (
        len({each for step in range(2) for index in range(3) for each in of(step, index, drop_last=True)})
        == 40
    )
    assert of(2, 0, drop_last=True, shuffle=False) == of(0, 0, shuffle=False)


@settings(deadline=None)
@given(st.integers(1, 20), st.randoms())
def test_the_tree_adds_alike_in_any_order_and_on_any_ranks(shards: int, dice: random.Random) -> None:
    def summed(left: str, right: str) -> str:
        return "(" + "+".join(sorted((left, right))) + ")"

    def of(numbers: list[int]) -> dict[tuple[int, int], str]:
        values: dict[tuple[int, int], str] = {}
        for number in numbers:
            tree.insert(values, (number, number + 1), str(number), summed)
        return values

    tree = ShardTree(shards)
    (expected,) = of(list(range(shards))).values()
    owners = [dice.randrange(3) for _ in range(shards)]
    together: dict[tuple[int, int], str] = {}
    for owner in range(3):
        mine = [shard for shard in range(shards) if owners[shard] == owner]
        dice.shuffle(mine)
        values = of(mine)
        assert sorted(values) == tree.cover(mine)
        for node, value in values.items():
            tree.insert(together, node, value, summed)
    assert together == {tree.root: expected}
