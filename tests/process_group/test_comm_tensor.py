"""Collectives traced by make_fx: where the trace begins them, and where it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torchestra as dist
from devices import DEVICES
from torchestra.errors import InvalidArgumentTypeError
from torchestra.functional.comm_tensor import CommTensor, wait_comm
from torchestra.types import ReduceOp
from worlds import run


def all_reduce(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return dist.all_reduce(tensor, async_op=True), tensor


def all_gather(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    outputs = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    work = dist.all_gather(outputs, tensor, async_op=True)
    work.wait()
    return work, sum(outputs)


def all_gather_into_tensor(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    output = torch.zeros_like(torch.cat([tensor] * dist.get_world_size()))
    return dist.all_gather_into_tensor(output, tensor, async_op=True), output


def reduce_scatter(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    output = torch.zeros_like(tensor)
    inputs = [tensor + peer for peer in range(dist.get_world_size())]
    return dist.reduce_scatter(output, inputs, ReduceOp.premul_sum(2.0), async_op=True), output


def reduce_scatter_tensor(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    output = torch.zeros_like(tensor)
    whole = torch.cat([tensor + peer for peer in range(dist.get_world_size())])
    return dist.reduce_scatter_tensor(output, whole, async_op=True), output


def broadcast(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return dist.broadcast(tensor, src=0, async_op=True), tensor


def scatter(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    inputs = [tensor + peer for peer in range(dist.get_world_size())] if dist.get_rank() == 0 else []
    output = torch.zeros_like(tensor)
    return dist.scatter(output, inputs, src=0, async_op=True), output


def all_to_all(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    outputs = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    inputs = [tensor + peer for peer in range(dist.get_world_size())]
    return dist.all_to_all(outputs, inputs, async_op=True), sum(outputs)


def wrapped_twice(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return dist.all_reduce(CommTensor(tensor), async_op=True), tensor


def one_after_the_other(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
    dist.all_reduce(tensor, async_op=True).wait()
    return dist.all_reduce(tensor, async_op=True), tensor


CALLS = [
    all_reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
    broadcast,
    scatter,
    all_to_all,
    wrapped_twice,
    one_after_the_other,
]


def trace(call: Callable[[torch.Tensor], tuple[Any, torch.Tensor]], device: str) -> None:

    def program(tensor: torch.Tensor) -> torch.Tensor:
        work, result = call(CommTensor(tensor + tensor))
        work.wait()
        return result * 2

    start = torch.ones(2, 2, device=device) * dist.get_rank()
    traced = make_fx(program)(start.clone())
    traced.graph.lint()
    traced.graph.eliminate_dead_code()
    traced.recompile()
    (multiplied,) = [node for node in traced.graph.nodes if "mul.Tensor" in str(node.target)]
    chain = [multiplied]
    while isinstance(chain[-1].args[0], torch.fx.Node):
        chain.append(chain[-1].args[0])
    names = [node.target.__name__ for node in chain if node.op == "call_function"]
    assert any(node.target is wait_comm for node in chain), names
    assert CommTensor._is_supported(names[-1]), names
    # The trace is not of these values: it computes with what it is given.
    first = program(start + 1)
    assert type(first) is torch.Tensor
    assert torch.equal(traced(start + 1), first)
    assert not torch.equal(traced(start + 2), first)


def overlap(device: str) -> None:
    """Computation between a collective and the use of its result stands between them in the trace."""

    def program(tensor: torch.Tensor) -> torch.Tensor:
        reduced = CommTensor(tensor + 1)
        dist.all_reduce(reduced, async_op=True)
        other = torch.sin(tensor)
        return reduced * other

    start = torch.ones(3, device=device)
    traced = make_fx(program)(start)
    names = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"]
    assert names == ["add.Tensor", "all_reduce_", "sin.default", "wait_comm", "mul.Tensor"]
    assert torch.equal(traced(start), program(start))


def trace_all(device: str) -> list[str]:
    """In one world, because the first trace of a process takes seconds."""
    failed = []
    for call in (*CALLS, None):
        try:
            if call is None:
                overlap(device)
            else:
                trace(call, device)
        except AssertionError as error:
            failed.append(f"{call}: {error}")
    return failed


@pytest.mark.parametrize("device", DEVICES)
def test_a_traced_program_waits_where_the_result_of_a_collective_is_used(device: str) -> None:
    assert run("processes", 2, trace_all, device) == [[], []]


def eager() -> None:
    size = dist.get_world_size()
    tensor = torch.ones(2)
    wrapped = CommTensor(tensor)
    assert CommTensor(wrapped) is wrapped
    assert type(wrapped + 1) is CommTensor  # nothing has been called on it
    assert dist.all_reduce(wrapped) is None
    assert type(wrapped + 1) is torch.Tensor
    assert tensor.tolist() == [size] * 2
    assert repr(wrapped) == f"CommTensor(tensor([{size}., {size}.]))"
    kept = CommTensor(torch.ones(2))
    works = [dist.all_reduce(kept, async_op=True) for _ in range(3)]
    assert (kept * 1).tolist() == [size**3] * 2
    for work in works:
        work.wait()
    with pytest.raises(InvalidArgumentTypeError, match="tensors of type CommTensor are not supported"):
        dist.isend(wrapped, (dist.get_rank() + 1) % size)
    assert not CommTensor._is_supported("wait_comm")
    assert not CommTensor._is_supported("add.Tensor")


def test_without_a_tracer_it_waits_too() -> None:
    run("threads", 2, eager)
