"""Averaged gradients are those that one process computes on everybody's samples, the same on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ddp_models import MODELS, batch, expected_gradients, gradients, loss, mlp, seeded, share
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel, reducer
from worlds import run

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
TINY_BUCKETS_MB = 100 / 2**20


def mine(samples: torch.Tensor) -> torch.Tensor:
    return share(samples, dist.get_rank(), dist.get_world_size())


def assert_same(found: list[list[torch.Tensor | None]], expected: list[torch.Tensor | None]) -> None:
    """Every rank's tensors are close to the expected ones, and bit for bit like rank 0's."""
    for tensors in found:
        for tensor, reference, first in zip(tensors, expected, found[0], strict=True):
            if reference is None or tensor is None or first is None:
                assert tensor is reference
                continue
            assert torch.equal(tensor, first)
            tolerance = 2e-2 if tensor.dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(tensor, reference, rtol=tolerance, atol=tolerance)


@VIEWS
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_mean_over_the_ranks(name: str, size: int, views: bool) -> None:
    model, samples = seeded(MODELS[name]), batch(size)
    dtype = next(model.parameters()).dtype

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=views, bucket_cap_mb=TINY_BUCKETS_MB
        )
        for _ in range(2):  # the second time over memory that has been used
            wrapped.zero_grad()
            loss(wrapped(mine(samples).to(dtype))).backward()
        return gradients(wrapped)

    assert_same(run("threads", size, body), expected_gradients(model, samples, size))


def test_gradients_are_those_of_one_process_on_the_concatenated_batch() -> None:
    model, samples = seeded(mlp), batch(3)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        loss(wrapped(mine(samples))).backward()
        return gradients(wrapped)

    found = run("threads", 3, body)
    loss(model(samples)).backward()
    assert_same(found, gradients(model))


@VIEWS
def test_ranks_stay_bit_identical_while_they_train(views: bool) -> None:
    """Each rank begins with weights of its own, and takes rank 0's."""

    models = [seeded(MODELS["convolutions"], seed) for seed in range(3)]
    start = [each.detach().clone() for each in models[0].parameters()]

    def body() -> list[torch.Tensor]:
        model = models[dist.get_rank()]
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=TINY_BUCKETS_MB)
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            loss(wrapped(mine(batch(3, seed=step)))).backward()
            optimizer.step()
        return [each.detach() for each in wrapped.parameters()]

    found = run("threads", 3, body)
    for tensors in found:
        for tensor, first, before in zip(tensors, found[0], start, strict=True):
            assert torch.equal(tensor, first)
            assert not torch.equal(tensor, before)


@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    bias=st.booleans(),
    cap_bytes=st.integers(1, 400),
    size=st.integers(1, 3),
    views=st.booleans(),
    keep=st.booleans(),
)
def test_gradients_of_any_small_network(
    widths: list[int], bias: bool, cap_bytes: int, size: int, views: bool, keep: bool
) -> None:
    """``keep``: gradients of the step before are set to zero, not to None."""

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in zip([6, *widths], [*widths, 3], strict=True):
            layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
        return nn.Sequential(*layers)

    model, samples = seeded(make), batch(size)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=views, bucket_cap_mb=cap_bytes / 2**20
        )
        for _ in range(2):
            wrapped.zero_grad(set_to_none=not keep)
            loss(wrapped(mine(samples))).backward()
        return gradients(wrapped)

    assert_same(run("threads", size, body), expected_gradients(model, samples, size))


# -- adding gradients up


Train = Callable[[DistributedDataParallel, torch.Tensor], None]


def accumulate(wrapped: DistributedDataParallel, samples: torch.Tensor) -> None:
    with wrapped.no_sync():
        for part in samples[:-1]:
            loss(wrapped(part)).backward()
    loss(wrapped(samples[-1])).backward()


@VIEWS
def test_gradients_added_up_without_sync_are_part_of_the_next_average(views: bool) -> None:
    model, size = seeded(mlp), 2
    steps = [batch(size, seed) for seed in range(3)]

    def body() -> tuple[list[torch.Tensor | None], int]:
        wrapped = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=views)
        for _ in range(2):
            wrapped.zero_grad()
            accumulate(wrapped, torch.stack([mine(samples) for samples in steps]))
        return gradients(wrapped), wrapped.statistics().steps

    found = run("threads", size, body)
    expected = [
        sum(parts) for parts in zip(*(expected_gradients(model, each, size) for each in steps), strict=True)
    ]
    assert_same([tensors for tensors, _ in found], expected)
    assert [steps for _, steps in found] == [2, 2], "only what is outside no_sync is reduced"


def test_gradients_in_no_sync_are_this_ranks_own() -> None:
    model, samples = seeded(mlp), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        with wrapped.no_sync():
            loss(wrapped(mine(samples))).backward()
        return gradients(wrapped)

    for rank, found in enumerate(run("threads", 2, body)):
        assert_same([found], expected_gradients(model, share(samples, rank, 2), 1))


def test_what_counts_is_where_forward_runs() -> None:
    model, samples = seeded(mlp), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        value = loss(wrapped(mine(samples)))
        with wrapped.no_sync():
            value.backward()
        return gradients(wrapped)

    assert_same(run("threads", 2, body), expected_gradients(model, samples, 2))


def test_no_sync_ends_with_its_block_even_by_an_error() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        with pytest.raises(ZeroDivisionError), wrapped.no_sync():
            raise ZeroDivisionError
        assert wrapped.require_backward_grad_sync

    run("threads", 1, body)


# -- several forward and backward passes


def twice(samples: torch.Tensor) -> list[torch.Tensor | None]:
    """Twice the expected gradients of the MLP."""
    return [2 * each for each in expected_gradients(seeded(mlp), samples, 2) if each is not None]


def one_backward_of_two_forwards(wrapped: DistributedDataParallel, samples: torch.Tensor) -> None:
    (loss(wrapped(samples)) + loss(wrapped(samples))).backward()


def two_forwards_then_two_backwards(wrapped: DistributedDataParallel, samples: torch.Tensor) -> None:
    losses = loss(wrapped(samples)), loss(wrapped(samples))
    for value in losses:
        value.backward()


def two_backwards_of_one_forward(wrapped: DistributedDataParallel, samples: torch.Tensor) -> None:
    value = loss(wrapped(samples))
    value.backward(retain_graph=True)
    value.backward()


def ignored_outputs_before(wrapped: DistributedDataParallel, samples: torch.Tensor) -> None:
    for _ in range(3):
        wrapped(samples)
    (2 * loss(wrapped(samples))).backward()


@VIEWS
@pytest.mark.parametrize(
    "train",
    [
        one_backward_of_two_forwards,
        two_forwards_then_two_backwards,
        two_backwards_of_one_forward,
        ignored_outputs_before,
    ],
)
def test_passes_in_other_patterns_are_averaged_too(train: Train, views: bool) -> None:
    model, samples = seeded(mlp), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=views, bucket_cap_mb=TINY_BUCKETS_MB
        )
        train(wrapped, mine(samples))
        return gradients(wrapped)

    assert_same(run("threads", 2, body), twice(samples))


class Hidden(nn.Module):
    """Returns its tensor where nobody looks for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        output = self.model(x)
        return lambda: output


def test_outputs_that_hide_their_tensors_do_not_matter() -> None:
    model, samples = seeded(mlp), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(Hidden(copy.deepcopy(model)), bucket_cap_mb=TINY_BUCKETS_MB)
        for _ in range(2):
            wrapped.zero_grad()
            loss(wrapped(mine(samples))()).backward()
        return gradients(wrapped)

    assert_same(run("threads", 2, body), expected_gradients(model, samples, 2))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def test_backward_may_come_in_parts() -> None:
    """The reduction ends when every gradient is there, in whichever backward that is."""
    model, samples = seeded(TwoHeads), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        left, right = wrapped(mine(samples))
        loss(left).backward()
        assert wrapped.statistics().steps == 0
        loss(right).backward()
        assert wrapped.statistics().steps == 1
        return gradients(wrapped)

    found = run("threads", 2, body)
    sum(loss(output) for output in model(samples)).backward()
    assert_same(found, gradients(model))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_double_backward_sees_this_ranks_graph() -> None:
    """create_graph=True: the average is a value; what it was computed from stays differentiable."""
    model, samples = seeded(mlp), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        loss(wrapped(mine(samples))).backward(create_graph=True)
        return [None if each is None else each.detach() for each in gradients(wrapped)]

    assert_same(run("threads", 2, body), expected_gradients(model, samples, 2))


def test_two_modules_share_one_backward() -> None:
    encoder, decoder, samples = seeded(mlp, 1), seeded(mlp, 2), batch(2)

    def body() -> list[torch.Tensor | None]:
        first = DistributedDataParallel(copy.deepcopy(encoder), bucket_cap_mb=TINY_BUCKETS_MB)
        second = DistributedDataParallel(copy.deepcopy(decoder), bucket_cap_mb=TINY_BUCKETS_MB)
        loss(second(first(mine(samples)))).backward()
        return gradients(first) + gradients(second)

    whole = nn.Sequential(encoder, decoder)
    assert_same(run("threads", 2, body), expected_gradients(whole, samples, 2))


def test_a_group_that_is_not_the_default_one() -> None:
    model, samples = seeded(mlp), batch(3)

    def body() -> list[torch.Tensor | None]:
        pair = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            return gradients(model)
        wrapped = DistributedDataParallel(copy.deepcopy(model), process_group=pair)
        loss(wrapped(mine(samples))).backward()
        return gradients(wrapped)

    found = run("threads", 3, body)
    pair_samples = torch.stack([samples[0::3], samples[2::3]], dim=1).flatten(0, 1)
    assert_same([found[0], found[2]], expected_gradients(model, pair_samples, 2))


class Added(nn.Module):
    """Parameters that are added up, whole and in parts: autograd gives them gradients in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(6) * index) for index in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other, third = torch.cat(list(self.parts[:2])), torch.cat(list(self.parts[2:4])), self.parts[6]
        total = one + other + torch.cat([x.new_zeros(6), self.parts[4]]) + torch.cat([self.parts[5], third])
        return total * x.mean(0).repeat(2)


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("cap_bytes", [1, 48, 1 << 20])
@pytest.mark.parametrize("spare", [0, 1])
def test_gradients_that_lie_in_the_same_memory(
    spare: int, cap_bytes: int, join: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one bucket or in several, reduced at the end or beside backward, averaged or summed and divided."""
    monkeypatch.setattr(reducer, "spare_cores", lambda ranks: spare)
    model, samples = Added(), batch(3)
    expected = expected_gradients(model, samples, 3)
    alone = copy.deepcopy(model)
    loss(alone(samples)).backward()
    assert len({each.grad.data_ptr() for each in alone.parameters()}) < 7, (
        "torch has changed: nothing is shared"
    )

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap_bytes / 2**20)
        with wrapped.join(enable=join):
            for _ in range(2):
                wrapped.zero_grad()
                loss(wrapped(share(samples, dist.get_rank(), 3))).backward()
        return gradients(wrapped)

    for found in run("threads", 3, body):
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, right)
