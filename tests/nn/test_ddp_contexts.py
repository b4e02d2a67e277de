"""DistributedDataParallel inside and outside of distributed autograd contexts, beside parts on other workers.

What is compared with is computed on one rank, of everybody's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import rpc_workers
import torchestra as dist
import worlds
from torchestra import autograd, rpc
from torchestra.nn import RemoteModule
from torchestra.nn.parallel import DistributedDataParallel

TRAINERS = 4


def inputs_of(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * number + rank + 1))


def seeded(module: nn.Module) -> nn.Module:
    """With parameters that are the same wherever, and whenever, it is made."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return module


def linear(*sizes: int) -> nn.Module:
    return seeded(nn.Linear(*sizes))


def in_context(loss_of: Any, *args: Any) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of a loss, in a context."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(*args)])
        return autograd.get_gradients(context_id)


def compare_dense(rank: int, options: dict[str, Any]) -> None:
    net = linear(2, 3)
    model = DistributedDataParallel(net, **options)
    for number in range(3):
        inputs = inputs_of(rank, number)
        model.zero_grad()
        found = in_context(lambda inputs=inputs: model(inputs).norm())
        assert all(each.grad is None for each in net.parameters())
        model(inputs).norm().backward()
        assert found.keys() == set(net.parameters())
        for each in net.parameters():
            torch.testing.assert_close(found[each], each.grad)
    alone = [_alone(linear(2, 3), inputs_of(peer, 2)) for peer in range(dist.get_world_size())]
    torch.testing.assert_close(net.weight.grad, torch.stack(alone).mean(0))


def _alone(net: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    net(inputs).norm().backward()
    assert net.weight.grad is not None
    return net.weight.grad


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("processes", {}),
        ("threads", {}),
        ("threads", {"gradient_as_bucket_view": True}),
        ("threads", {"bucket_cap_mb": 1e-5}),
    ],
)
def test_gradients_are_averaged_in_the_context(kind: str, options: dict[str, Any]) -> None:
    rpc_workers.run(kind, 3, compare_dense, options)


def compare_uneven(rank: int) -> None:
    net = linear(2, 3)
    model = DistributedDataParallel(net)
    with model.join():
        for number in range(1 if rank % 2 else 3):
            inputs = inputs_of(rank, number)
            found = in_context(lambda inputs=inputs: model(inputs).norm())
            model.zero_grad()
            model(inputs).norm().backward()
            for each in net.parameters():
                torch.testing.assert_close(found[each], each.grad)


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_ranks_may_have_fewer_inputs(kind: str) -> None:
    rpc_workers.run(kind, 4, compare_uneven)


def compare_sparse(rank: int) -> None:
    bag = seeded(nn.EmbeddingBag(10, 3, sparse=True))
    model = DistributedDataParallel(bag)
    inputs, offsets = torch.tensor([rank, 1, 2, (3 + rank) % 10, 4, 4]), torch.tensor([0, 3])
    model(inputs, offsets).sum().backward()
    found = in_context(lambda: model(inputs, offsets).sum())
    assert found.keys() == {bag.weight}
    assert found[bag.weight].is_sparse
    assert bag.weight.grad is not None
    torch.testing.assert_close(found[bag.weight].to_dense(), bag.weight.grad.to_dense())


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_sparse_gradients_are_averaged_in_the_context(kind: str) -> None:
    rpc_workers.run(kind, 3, compare_sparse)


def weight_gradient(rref: rpc.RRef, context_id: int) -> torch.Tensor:
    return autograd.get_gradients(context_id)[rref.local_value().weight]


def compare_remote(rank: int) -> None:
    """Below a DistributedDataParallel there is a layer of another worker's, for each rank its own."""
    for place in ("worker0/cpu", "worker0"):
        below = RemoteModule(place, linear, (4, 3))
        local, above = linear(4, 3), linear(3, 1)
        model = DistributedDataParallel(above)
        inputs = torch.rand(5, 4, generator=torch.Generator().manual_seed(rank))
        model(local(inputs)).sum().backward()
        with autograd.context() as context_id:
            autograd.backward(context_id, [model(below(inputs)).sum()])
            found = autograd.get_gradients(context_id)
            torch.testing.assert_close(found[above.weight], above.weight.grad)
            remote = rpc.rpc_sync("worker0", weight_gradient, (below.module_rref, context_id))
            torch.testing.assert_close(remote, local.weight.grad)


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_remote_layers_get_what_local_ones_get(kind: str) -> None:
    rpc_workers.run(kind, 3, compare_remote)


class Example:
    """Hold a trainer's data: dense features, places in a table, and values."""

    def __init__(self, trainer: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(trainer)
        self.dense = torch.randn(4 * steps, 2, generator=generator)
        self.places = torch.randint(0, 2, (4 * steps,), generator=generator)
        self.values = torch.randn(4 * steps, 1, generator=generator)

    def batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        parts = (each.split(size) for each in (self.dense, self.places, self.values))
        return zip(*parts, strict=True)


class Table(nn.Module):
    """An embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = seeded(nn.EmbeddingBag(2, 3, mode="sum"))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.bag(places, offsets=torch.arange(len(places)))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(inputs))


class Hybrid(nn.Module):
    """Two layers, and between them a table and a layer that may be anywhere."""

    def __init__(self, table: Any, middle: Any) -> None:
        super().__init__()
        self.first, self.last = linear(2, 2), linear(3, 1)
        object.__setattr__(self, "elsewhere", (table, middle))  # no parts of this module

    def forward(self, dense: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        table, middle = self.elsewhere
        return self.last(middle(torch.cat((self.first(dense), table(places)), 1)))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    dense, places, values = batch
    return (model(dense, places) * values).sum()


NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")


class Trainer:
    """One of those that have a model in common; made, and told what to do, by calls.

    Args:
        where: which part is a DistributedDataParallel: "nowhere", "inside" or "outside".
    """

    def __init__(self, table: rpc.RRef, middle: rpc.RRef, where: str) -> None:
        group = dist.new_group(range(TRAINERS), use_local_synchronization=True)
        self.server = (table, middle)
        owner = table.owner_name()
        self.hybrid = Hybrid(
            RemoteModule.init_from_module_rref(owner, table),
            RemoteModule.init_from_module_rref(owner, middle),
        )
        self.named = dict(self.hybrid.named_parameters())
        self.model: nn.Module = self.hybrid
        if where == "outside":
            self.model = DistributedDataParallel(self.hybrid, process_group=group)
        elif where == "inside":
            self.hybrid.last = DistributedDataParallel(self.hybrid.last, process_group=group)  # type: ignore[assignment]

    def train(self, example: Example, size: int, steps: int, uneven: bool) -> list[dict[str, torch.Tensor]]:
        """Of each step the gradients, here and on the server."""
        found = []
        joined = self.model.join() if uneven else nullcontext()
        with joined:
            for batch in list(example.batches(size))[:steps]:
                with autograd.context() as context_id:
                    autograd.backward(context_id, [loss_of(self.model, batch)])
                    gradients = autograd.get_gradients(context_id)
                    step = {name: gradients[each] for name, each in self.named.items()}
                    step |= rpc.rpc_sync(self.server[0].owner(), server_gradients, (*self.server, context_id))
                    found.append(step)
        assert all(each.grad is None for each in self.named.values())
        return found


def server_gradients(table: rpc.RRef, middle: rpc.RRef, context_id: int) -> dict[str, torch.Tensor]:
    gradients = autograd.get_gradients(context_id)
    parts = {"table": table.local_value(), "middle": middle.local_value()}
    return {
        f"{name}.{inner}": gradients[each]
        for name, part in parts.items()
        for inner, each in part.named_parameters()
    }


def expected_of(example: Example, size: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """The same of one trainer alone, with all parts here."""
    table, middle = Table(), Middle()
    model = Hybrid(table, middle)
    found = []
    for batch in list(example.batches(size))[:steps]:
        for part in (model, table, middle):
            part.zero_grad()
        loss_of(model, batch).backward()
        parts = {"table.": table, "middle.": middle, "": model}
        found.append(
            {
                prefix + name: each.grad.clone()
                for prefix, part in parts.items()
                for name, each in part.named_parameters()
                if each.grad is not None
            }
        )
    return found


def train_hybrid(rank: int, where: str, uneven: bool) -> None:
    """Worker 5 drives the trainers 0 to 3, and worker 4 has the table and the layer."""
    if rank == TRAINERS + 1:
        drive(where, uneven)


def drive(where: str, uneven: bool) -> None:
    server = f"worker{TRAINERS}"
    table, middle = rpc.remote(server, Table), rpc.remote(server, Middle)
    trainers = [rpc.remote(f"worker{rank}", Trainer, (table, middle, where)) for rank in range(TRAINERS)]
    size, most = 4, 3
    steps = [most - (uneven and rank < 2) for rank in range(TRAINERS)]
    examples = [Example(rank, most) for rank in range(TRAINERS)]
    futures = [
        trainer.rpc_async().train(example, size, number, uneven)
        for trainer, example, number in zip(trainers, examples, steps, strict=True)
    ]
    found = [future.wait() for future in futures]
    expected = [expected_of(each, size, number) for each, number in zip(examples, steps, strict=True)]
    shared = {"nowhere": (), "inside": NAMES[2:], "outside": NAMES}[where]
    for rank in range(TRAINERS):
        for step, gradients in enumerate(found[rank]):
            for name, gradient in gradients.items():
                alone = [each[step][name] for each in expected if step < len(each)]
                # Trainers that have no inputs any more count as zeros.
                average = torch.stack(alone).sum(0) / TRAINERS
                wanted = average if name in shared else expected[rank][step][name]
                torch.testing.assert_close(gradient, wanted, msg=f"{name} of trainer {rank} in step {step}")


@pytest.mark.parametrize(
    ("kind", "where", "uneven"),
    [
        ("threads", "nowhere", False),
        ("threads", "inside", False),
        ("threads", "outside", False),
        ("threads", "outside", True),
        ("processes", "inside", False),
        ("processes", "outside", True),
    ],
)
def test_a_model_with_remote_parts_over_four_trainers(kind: str, where: str, uneven: bool) -> None:
    rpc_workers.run(kind, TRAINERS + 2, train_hybrid, where, uneven)
