"""Test that errors tell who failed, about which parameter, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, batch, loss, mlp
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torchestra as dist
from torchestra.errors import (
    GradientReductionError,
    GroupAbortedError,
    GroupDestroyedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotInitializedError,
)
from torchestra.nn.parallel import DistributedDataParallel
from worlds import outcomes, run

# -- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_ids": [0]}, r" device_ids and output_device arguments only work .* got device_ids \[0\]"),
        ({"output_device": "cpu"}, r" device_ids .* output_device cpu, and module parameters {'cpu'}"),
        ({"dim": 1}, r": `dim` must be 0 .*got 1"),
        ({"bucket_cap_mb_list": []}, ": `bucket_cap_mb_list` must have at least one number"),
        ({"bucket_cap_mb_list": [1, -1]}, ": `bucket_cap_mb_list` must be a positive number, got -1"),
        ({"bucket_cap_mb": 0}, r": `bucket_cap_mb` must be a positive number, got 0"),
        ({"bucket_cap_mb": float("nan")}, r": `bucket_cap_mb` must be a positive number, got nan"),
        ({"bucket_cap_mb": "1"}, r": `bucket_cap_mb` must be a positive number, got '1'"),
    ],
)
def test_what_is_not_served_is_refused(arguments: dict[str, Any], message: str) -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match="DistributedDataParallel" + message):
            DistributedDataParallel(mlp(), **arguments)
        DistributedDataParallel(mlp(), device_ids=[])

    run("threads", 1, body)


def fake(length: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(length)


class Odd(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "text", InvalidArgumentTypeError, r"`module` must be a torch\.nn\.Module, got str"),
        (
            lambda: mlp().requires_grad_(False),
            InvalidArgumentError,
            "is not needed when a module doesn't have any parameter that requires a gradient",
        ),
        (
            lambda: nn.LazyLinear(3),
            InvalidArgumentError,
            "`weight` is not initialized yet; run a forward pass",
        ),
        (
            lambda: mlp().to("meta"),
            InvalidArgumentError,
            r"`0\.weight` is on device meta .*only dense tensors on the CPU or a GPU",
        ),
        (
            lambda: Odd(a=nn.Parameter(torch.ones(2)), b=torch.ones(2).to_sparse()),
            InvalidArgumentError,
            r"`b` is on device cpu with layout torch\.sparse_coo",
        ),
        (
            lambda: Odd(a=nn.Parameter(torch.ones(2).to(torch.float8_e5m2))),
            InvalidArgumentError,
            r"`a` has dtype torch\.float8_e5m2, whose gradients cannot be averaged",
        ),
        (
            lambda: Odd(a=nn.Parameter(torch.ones(2)), b=nn.Parameter(fake(2))),
            InvalidArgumentError,
            r"`b` has no memory of its own \(it is a FakeTensor\)",
        ),
        (
            lambda: Odd(a=nn.Parameter(torch.ones(2)), b=torch._efficientzerotensor(2)),
            InvalidArgumentError,
            r"`b` has no memory of its own \(it is a zero tensor",
        ),
    ],
)
def test_modules_that_cannot_be_trained_so(make: Callable[[], Any], error: type, message: str) -> None:
    """Every rank refuses them before anything is sent, so the group stays usable."""

    def body() -> None:
        with pytest.raises(error, match=message):
            DistributedDataParallel(make())
        dist.barrier()

    run("threads", 2, body)


def test_there_must_be_a_group() -> None:
    with pytest.raises(NotInitializedError, match="Default process group has not been initialized"):
        DistributedDataParallel(mlp())


def test_the_rank_must_be_in_the_group() -> None:
    def body() -> None:
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(
                InvalidArgumentError, match="`process_group`: this rank is <no member of group"
            ):
                DistributedDataParallel(mlp(), process_group=group)

    run("threads", 2, body)


# -- ranks that differ


def layers(*widths: int, bias: bool = True) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, width, bias=bias) for width in widths))


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (
        lambda rank: layers(4, 4 + rank),
        r"parameter 2 is '1\.weight': float32 \[4, 4\] on rank 0, but '1\.weight': .*5, 4.* on rank 1",
    ),
    "dtype": (
        lambda rank: layers(4).to((torch.float32, torch.bfloat16)[rank % 2]),
        r"parameter 0 is '0\.weight': float32 .* on rank 0, but '0\.weight': bfloat16 .* on rank 1",
    ),
    "fewer": (
        lambda rank: layers(4, 4)[: 2 - rank % 2],
        r"parameter 2 is .* on rank 0, but missing on rank 1",
    ),
    "more": (
        lambda rank: layers(4, 4)[: 1 + rank % 2],
        r"parameter 2 is missing on rank 0, but '1.weight'.* on rank 1",
    ),
    "order": (
        lambda rank: Odd(**{name: nn.Parameter(torch.ones(2)) for name in ("ab", "ba")[rank % 2]}),
        r"parameter 0 is 'a': float32 \[2\] on rank 0, but 'b': float32 \[2\] on rank 1",
    ),
    "frozen": (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(rank == 0)),
        r"parameter 2 is .* on rank 0, but '1\.weight': float32 \[4, 4\] without gradient on rank 1",
    ),
    "strides": (
        lambda rank: Odd(a=nn.Parameter(torch.ones(2, 2).t() if rank else torch.ones(2, 2))),
        r"parameter 0 is .* but 'a': float32 \[2, 2\] with strides \[1, 2\] on rank 1",
    ),
    "buffers": (
        lambda rank: Odd(a=nn.Parameter(torch.ones(2)), b=torch.ones(rank)),
        r"buffer 0 is 'b': float32 \[0\] on rank 0, but 'b': float32 \[1\] on rank 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_hears_how_the_modules_differ_and_the_group_stays_usable(what: str) -> None:
    make, message = DIFFERENT[what]

    def body() -> None:
        with pytest.raises(InvalidArgumentError, match=message + "; wrap the same module on every rank"):
            DistributedDataParallel(make(dist.get_rank()))
        dist.barrier()

    run("threads", 3, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            lambda rank: {"bucket_cap_mb": 1 + rank},
            r"argument `bucket_cap_mb` is \[1.0, 1.0\] on rank 0, but \[1.0, 2.0\] on rank 1",
        ),
        (
            lambda rank: {"find_unused_parameters": rank == 1},
            "argument `find_unused_parameters` is False on rank 0, but True on rank 1",
        ),
        (
            lambda rank: {"broadcast_buffers": rank == 1},
            "argument `broadcast_buffers` is False on rank 0, but True on rank 1",
        ),
    ],
)
def test_arguments_that_ranks_must_share(arguments: Callable[[int], dict[str, Any]], message: str) -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            DistributedDataParallel(mlp(), **arguments(dist.get_rank()))

    run("threads", 2, body)


# -- passes that do not end as they should


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters_are_named_in_the_next_forward(views: bool) -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(Branches(), gradient_as_bucket_view=views)
        loss(wrapped(batch(1), 0, 2)).backward()
        with pytest.raises(GradientReductionError) as caught:
            wrapped(batch(1), 0)
        assert "Expected to have finished reduction in the prior iteration" in str(caught.value)
        rank = dist.get_rank()
        expected = f"did not receive grad for rank {rank}: branches.1.weight, branches.1.bias."
        assert f"Parameters which {expected}" in str(caught.value)
        assert f"Parameter indices which did not receive grad for rank {rank}: 2 3" in str(caught.value)
        assert "passing the keyword argument `find_unused_parameters=True`" in str(caught.value)
        assert "`forward` function outputs participate in calculating loss" in str(caught.value)
        assert wrapped._get_ddp_logging_data()["error"] == str(caught.value)
        with pytest.raises(GradientReductionError, match="Expected to have finished reduction"):
            wrapped._check_reducer_finalized()
        with torch.no_grad():
            wrapped(batch(1), 0)

    run("threads", 2, body)


def test_a_long_list_of_unused_parameters_is_cut() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(Branches(20))
        loss(wrapped(batch(1), 0)).backward()
        with pytest.raises(GradientReductionError, match=r"branches\.5\.bias and 28 more\."):
            wrapped(batch(1), 0)

    run("threads", 1, body)


def test_outputs_that_hide_their_tensors_cannot_be_looked_into() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Any:
            output = self.layer(x)
            return lambda: output

    def body() -> None:
        wrapped = DistributedDataParallel(Hidden(), find_unused_parameters=True)
        hidden = wrapped(batch(1))
        with pytest.raises(
            GradientReductionError, match="though no tensor in what forward returned depends on it"
        ):
            loss(hidden()).backward()

    run("threads", 1, body)


class Twice(nn.Module):
    """Runs a layer in two parts that are checkpointed each."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.other(x)


def test_a_gradient_that_is_computed_twice_is_named() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(Twice(reentrant=True))
        samples = batch(1).requires_grad_()
        with pytest.raises(
            GradientReductionError, match=r"variable ready only once.*'layer\.(weight|bias)'.*reentrant"
        ):
            loss(wrapped(samples)).backward()

    run("threads", 1, body)


def test_the_same_with_the_other_checkpointing_works() -> None:
    def body() -> int:
        wrapped = DistributedDataParallel(Twice(reentrant=False))
        loss(wrapped(batch(1).requires_grad_())).backward()
        return wrapped.statistics().steps

    assert run("threads", 2, body) == [1, 1]


def test_a_sparse_gradient_is_refused_when_it_comes() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=True)

    def body() -> None:
        wrapped = DistributedDataParallel(Lookup())
        with pytest.raises(
            InvalidArgumentError, match=r"'table' received a sparse gradient \(torch\.sparse_coo\)"
        ):
            wrapped(torch.tensor([1])).sum().backward()

    run("threads", 1, body)


# -- errors during backward


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the user's code")


def failing_step(wrapped: DistributedDataParallel) -> None:
    """Fails after the last layer's bucket is on its way, before the first layer's."""
    first, *others = wrapped.module
    model = nn.Sequential(first, *others)
    model.insert(2, nn.Identity())
    model[2].forward = Fails.apply
    wrapped.module = model
    loss(wrapped(batch(1))).backward()


def test_an_error_in_the_users_backward_is_raised_there_and_ends_the_others_wait() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp(), bucket_cap_mb=100 / 2**20)
        if dist.get_rank() == 1:
            failing_step(wrapped)
        loss(wrapped(batch(1))).backward()

    zero, one, two = outcomes("threads", 3, body)
    assert isinstance(one.error, ZeroDivisionError)
    for other in (zero, two):
        assert isinstance(other.error, GroupAbortedError)
        assert "rank 1 has destroyed the group" in other.message or "rank 1 died" in other.message


def test_after_an_error_in_backward_the_next_forward_tells() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp(), bucket_cap_mb=100 / 2**20)
        with pytest.raises(ZeroDivisionError):
            failing_step(wrapped)
        for _ in range(2):
            with pytest.raises(
                GradientReductionError, match=r"(?s)If backward raised an error, .*: 0\.weight, 0\.bias\."
            ):
                wrapped(batch(1))

    run("threads", 2, body)


def test_an_error_after_the_last_gradient_is_told_too() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        samples = batch(1).requires_grad_()
        with pytest.raises(ZeroDivisionError):
            loss(wrapped(Fails.apply(samples))).backward()
        with pytest.raises(GradientReductionError, match="backward raised an error before it ended"):
            wrapped(batch(1))

    run("threads", 2, body)


def test_a_reduction_that_failed_is_told_by_the_next_forward() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        if dist.get_rank() == 1:
            return
        with pytest.raises(GroupAbortedError):
            loss(wrapped(batch(1))).backward()
        with pytest.raises(GradientReductionError, match=r"failed on rank 0 .*make a new group and wrap"):
            wrapped(batch(1))

    run("threads", 2, body)


def test_backward_after_the_group_was_destroyed() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        dist.destroy_process_group()
        with pytest.raises(GroupDestroyedError):
            loss(wrapped(batch(1))).backward()

    run("threads", 2, body)


def test_a_hook_that_takes_a_gradient_away_is_told_off() -> None:
    def body() -> None:
        model = mlp()

        def take(parameter: torch.Tensor) -> None:
            parameter.grad = None

        model[0].weight.register_post_accumulate_grad_hook(take)
        wrapped = DistributedDataParallel(model)
        with pytest.raises(GradientReductionError, match=r"'0\.weight' was removed before it was averaged"):
            loss(wrapped(batch(1))).backward()

    run("threads", 1, body)
