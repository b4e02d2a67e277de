"""A function that torch.compile has compiled may call what moves bytes: the graph breaks there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchestra as dist
from worlds import run


def exchange(tensor: torch.Tensor) -> torch.Tensor:
    """Call collectives, messages and objects, by functions and methods, between operations on tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    doubled = tensor * 2
    dist.all_reduce(doubled)
    gathered = torch.empty(size * tensor.numel())
    dist.all_gather_into_tensor(gathered, doubled + rank)
    work = dist.all_reduce(gathered, async_op=True)
    assert work is not None
    work.wait()
    dist.group.WORLD.broadcast(gathered, 1).wait()
    plan = dist.all_reduce_init(gathered)
    plan.start()
    plan.wait()
    dist.barrier()
    if rank == 0:
        dist.send(gathered, 1)
    else:
        dist.recv(gathered, 0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    return gathered.sum() + sum(objects) + doubled.sum()


def call_compiled() -> list[float]:
    compiled = torch.compile(exchange, backend="aot_eager")
    plain = exchange(torch.ones(4))
    return [call(torch.ones(4)).item() - plain.item() for call in (compiled, compiled)]


def test_a_compiled_function_gives_what_the_plain_one_gives() -> None:
    assert run("processes", 2, call_compiled) == [[0, 0]] * 2


def reduce(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def compile_whole() -> str:
    compiled = torch.compile(reduce, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(torch.ones(1))
    return str(caught.value)


def test_a_whole_graph_is_refused_with_the_functions_name() -> None:
    """And with what there is instead."""
    (message,) = run("threads", 1, compile_whole)
    assert "all_reduce" in message
    assert "torchestra.functional" in message
