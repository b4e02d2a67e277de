"""Modules drawn at random: shared weights, unused branches, several dtypes, in-place operations."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from unittest import mock

import torch
from ddp_models import batch, gradients, loss, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel, reducer
from worlds import run

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Node:
    """A step of a forward pass: which layer, on which earlier values, and what then.

    Attributes:
        layer: its number.
        inputs: which values are added up for it: 0 is the module's input.
        then: what is done to its output.
        ranks: which ranks take this step; the others hand on its input.
    """

    layer: int
    inputs: tuple[int, ...]
    then: str
    ranks: int


THEN = {
    "tanh": torch.tanh,
    "in place": lambda x: x.clone().mul_(2).relu_(),
    "nothing": lambda x: x,
    "detached": lambda x: x.detach() + x.mean(),
}


class Drawn(nn.Module):
    def __init__(self, dtypes: list[torch.dtype], shared: list[int], nodes: list[Node]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)
        for index, source in enumerate(shared):
            if dtypes[source % len(dtypes)] is dtypes[index % len(dtypes)]:
                self.layers[index % len(dtypes)].weight = self.layers[source % len(dtypes)].weight
        self.nodes = nodes

    def forward(self, x: torch.Tensor, rank: int) -> dict[str, list[torch.Tensor]]:
        values = [x]
        for node in self.nodes:
            total = sum(values[index % len(values)] for index in node.inputs)
            if node.ranks >> (rank % 2) & 1:
                layer = self.layers[node.layer % len(self.layers)]
                total = THEN[node.then](layer(total.to(layer.weight.dtype))).to(x.dtype)
            values.append(total)
        return {"outputs": [values[-1], values[len(values) // 2]]}


NODES = st.builds(
    Node,
    layer=st.integers(0, 5),
    inputs=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    then=st.sampled_from(sorted(THEN)),
    ranks=st.sampled_from([3, 3, 3, 1, 2]),
)


@settings(max_examples=25, deadline=None)
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    shared=st.lists(st.integers(0, 3), max_size=3),
    nodes=st.lists(NODES, min_size=1, max_size=6),
    both_outputs=st.booleans(),
    cap_bytes=st.integers(1, 400),
    views=st.booleans(),
    static=st.booleans(),
    keep=st.booleans(),
    spare=st.integers(0, 1),
)
def test_gradients_are_those_of_the_ranks_losses_on_average(
    dtypes: list[torch.dtype],
    shared: list[int],
    nodes: list[Node],
    both_outputs: bool,
    cap_bytes: int,
    views: bool,
    static: bool,
    keep: bool,
    spare: int,
) -> None:
    """``keep``: gradients of the step before are kept, and added to. ``spare``: cores to reduce on beside."""
    model, size, steps = seeded(lambda: Drawn(dtypes, shared, nodes)), 2, 3

    def objective(outputs: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        # Always depends on something: a rank may have used no parameter at all.
        found = outputs["outputs"][: 2 if both_outputs else 1]
        return sum(loss(each) for each in found)

    def samples(rank: int, step: int) -> torch.Tensor:
        return batch(1, seed=10 * step + rank).requires_grad_()

    def body() -> list[list[torch.Tensor | None]]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model),
            find_unused_parameters=not static,
            static_graph=static,
            gradient_as_bucket_view=views,
            bucket_cap_mb=cap_bytes / 2**20,
        )
        rank, found = dist.get_rank(), []
        for step in range(steps):
            if not keep:
                wrapped.zero_grad()
            objective(wrapped(samples(rank, step), rank)).backward()
            found.append(gradients(wrapped))
        return found

    with mock.patch.object(reducer, "spare_cores", return_value=spare):
        found = run("threads", size, body)
    alone = [copy.deepcopy(model) for _ in range(size)]
    for step in range(steps):
        everybodys = []
        for rank, each in enumerate(alone):
            if not keep:
                each.zero_grad()
            objective(each(samples(rank, step), rank)).backward()
            everybodys.append(gradients(each))
        for index, parts in enumerate(zip(*everybodys, strict=True)):
            given_parts = [part for part in parts if part is not None]
            for rank in range(size):
                ours = found[rank][step][index]
                if not given_parts:
                    assert ours is None
                    continue
                mean = sum(part.double() for part in given_parts) / size
                assert ours is not None
                tolerance = 3e-2 if ours.dtype is torch.bfloat16 else 1e-4
                torch.testing.assert_close(ours.double(), mean, rtol=tolerance, atol=tolerance)
                assert torch.equal(ours, found[0][step][index])
        if keep:
            # From here on every rank adds to the average.
            for each in alone:
                for parameter, ours in zip(each.parameters(), found[0][step], strict=True):
                    parameter.grad = None if ours is None else ours.clone()


def test_ranks_are_bit_identical_over_200_steps() -> None:
    """Three dtypes, shared weights, a branch that one rank uses in every third step, Adam."""

    def body() -> list[torch.Tensor]:
        torch.manual_seed(0)
        nodes = [
            Node(0, (0,), "tanh", 3),
            Node(1, (1,), "in place", 3),
            Node(2, (2,), "tanh", 3),
            Node(3, (3, 1), "tanh", 1),
        ]
        model = Drawn([*DTYPES, torch.float32], [0, 0, 0, 0], nodes)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=200 / 2**20)
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.003)
        rank = dist.get_rank()
        for step in range(200):
            optimizer.zero_grad()
            outputs = wrapped(batch(1, seed=2 * step + rank), rank if step % 3 else 1)
            loss(outputs["outputs"][0]).backward()
            optimizer.step()
        return [each.detach() for each in wrapped.parameters()]

    zero, one = run("threads", 2, body)
    for first, second in zip(zero, one, strict=True):
        assert bool(first.isfinite().all())
        assert torch.equal(first, second)
