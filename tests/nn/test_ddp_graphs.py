"""Graphs that are not simply gone through once: checkpoints, shared and reused layers, static graphs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, batch, gradients, loss, seeded, share
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchestra as dist
from torchestra.errors import GradientReductionError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
TINY_BUCKETS_MB = 100 / 2**20


def mine(samples: torch.Tensor) -> torch.Tensor:
    return share(samples, dist.get_rank(), dist.get_world_size())


class Once(nn.Module):
    """Runs its second layer in a checkpoint; a layer more is never used if ``unused``."""

    def __init__(self, reentrant: bool, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.reentrant = reentrant
        if unused:
            self.unused = nn.Linear(6, 6)

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.run_second(self.first(x)).tanh())


class Twice(Once):
    """Runs its second layer in two checkpoints."""

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        return super().run_second(super().run_second(x).tanh())


class Shares(Twice):
    """The layer in the checkpoints has the weight of one outside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.second.weight = self.third.weight


class Changing(Twice):
    """Leaves out the second layer in every other step."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.steps = 0

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().run_second(x) if self.steps % 2 else x


def check(
    make: Callable[[], nn.Module],
    *,
    steps: int = 3,
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    **options: Any,
) -> None:
    """Every step's gradients are those of one process on everybody's samples."""
    model, size = seeded(make), 2

    def body() -> list[list[torch.Tensor | None]]:
        wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=TINY_BUCKETS_MB, **options)
        found = []
        for step in range(steps):
            wrapped.zero_grad()
            samples = mine(batch(size, seed=step)).requires_grad_()
            loss(call(wrapped, samples)).backward()
            found.append(gradients(wrapped))
        assert wrapped.statistics().steps == steps
        return found

    alone = copy.deepcopy(model)
    expected = []
    for step in range(steps):
        alone.zero_grad()
        loss(call(alone, batch(size, seed=step).requires_grad_())).backward()
        expected.append(gradients(alone))
    for found in run("threads", size, body):
        torch.testing.assert_close(found, expected)


@VIEWS
@REENTRANT
@pytest.mark.parametrize("static", [False, True])
def test_a_checkpoint(static: bool, reentrant: bool, views: bool) -> None:
    check(lambda: Once(reentrant), static_graph=static, gradient_as_bucket_view=views)


@VIEWS
@REENTRANT
def test_a_checkpoint_beside_unused_parameters(reentrant: bool, views: bool) -> None:
    """A reentrant checkpoint hides what it uses; that the graph is static says it too."""
    options = {"gradient_as_bucket_view": views}
    expected = pytest.raises(GradientReductionError, match="Expected to mark a variable ready only once")
    with expected if reentrant else contextlib.nullcontext():
        check(lambda: Once(reentrant, unused=True), find_unused_parameters=True, **options)
    check(lambda: Once(reentrant, unused=True), static_graph=True, **options)
    check(lambda: Once(reentrant, unused=True), static_graph=True, find_unused_parameters=True, **options)


@VIEWS
@REENTRANT
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_layer_in_two_checkpoints(find_unused: bool, reentrant: bool, views: bool) -> None:
    options = {"find_unused_parameters": find_unused, "gradient_as_bucket_view": views}
    expected = pytest.raises(GradientReductionError, match="Expected to mark a variable ready only once")
    with expected if reentrant else contextlib.nullcontext():
        check(lambda: Twice(reentrant), **options)


@VIEWS
@REENTRANT
@pytest.mark.parametrize("model", [Twice, Shares])
def test_a_layer_in_two_checkpoints_of_a_static_graph(
    model: type[Twice], reentrant: bool, views: bool
) -> None:
    check(lambda: model(reentrant), static_graph=True, gradient_as_bucket_view=views)


@VIEWS
@pytest.mark.parametrize("model", [Shares, Changing])
def test_graphs_that_change_and_share_with_checkpoints_that_are_not_reentrant(
    model: type[Twice], views: bool
) -> None:
    check(lambda: model(False), find_unused_parameters=True, gradient_as_bucket_view=views, steps=4)


@VIEWS
@REENTRANT
@pytest.mark.parametrize("static", [False, True])
def test_the_wrapper_itself_in_a_checkpoint(static: bool, reentrant: bool, views: bool) -> None:
    """Its forward runs without gradients first, or twice."""
    model = seeded(lambda: Shares(False))
    options = {"static_graph": static, "gradient_as_bucket_view": views}
    layers = lambda: nn.Sequential(copy.deepcopy(model.first), copy.deepcopy(model.third))  # noqa: E731

    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=reentrant)

    check(layers, call=call, **options)


# -- static graphs


@VIEWS
def test_a_static_graph_reduces_like_any_other(views: bool) -> None:
    check(lambda: Once(False), static_graph=True, gradient_as_bucket_view=views, steps=5)


@VIEWS
def test_a_static_graph_of_several_passes(views: bool) -> None:
    check(
        lambda: Once(False),
        static_graph=True,
        gradient_as_bucket_view=views,
        call=lambda model, x: model(x) + model(x * 2),
    )


@VIEWS
def test_unused_parameters_of_a_static_graph_are_agreed_on_once(views: bool) -> None:
    """Rank 0 uses branch 0, rank 1 branch 1, nobody branch 2; in every step."""
    model = seeded(Branches)

    def body() -> list[list[torch.Tensor | None]]:
        own = copy.deepcopy(model)
        wrapped = DistributedDataParallel(own, static_graph=True, gradient_as_bucket_view=views)
        found = []
        for _ in range(3):
            wrapped.zero_grad()
            loss(wrapped(batch(1), dist.get_rank())).backward()
            found.append(gradients(own))
        assert wrapped._get_ddp_logging_data()["has_rebuilt_buckets"] == 1
        return found

    found = run("threads", 2, body)
    for rank in (0, 1):
        loss(model(batch(1), rank)).backward()
    for steps in found:
        for step in steps:
            for index in (0, 2):
                branch = model.branches[index // 2]
                torch.testing.assert_close(step[index], branch.weight.grad / 2)
            assert step[4:] == [None, None]


def test_a_static_graph_that_is_none_is_told_of() -> None:
    def body() -> None:
        message = r"Your training graph has changed .* unused in first.*'branches\.1\.(weight|bias)'"
        wrapped = DistributedDataParallel(Branches(2), static_graph=True)
        loss(wrapped(batch(1), 0)).backward()
        with pytest.raises(GradientReductionError, match=message):
            loss(wrapped(batch(1), 0, 1)).backward()

        wrapped = DistributedDataParallel(Branches(2), static_graph=True)
        for _ in range(2):
            loss(wrapped(batch(1), 0, 1)).backward()
        loss(wrapped(batch(1), 0)).backward()
        message = r"(?s)Expected to have finished reduction.*got unused in the second.*indices .* rank 0: 2 3"
        with pytest.raises(GradientReductionError, match=message):
            wrapped(batch(1), 0)

    run("threads", 1, body)


@pytest.mark.filterwarnings("ignore:static_graph is set already")
def test_a_graph_becomes_static_before_training_or_not_at_all() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(Branches(1))
        wrapped._set_static_graph()
        wrapped._set_static_graph()
        loss(wrapped(batch(1), 0)).backward()
        wrapped = DistributedDataParallel(Branches(1))
        loss(wrapped(batch(1), 0)).backward()
        message = r"set_static_graph\(\) should be called before training loop starts"
        with pytest.raises(RuntimeError, match=message):
            wrapped._set_static_graph()
        assert message.replace("\\", "") in wrapped._get_ddp_logging_data()["error"]

    run("threads", 1, body)


def test_whether_a_graph_could_be_static_is_found_out() -> None:
    def body() -> tuple[int, int]:
        found = []
        for changes in (False, True):
            wrapped = DistributedDataParallel(Branches(2), find_unused_parameters=True)
            for step in range(4):
                loss(wrapped(batch(1), step % 2 if changes else 0)).backward()
            found.append(wrapped._get_ddp_logging_data()["can_set_static_graph"])
        return tuple(found)

    assert run("threads", 1, body) == [(1, 0)]


# -- other ways to call


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh())


@VIEWS
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_a_layer_that_is_used_twice(options: dict[str, bool], views: bool) -> None:
    check(Reused, gradient_as_bucket_view=views, **options)


class NoGradientOutput(Reused):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        x = super().forward(x)
        return x.detach(), x.clone(), {"new": torch.ones(2)}


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_outputs_without_gradients(options: dict[str, bool]) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        plain, output, other = model(x)
        assert not plain.requires_grad
        assert other["new"].grad_fn is None
        return output + plain

    check(NoGradientOutput, call=call, **options)


def test_an_output_that_is_changed_in_place() -> None:
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        output /= 10
        return output

    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        check(Reused, call=call, **options)


def test_hooks_of_modules_run() -> None:
    def make() -> nn.Module:
        model = Reused()
        model.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0].relu(),))
        model.layer.register_forward_hook(lambda module, inputs, output: output * 2)
        model.layer.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
        return model

    check(make)


def test_functional_call_leaves_the_wrappers_state_alone() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(nn.Linear(1, 1))
        before = [each.clone() for each in wrapped.parameters()]
        weight, bias = torch.ones(1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
        x = torch.tensor([[3.0]])
        result = torch.func.functional_call(wrapped, {"module.weight": weight, "module.bias": bias}, x)
        assert torch.equal(result, x)
        result.backward()
        assert weight.grad is not None
        assert bias.grad is not None
        for parameter, former in zip(wrapped.parameters(), before, strict=True):
            assert torch.equal(parameter, former)
            assert parameter.grad is None
        wrapped(x).backward()
        assert wrapped.module.weight.grad is not None

    run("threads", 2, body)
