"""Optimizers of parameters that lie on other workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rpc_workers
import worlds
from torchestra import autograd, rpc
from torchestra.optim import DistributedOptimizer, FunctionalOptimizer

CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.NAdam, {"lr": 0.05}),
    (torch.optim.RAdam, {"lr": 0.05}),
    (torch.optim.Adamax, {"lr": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adadelta, {"rho": 0.95}),
    (torch.optim.Adafactor, {"lr": 0.05}),
    (torch.optim.ASGD, {"lr": 0.05}),
    (torch.optim.RMSprop, {"lr": 0.05, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.05}),
]


class Layer:
    """A weight, and what it does to inputs."""

    def __init__(self, seed: int, requires_grad: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.rand(3, 3, generator=generator).requires_grad_(requires_grad)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.weight @ inputs)

    def parameter(self) -> torch.Tensor:
        return self.weight

    def untouched(self) -> bool:
        return self.weight.grad is None


def train_here(optimizer_class: Any, options: dict[str, Any], steps: int) -> list[torch.Tensor]:
    layers = [Layer(1), Layer(2)]
    optimizer = optimizer_class([each.weight for each in layers], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        layers[1].forward(layers[0].forward(torch.eye(3))).sum().backward()
        optimizer.step()
    return [each.weight.detach() for each in layers]


def train_there(optimizer_class: Any, options: dict[str, Any], steps: int) -> list[torch.Tensor]:
    layers = [rpc.remote("worker1", Layer, (1,)), rpc.remote("worker2", Layer, (2,))]
    optimizer = DistributedOptimizer(
        optimizer_class, [each.remote().parameter() for each in layers], **options
    )
    for _ in range(steps):
        with autograd.context() as context_id:
            hidden = layers[0].rpc_sync().forward(torch.eye(3))
            loss = layers[1].rpc_sync().forward(hidden).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    assert all(each.rpc_sync().untouched() for each in layers)
    return [each.rpc_sync().parameter().detach() for each in layers]


def train_with_every_class() -> None:
    for optimizer_class, options in CLASSES:
        there = train_there(optimizer_class, options, 3)
        for found, expected in zip(there, train_here(optimizer_class, options, 3), strict=True):
            torch.testing.assert_close(found, expected, msg=f"{optimizer_class.__name__} {options}")


def test_every_optimizer_does_what_it_does_here() -> None:
    rpc_workers.first("processes", 3, train_with_every_class)


class Fails(torch.optim.Optimizer):
    def __init__(self, params: Any, when: str) -> None:
        super().__init__(params, {})
        self.when = when
        if when == "made":
            raise ValueError("cannot be made")

    def step(self, closure: Any = None) -> None:
        raise ValueError("cannot step")


def fail_there() -> None:
    layers = [rpc.remote(f"worker{rank}", Layer, (1,)) for rank in (0, 1, 2)]
    params = [each.remote().parameter() for each in layers]
    with pytest.raises(ValueError, match=r"(?s)On worker 'worker0'.*cannot be made") as caught:
        DistributedOptimizer(Fails, params, "made")
    if hasattr(caught.value, "__notes__"):
        assert "worker2" in "".join(caught.value.__notes__)  # all errors are told, not only the first
    optimizer = DistributedOptimizer(Fails, params[1:2], "step")
    with (
        autograd.context() as context_id,
        pytest.raises(ValueError, match=r"(?s)On worker 'worker1'.*cannot step"),
    ):
        optimizer.step(context_id)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        optimizer.step(context_id)
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [])
    with pytest.raises(TypeError, match="worker1"):
        DistributedOptimizer(torch.optim.SGD, params[1:2], wrong=3)


def test_what_goes_wrong_is_told_with_the_worker() -> None:
    rpc_workers.first("threads", 3, fail_there)


def train_without_gradients() -> None:
    used, unused = rpc.remote("worker1", Layer, (1,)), rpc.remote("worker1", Layer, (2,))
    frozen = rpc.remote("worker0", Layer, (3, False))
    before = [each.rpc_sync().parameter().detach().clone() for each in (used, unused, frozen)]
    params = [each.remote().parameter() for each in (used, unused, frozen)]
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1, weight_decay=0.1)
    with autograd.context() as context_id:
        hidden = used.rpc_sync().forward(torch.eye(3))
        autograd.backward(context_id, [frozen.rpc_sync().forward(hidden).sum()])
        optimizer.step(context_id)
    after = [each.rpc_sync().parameter().detach() for each in (used, unused, frozen)]
    changed = [not torch.equal(first, second) for first, second in zip(before, after, strict=True)]
    assert changed == [True, False, False]


def test_parameters_without_gradients_stay_as_they_are() -> None:
    rpc_workers.first("threads", 2, train_without_gradients)


class Counter:
    """A weight whose gradient is one, whatever happens meanwhile."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1000, requires_grad=True)

    def forward(self) -> torch.Tensor:
        return (self.weight * 1).sum()

    def parameter(self) -> torch.Tensor:
        return self.weight


_counters: dict[str, rpc.RRef] = {}
STEPS = 10


def share(rref: rpc.RRef) -> None:
    _counters[rpc.get_worker_info().name] = rref


def train_together(rank: int) -> None:
    """Trainers of the same parameters, each with an optimizer of its own."""
    if rank == 0:
        counter = rpc.RRef(Counter())
        for peer in range(3):
            rpc.rpc_sync(peer, share, (counter,))
    rpc.gathering.barrier()
    counter = _counters.pop(f"worker{rank}")
    weight = counter.remote().parameter()
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)

    for _ in range(STEPS):
        with autograd.context() as context_id:
            autograd.backward(context_id, [counter.rpc_sync().forward()])
            optimizer.step(context_id)
    rpc.gathering.barrier()
    assert torch.equal(weight.to_here(), torch.full((1000,), -3.0 * STEPS))


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_no_step_of_several_trainers_is_lost(kind: str) -> None:
    rpc_workers.run(kind, 3, train_together)


def test_gradients_are_given_and_those_of_others_stay() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first.grad = torch.full((2,), 7.0)
    optimizer = FunctionalOptimizer(torch.optim.SGD, [first, second], lr=0.5)
    optimizer.step([torch.ones(2), None])
    assert (first.tolist(), second.tolist(), first.grad.tolist()) == ([0.5, 0.5], [1, 1], [7, 7])
    optimizer.step_param(second, torch.ones(2))
    assert second.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"does not equal.*Params length: 2. Gradients length: 1"):
        optimizer.step([None])


def test_parameters_may_come_with_their_gradients() -> None:
    optimizer = FunctionalOptimizer(torch.optim.Adam, lr=0.1)
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for param in params:
        optimizer.step_param(param, torch.ones(2))
    assert torch.equal(params[0], params[1])
    assert params[0].tolist() != [1, 1]


def test_a_parameter_whose_data_are_replaced_is_followed() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FunctionalOptimizer(torch.optim.SGD, [param], lr=1.0)
    param.data = torch.zeros(2)
    optimizer.step([torch.ones(2)])
    assert param.tolist() == [-1, -1]
