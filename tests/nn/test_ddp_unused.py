"""Parameters that the outputs do not depend on: found, and averaged where some rank has used them."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, batch, loss, seeded
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.nn.parallel.outputs import tensors_in, unused_parameters
from worlds import run

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
CAPS = pytest.mark.parametrize("cap_mb", [25, 100 / 2**20], ids=["one bucket", "many buckets"])


def wrap(model: nn.Module, views: bool, cap_mb: float = 25) -> DistributedDataParallel:
    return DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=views, bucket_cap_mb=cap_mb
    )


def branch_gradients(model: Branches) -> list[torch.Tensor | None]:
    return [None if branch.weight.grad is None else branch.weight.grad.clone() for branch in model.branches]


@CAPS
@VIEWS
def test_unused_here_takes_the_others_average_unused_everywhere_stays_none(
    views: bool, cap_mb: float
) -> None:
    """Rank 0 uses branch 0, rank 1 uses branch 1, nobody uses branch 2."""
    model, samples = seeded(Branches), batch(1)

    def body() -> list[torch.Tensor | None]:
        own = copy.deepcopy(model)
        wrapped = wrap(own, views, cap_mb)
        for _ in range(2):
            wrapped.zero_grad()
            loss(wrapped(samples, dist.get_rank())).backward()
        return branch_gradients(own)

    found = run("threads", 2, body)
    for rank in (0, 1):
        loss(model(samples, rank)).backward()
    for gradients in found:
        assert gradients[2] is None
        for index in (0, 1):
            torch.testing.assert_close(gradients[index], model.branches[index].weight.grad / 2)


@CAPS
@VIEWS
def test_unused_everywhere_keeps_what_each_rank_had(views: bool, cap_mb: float) -> None:
    model = seeded(Branches)

    def body() -> None:
        own = copy.deepcopy(model)
        wrapped = wrap(own, views, cap_mb)
        own.branches[2].weight.grad = kept = torch.full((6, 6), float(dist.get_rank()))
        loss(wrapped(batch(1), 0, 1)).backward()
        own.branches[1].weight.grad.fill_(dist.get_rank())
        own.branches[0].weight.grad.zero_()
        loss(wrapped(batch(1), 0)).backward()
        zero, one, two = branch_gradients(own)
        assert zero is not None
        assert bool(zero.any())
        assert one is not None
        assert bool((one == dist.get_rank()).all())
        assert two is not None
        assert bool((two == dist.get_rank()).all())
        assert own.branches[2].weight.grad is kept

    run("threads", 3, body)


def test_what_was_used_in_one_step_is_not_in_the_next() -> None:
    def body() -> None:
        own = Branches()
        wrapped = wrap(own, False)
        loss(wrapped(batch(1), 0, 1)).backward()
        wrapped.zero_grad()
        loss(wrapped(batch(1), 0)).backward()
        assert [gradient is None for gradient in branch_gradients(own)] == [False, True, True]

    run("threads", 2, body)


@VIEWS
def test_what_no_sync_has_added_up_counts_as_used(views: bool) -> None:
    """A parameter that the last pass does not use is averaged if an earlier, not reduced one did."""
    model = seeded(Branches)

    def body() -> list[torch.Tensor | None]:
        own = copy.deepcopy(model)
        wrapped = wrap(own, views)
        with wrapped.no_sync():
            loss(wrapped(batch(1), dist.get_rank())).backward()
        loss(wrapped(batch(1), 0)).backward()
        return branch_gradients(own)

    found = run("threads", 2, body)
    loss(model(batch(1), 1)).backward()
    for gradients in found:
        torch.testing.assert_close(gradients[1], model.branches[1].weight.grad / 2)
        assert gradients[2] is None


def test_outputs_may_be_ignored() -> None:
    def body() -> int:
        wrapped = wrap(Branches(), False)
        for _ in range(3):
            wrapped(batch(1), 0)
        for _ in range(3):
            loss(wrapped(batch(1), 1)).backward()
        return wrapped.statistics().steps

    assert run("threads", 2, body) == [3, 3]


def test_a_rank_that_uses_no_parameter_still_takes_part() -> None:
    """Its output depends on its input only: its buckets are all full of zeros when backward begins."""
    model = seeded(Branches)

    def body() -> list[torch.Tensor | None]:
        own = copy.deepcopy(model)
        wrapped = wrap(own, False, 100 / 2**20)
        chosen = (0,) if dist.get_rank() == 0 else ()
        samples = batch(1).requires_grad_()
        loss(wrapped(samples * 1, *chosen)).backward()
        return branch_gradients(own)

    found = run("threads", 2, body)
    loss(model(batch(1), 0)).backward()
    for gradients in found:
        torch.testing.assert_close(gradients[0], model.branches[0].weight.grad / 2)
        assert gradients[1:] == [None, None]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


@VIEWS
def test_an_output_that_the_loss_leaves_out_counts_as_unused(views: bool) -> None:
    """Also after steps in which it was part of the loss; and its own backward may follow."""
    model = seeded(Two)

    def body() -> None:
        own = copy.deepcopy(model)
        wrapped = wrap(own, views)
        loss(wrapped(batch(1))["left"]).backward()
        assert own.right.weight.grad is None
        sum(loss(output) for output in wrapped(batch(1)).values()).backward()
        kept = own.right.weight.grad.clone()
        loss(wrapped(batch(1))["left"]).backward()
        assert torch.equal(own.right.weight.grad, kept)
        wrapped.zero_grad()
        outputs = wrapped(batch(1))
        loss(outputs["left"]).backward()
        loss(outputs["right"]).backward()
        torch.testing.assert_close(own.right.weight.grad, kept)

    run("threads", 2, body)


def test_an_undefined_gradient_of_the_output_reaches_no_parameter() -> None:
    def body() -> None:
        wrapped = wrap(Branches(), False)
        torch._C._functions.UndefinedGrad()(wrapped(batch(1), 0).sum()).backward()
        assert branch_gradients(wrapped.module) == [None, None, None]
        loss(wrapped(batch(1), 0)).backward()

    run("threads", 2, body)


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    note: str


Named = collections.namedtuple("Named", "value note")

SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda value: value,
    "list": lambda value: [1, value],
    "tuple": lambda value: (None, value),
    "dict": lambda value: {"a": {"b": value}},
    "dataclass": lambda value: Result(value, "text"),
    "named tuple": lambda value: Named(value, "text"),
    "nested": lambda value: collections.OrderedDict(a=[Result(value, "text"), "text"]),
}


def first_tensor(output: Any) -> torch.Tensor:
    return next(tensors_in(output))


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_looked_for_in(shape: str) -> None:
    class Shaped(Branches):
        def forward(self, x: torch.Tensor, *chosen: int) -> Any:
            return SHAPES[shape](super().forward(x, *chosen))

    def body() -> None:
        wrapped = wrap(Shaped(), False)
        loss(first_tensor(wrapped(batch(1), 0))).backward()
        assert wrapped.statistics().steps == 1

    run("threads", 1, body)


def test_the_walk_through_the_graph() -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    both, one = first * second, (first + 1).detach() * second
    assert unused_parameters([both, one], [first, second, third]) == [2]
    assert unused_parameters([one], [first, second, third]) == [0, 2]
    assert unused_parameters([], [first, second]) == [0, 1]
    assert unused_parameters([torch.ones(1)], [first]) == [0]
    assert unused_parameters([first], [first, second]) == [1], "a parameter may be an output itself"
