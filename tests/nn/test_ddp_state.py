"""Test what a wrapped module has beside gradients: state, buffers, statistics, and an end."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from ddp_models import batch, convolutions, gradients, loss, mlp
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DDPStatistics, DistributedDataParallel
from torchestra.nn.parallel.coalesced import batches, broadcast_coalesced
from worlds import collect_until, run


class Counting(nn.Module):
    """Has buffers of several dtypes, and replaces one of them in every forward."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("replaced", torch.tensor(float(start)))
        self.register_buffer("changed", torch.tensor([start, start]))
        self.register_buffer("hidden", torch.tensor([start > 0]), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.replaced.item(), self.changed.tolist(), self.hidden.tolist())
        self.replaced = self.replaced + 1 + dist.get_rank()
        self.changed.add_(1 + dist.get_rank())
        return x * self.weight


def step(wrapped: DistributedDataParallel) -> None:
    wrapped(torch.ones(2)).sum().backward()


def test_state_is_rank_0s_from_the_start() -> None:
    """Parameters that are not trained and buffers too, of every dtype."""

    def body() -> dict[str, torch.Tensor]:
        model = convolutions()
        model[1].requires_grad_(False)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(7 + dist.get_rank())
        return DistributedDataParallel(model).state_dict()

    for state in run("threads", 3, body):
        assert all(bool((tensor == 7).all()) for tensor in state.values())


def test_without_init_sync_every_rank_keeps_its_state() -> None:
    def body() -> float:
        model = nn.Linear(1, 1)
        model.weight.data.fill_(dist.get_rank())
        return DistributedDataParallel(model, init_sync=False).module.weight.item()

    assert run("threads", 2, body) == [0, 1]


def test_buffers_are_rank_0s_in_every_forward_that_is_reduced() -> None:
    def body() -> list[object]:
        wrapped = DistributedDataParallel(Counting(5 * dist.get_rank()))
        seen = []
        for _ in range(3):
            step(wrapped)
            seen.append(wrapped.module.seen)
        return seen

    expected = [(float(n), [n, n], [False]) for n in range(3)]
    assert run("threads", 2, body) == [expected, expected]


def test_an_evaluation_after_a_step_sees_rank_0s_buffers_and_the_next_sends_nothing() -> None:
    def body() -> list[float]:
        wrapped = DistributedDataParallel(Counting(0))
        seen = []
        with torch.no_grad():
            wrapped(torch.ones(2))
        step(wrapped)
        for _ in range(2):
            with torch.no_grad():
                wrapped(torch.ones(2))
            seen.append(wrapped.module.seen[0])
        return seen

    zero, one = run("threads", 2, body)
    assert zero == [2, 3], "rank 0 adds 1 in every forward"
    assert one == [2, 4], "rank 1 starts from rank 0's and adds 2"


def test_buffers_may_stay_the_ranks_own() -> None:
    def body() -> float:
        wrapped = DistributedDataParallel(Counting(0), broadcast_buffers=False)
        step(wrapped)
        step(wrapped)
        return wrapped.module.replaced.item()

    assert run("threads", 2, body) == [2, 4]


def test_state_dict_has_torchs_prefix() -> None:
    def body() -> None:
        model = mlp()
        wrapped = DistributedDataParallel(model)
        state = wrapped.state_dict()
        assert list(state) == [f"module.{name}" for name in model.state_dict()]
        other = DistributedDataParallel(mlp())
        other.load_state_dict(state)
        assert torch.equal(other(batch(1)), wrapped(batch(1)))

    run("threads", 1, body)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))])
def test_a_copy_is_a_wrapper_of_a_copy(how: Callable[[nn.Module], nn.Module]) -> None:
    """Nobody waits for anybody in making it, and it averages what its own module computes."""

    def body() -> None:
        options = {"find_unused_parameters": True, "bucket_cap_mb": 1, "gradient_as_bucket_view": True}
        wrapped = DistributedDataParallel(mlp(), **options)
        loss(wrapped(batch(1))).backward()
        if dist.get_rank() == 1:
            how(wrapped)
        copied = how(wrapped)
        assert {name: getattr(copied, name) for name in options if name != "bucket_cap_mb"} == {
            name: value for name, value in options.items() if name != "bucket_cap_mb"
        }
        assert copied.bucket_bytes_cap == 1 << 20
        copied.zero_grad()
        loss(copied(batch(1, seed=dist.get_rank()))).backward()
        assert copied.statistics().steps == 1
        assert wrapped.statistics().steps == 1
        found = gradients(copied.module)
        for each in found:
            mean = each.clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            torch.testing.assert_close(mean, each)

    run("threads", 2, body)


def test_a_copy_of_a_wrapper_with_a_static_graph_has_one() -> None:
    def body() -> None:
        copied = copy.deepcopy(DistributedDataParallel(mlp(), static_graph=True))
        assert copied.static_graph
        for _ in range(2):
            loss(copied(batch(1))).backward()
        assert copied.statistics().steps == 2

    run("threads", 2, body)


def test_copies_are_over_the_default_group_only() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp(), process_group=dist.new_group())
        message = "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
        with pytest.raises(RuntimeError, match=message):
            pickle.dumps(wrapped)
        copied = copy.deepcopy(wrapped.module)
        loss(copied(batch(1))).backward()
        assert gradients(wrapped.module) == [None] * 6, "the copy has no part in the reduction"

    run("threads", 2, body)


def test_the_module_outlives_its_wrapper() -> None:
    """The hooks go with the wrapper; the module can be trained alone, and wrapped again."""

    def body() -> int:
        model = mlp()
        wrapped = DistributedDataParallel(model)
        loss(wrapped(batch(1))).backward()
        alive = weakref.ref(wrapped)
        del wrapped
        collect_until(lambda: alive() is None)
        assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
        if dist.get_rank() == 0:
            loss(model(batch(1))).backward()
        again = DistributedDataParallel(model)
        loss(again(batch(1))).backward()
        return again.statistics().steps

    assert run("threads", 2, body) == [1, 1]


def test_train_and_eval_reach_the_module() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped.eval()
        assert not wrapped.module.training
        wrapped.train()
        assert wrapped.module.training

    run("threads", 1, body)


def test_statistics_count_what_was_reduced() -> None:
    def body() -> DDPStatistics:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=64 / 2**20)
        before = wrapped.statistics()
        for _ in range(3):
            wrapped(torch.ones(2, 4)).sum().backward()
        assert before == DDPStatistics(0, 0, 0, 0, 0, 0, 0, 2), "a snapshot does not change"
        assert before.communication_share == 0
        return wrapped.statistics()

    for found in run("threads", 2, body):
        assert (found.steps, found.buckets, found.bytes_reduced) == (3, 2, 3 * 2 * 64)
        assert found.forward_seconds > 0
        assert 0 < found.wait_seconds <= found.communication_seconds <= found.backward_seconds
        assert found.overlap_seconds == found.communication_seconds - found.wait_seconds
        assert 0 < found.copy_seconds < found.backward_seconds
        assert 0 < found.communication_share < 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.steps = 0


def test_tensors_travel_by_dtype_and_not_too_many_at_once() -> None:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (3, 4, 9, 1, 1)]
    tensors.insert(1, torch.empty(2))
    sizes = [[each.nbytes for each in batch] for batch in batches(tensors, 7)]
    assert sizes == [[3, 4], [9], [1, 1], [8]]
    assert list(batches([], 7)) == []


@pytest.mark.parametrize("most_bytes", [256, 32 << 20])
@pytest.mark.parametrize("root", range(3))
def test_many_tensors_of_several_dtypes_are_broadcast_from_any_rank(root: int, most_bytes: int) -> None:
    """Parts of larger tensors, not contiguous ones and empty ones too."""

    def body() -> None:
        dtypes = (torch.float16, torch.float32, torch.float64, torch.float16, torch.int64)
        expected = [part for dtype in dtypes for part in torch.arange(60, dtype=dtype).chunk(5)]
        expected += [torch.arange(12.0).view(3, 4).t(), torch.empty(0, 2), torch.tensor(True)]
        here = dist.get_rank() == root
        tensors = [each.clone() if here else torch.zeros_like(each) for each in expected]
        broadcast_coalesced(tensors, dist.group.WORLD, root, most_bytes)
        for found, reference in zip(tensors, expected, strict=True):
            assert torch.equal(found, reference)

    run("threads", 3, body)
