"""Ranks with different numbers of inputs: the joined ones shadow the steps of those that go on."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from ddp_models import Branches, batch, convolutions, gradients, loss, mlp, seeded
from test_ddp_comm_hooks import average
from test_ddp_sparse import Bag
from torch import nn

import torchestra as dist
from torchestra.algorithms.join import Join, Joinable, JoinHook
from torchestra.errors import UnevenInputsError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run

TINY_BUCKETS_MB = 100 / 2**20


def state_of(wrapped: DistributedDataParallel) -> list[torch.Tensor]:
    return [each.clone() for each in (*wrapped.parameters(), *wrapped.buffers())]


def assert_alike(states: list[list[torch.Tensor]]) -> None:
    for tensors in zip(*states, strict=True):
        assert all(torch.equal(tensors[0], other) for other in tensors)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those left"])
def test_gradients_are_divided_by_all_ranks_or_by_those_that_have_inputs(by_all: bool, views: bool) -> None:
    """Rank r has r + 1 inputs. Each step's gradient is the sum of those left, divided by either."""
    model, size = seeded(mlp), 3

    def body() -> list[list[torch.Tensor | None]]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), bucket_cap_mb=TINY_BUCKETS_MB, gradient_as_bucket_view=views
        )
        found = []
        with wrapped.join(divide_by_initial_world_size=by_all):
            for step in range(dist.get_rank() + 1):
                wrapped.zero_grad()
                loss(wrapped(batch(1, seed=step))).backward()
                found.append(gradients(wrapped))
        wrapped.zero_grad()
        loss(wrapped(batch(1))).backward()
        found.append(gradients(wrapped))
        return found

    for rank, steps in enumerate(run("threads", size, body)):
        for step, found in enumerate(steps):
            model.zero_grad()
            after = step > rank
            loss(model(batch(1, seed=0 if after else step))).backward()
            left = size if after else size - step
            divisor = size if by_all else left
            for one, other in zip(found, gradients(model), strict=True):
                torch.testing.assert_close(one, other * (left / divisor))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 joins first", "rank 0 joins last"])
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hook"])
@pytest.mark.parametrize("options", OPTIONS)
def test_at_the_end_all_ranks_have_the_state_of_the_last(options: str, hooked: bool, first: int) -> None:
    """With buffers, steps without synchronisation between the others, and ranks that never make a step."""
    models = [seeded(convolutions, seed) for seed in range(3)]

    def body() -> tuple[list[torch.Tensor], int]:
        wrapped = DistributedDataParallel(
            models[dist.get_rank()], bucket_cap_mb=TINY_BUCKETS_MB, **OPTIONS[options]
        )
        if hooked:
            wrapped.register_comm_hook(None, average)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        inputs = 3 * (dist.get_rank() if first == 0 else 2 - dist.get_rank())
        with wrapped.join():
            for step in range(inputs):
                if step % 3 == 1:
                    with wrapped.no_sync():
                        loss(wrapped(batch(3, seed=step))).backward()
                    continue
                loss(wrapped(batch(3, seed=step))).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert wrapped._get_ddp_logging_data()["join_uneven_inputs"] == 1
        after = [each.detach() for each in state_of(wrapped)]
        loss(wrapped(batch(3))).backward()
        return after, wrapped.statistics().steps

    found = run("threads", 3, body)
    assert_alike([state for state, _ in found])
    last = 2 if first == 0 else 0
    assert found[last][1] == 5, "two of three steps were reduced, and one after the context"


def test_the_state_is_that_of_training_alone() -> None:
    """As if one process had made all ranks' steps with a share of the learning rate each."""
    model = seeded(lambda: nn.Linear(6, 6, bias=False))

    def body() -> list[torch.Tensor]:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.03 * dist.get_world_size())
        with wrapped.join():
            for _ in range(2 * (dist.get_rank() + 1)):
                optimizer.zero_grad()
                wrapped(batch(1)).sum().backward()
                optimizer.step()
        return [each.detach() for each in wrapped.parameters()]

    found = run("threads", 3, body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for _ in range(2 + 4 + 6):
        optimizer.zero_grad()
        model(batch(1)).sum().backward()
        optimizer.step()
    for state in found:
        torch.testing.assert_close(state, [each.detach() for each in model.parameters()])


def test_sparse_gradients_are_shadowed() -> None:
    def body() -> list[torch.Tensor]:
        wrapped = DistributedDataParallel(Bag())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with wrapped.join():
            for step in range(2 * dist.get_rank()):
                optimizer.zero_grad()
                wrapped(torch.tensor([[step, step + 1]])).square().sum().backward()
                optimizer.step()
        return state_of(wrapped)

    assert_alike(run("threads", 3, body))


def test_parameters_that_only_those_left_use() -> None:
    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(seeded(Branches), find_unused_parameters=True)
        with wrapped.join():
            for step in range(1 + dist.get_rank()):
                wrapped.zero_grad()
                loss(wrapped(batch(1), step)).backward()
        return gradients(wrapped)

    zero, one = run("threads", 2, body)
    assert [each is None for each in zero] == [False] * 2 + [True] * 4, "a joined rank keeps its gradients"
    assert [each is None for each in one] == [True] * 2 + [False] * 2 + [True] * 2


def test_buffers_stay_the_ranks_own_if_they_are_not_synchronised() -> None:
    def body() -> float:
        model = nn.BatchNorm1d(6)
        model.running_mean.fill_(dist.get_rank())
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        wrapped.eval()
        with wrapped.join():
            for _ in range(dist.get_rank()):
                wrapped(batch(1)).sum().backward()
        return model.running_mean[0].item()

    assert run("threads", 2, body) == [0, 1]


def test_all_ranks_stop_at_the_first_that_has_run_out() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())

        def train() -> None:
            with wrapped.join(throw_on_early_termination=True):
                for _ in range(1 + dist.get_rank()):
                    loss(wrapped(batch(1))).backward()

        expected = "Rank 0 exhausted all inputs" if dist.get_rank() == 0 else "Throwing across all ranks"
        with pytest.raises(UnevenInputsError, match=expected):
            train()
        loss(wrapped(batch(1))).backward()

    run("threads", 2, body)


def test_a_disabled_context_does_nothing() -> None:
    def body() -> int:
        wrapped = DistributedDataParallel(mlp())
        with wrapped.join(enable=False):
            loss(wrapped(batch(1))).backward()
        return wrapped.statistics().steps

    assert run("threads", 2, body) == [1, 1]


class Announcer(Joinable):
    """Announces steps, and has no collectives of its own."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@pytest.mark.parametrize("size", [2, 3])
def test_two_wrappers_and_another_joinable_in_one_context(size: int) -> None:
    """Where another joinable announces the steps, one more small all_reduce says whether to average."""

    def body() -> list[torch.Tensor]:
        announcer, first, second = (
            Announcer(),
            *(DistributedDataParallel(seeded(convolutions, seed)) for seed in (1, 2)),
        )
        with Join([announcer, first, second], divide_by_initial_world_size=False):
            for step in range(2 * dist.get_rank()):
                Join.notify_join_context(announcer)
                loss(first(batch(1, seed=step))).backward()
                with second.no_sync() if step % 2 else contextlib.nullcontext():
                    loss(second(batch(1, seed=step))).backward()
        return state_of(first) + state_of(second)

    assert_alike(run("threads", size, body))


def test_a_step_costs_one_small_all_reduce_more() -> None:
    def body() -> int:
        wrapped = DistributedDataParallel(mlp())
        counts = []
        for context in (wrapped.join(enable=False), wrapped.join()):
            calls = []
            communicator = dist.group.WORLD.communicator
            original = communicator.all_reduce
            communicator.all_reduce = lambda *rest, calls=calls, original=original: (
                calls.append(rest[0].numel()) or original(*rest)
            )
            with context:
                for _ in range(3):
                    loss(wrapped(batch(1))).backward()
                counts.append(len(calls))
            communicator.all_reduce = original
        return counts[1] - counts[0]

    assert run("threads", 2, body) == [3, 3]
