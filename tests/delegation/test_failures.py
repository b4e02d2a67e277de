"""Test what happens to delegated operations that cannot end: time-outs, dead ranks, aborts, shrinking."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from stand_in import delegating

import torchestra as dist
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    GroupAbortedError,
    GroupDestroyedError,
    RankFailedError,
)
from worlds import outcomes, processes, run, store_barrier


def miss_one(async_op: bool) -> None:
    """Rank 1 never calls the second operation."""
    with delegating() as stand_in:
        dist.all_reduce(torch.ones(3))
        store_barrier()
        if dist.get_rank() == 1:
            with pytest.raises(DistBackendError):
                dist.barrier()  # until the others have given up
            return
        communicator = stand_in.communicator
        tensor = torch.ones(3)
        if async_op:
            work = communicator.all_reduce(tensor, dist.ReduceOp.SUM, True, 0.3)
            work.wait()
        else:
            communicator.all_reduce(tensor, dist.ReduceOp.SUM, False, 0.3)


@pytest.mark.parametrize("async_op", [False, True])
def test_an_operation_that_a_rank_does_not_come_to_times_out(async_op: bool) -> None:
    first, second, third = outcomes("threads", 3, miss_one, async_op)
    assert second.error is None, second.error
    errors = [first.error, third.error]
    assert any(isinstance(error, CollectiveTimeoutError) for error in errors), errors
    for error in errors:
        assert isinstance(error, (CollectiveTimeoutError, GroupAbortedError))
        assert "all_reduce(SUM, float32, 3 elements) on cpu of group 'default' timed out" in str(error)
        assert "test_failures.py" in str(error)


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(3))


def after_a_failure() -> None:
    with delegating() as stand_in:
        dist.all_reduce(torch.ones(3))
        store_barrier()  # or the abort could still meet the other rank in that
        if dist.get_rank() == 0:
            stand_in.base.engine.context.abort("a test has ended it")
        with pytest.raises(GroupAbortedError, match="a test has ended it"):
            reduce_for_ever()
        with pytest.raises(GroupAbortedError, match="a test has ended it"):
            dist.all_reduce(torch.ones(3))


def test_an_abort_ends_what_is_under_way_and_what_comes_later() -> None:
    run("threads", 2, after_a_failure)


def lose_one() -> float:
    """Rank 1 is killed while the others wait for it; these go on without."""
    with delegating():
        dist.all_reduce(torch.ones(3))
        store_barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 1 died") as caught:
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        assert caught.value.ranks == (1,)
    group = dist.group.WORLD.shrink()
    with delegating(group):
        tensor = torch.full((3,), group.rank() + 1.0)
        dist.all_reduce(tensor)
        return float(tensor[0])


def test_a_dead_rank_is_an_error_and_the_others_go_on_without_it() -> None:
    with processes(3, lose_one) as world:
        ended = world.finish()
    assert [outcome.error for outcome in (ended[0], ended[2])] == [None, None]
    assert [outcome.value for outcome in (ended[0], ended[2])] == [3.0, 3.0]


def leave() -> None:
    """An operation that has begun ends before the group is left; afterwards nothing can be begun."""
    with delegating() as stand_in:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, async_op=True)
        communicator, base = stand_in.communicator, stand_in.base
    dist.destroy_process_group()
    assert tensor.tolist() == [2.0] * 3
    assert "barrier" not in vars(base)
    with pytest.raises(GroupDestroyedError):
        communicator.all_reduce(tensor, dist.ReduceOp.SUM)


def test_leaving_lets_what_has_been_begun_end() -> None:
    run("threads", 2, leave)
