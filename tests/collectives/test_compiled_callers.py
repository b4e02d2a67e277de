"""A function that torch.compile has compiled may call what moves bytes: the graph breaks there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # here, so that ranks, which are forked, need not import it

import torchestra as dist
from torchestra.functional import all_reduce
from torchestra.world.registry import current_world
from worlds import run

P2P_COMPILATION = "enable_p2p_compilation"  # torch since 2.12


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


def change_in_place(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Call the collectives that are traced."""
    assert dist.is_initialized()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    gathered = torch.empty(size, *tensor.shape)
    dist.all_gather_into_tensor(gathered, tensor + rank)
    pieces = [torch.empty_like(tensor) for _ in dist.get_process_group_ranks()]
    dist.all_gather(pieces, tensor * (dist.get_rank(group) + 1), group=group)
    scattered = torch.empty_like(tensor)
    dist.reduce_scatter_tensor(scattered, gathered)
    swapped = torch.empty_like(gathered)
    dist.all_to_all_single(swapped, gathered * (rank + 1))
    dist.broadcast(scattered, 1, group)
    return torch.cat([tensor, *pieces, scattered, swapped.flatten(0, 1)])


def compile_whole(function: Callable[..., torch.Tensor]) -> bool:
    group = dist.group.WORLD
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    tensors = [torch.arange(6.0).reshape(2, 3) * (dist.get_rank() + 1) for _ in range(2)]
    both = [call(each, group) for call, each in zip((compiled, function), tensors, strict=True)]
    return torch.equal(*both) and torch.equal(*tensors)


def test_collectives_that_change_their_tensors_are_traced() -> None:
    torch.compiler.reset()
    assert run("threads", 2, compile_whole, change_in_place) == [True, True]


def exchange_messages(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    peer = 1 - dist.get_rank()
    first, second, third = (torch.empty_like(tensor) for _ in range(3))
    works = [
        dist.irecv(second, peer, tag=3),
        dist.isend(tensor * 2, peer, group),
        dist.isend(tensor * 3, group_dst=peer, tag=3),
        dist.irecv(first, group_src=peer),
    ]
    for work in works:
        assert work is not None
        work.wait()
    operations = [dist.P2POp(dist.isend, first - second, peer), dist.P2POp(dist.irecv, third, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if peer == 1:
        dist.send(tensor, peer)
        dist.send(third, peer)
    else:
        assert dist.recv(tensor, peer) == peer
        assert dist.recv(third, group_src=peer) == peer
    return torch.cat([first, second, third])


def begin_messages(tensor: torch.Tensor) -> list[dist.Work | None]:
    return [dist.isend(tensor + 1, 1 - dist.get_rank()), dist.irecv(tensor, 1 - dist.get_rank())]


def compile_messages() -> list[bool]:
    dynamo_config: Any = torch._dynamo.config
    with dynamo_config.patch(P2P_COMPILATION, True):
        equal = compile_whole(exchange_messages)
        tensor = torch.full((2,), float(dist.get_rank()))
        for work in torch.compile(begin_messages, fullgraph=True, backend="aot_eager")(tensor):
            work.wait()
    return [equal, tensor.tolist() == [2.0 - dist.get_rank()] * 2]


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, P2P_COMPILATION), reason="this torch traces no messages"
)
def test_messages_are_traced() -> None:
    """Their works may also leave the compiled function."""
    torch.compiler.reset()
    assert run("threads", 2, compile_messages) == [[True, True]] * 2


def reduce_in(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor * (group.rank() + 1) + dist.get_rank()


def compile_for_a_direct_group() -> list[float]:
    store = current_world().default.store  # type: ignore[union-attr]
    group = dist.ProcessGroup(store, dist.get_rank(), dist.get_world_size())
    total = torch.compile(reduce_in, fullgraph=True, backend="aot_eager")(torch.ones(1), group)
    group.destroy()
    return total.tolist()


def test_a_group_that_was_made_directly_is_found_by_compiled_functions() -> None:
    torch.compiler.reset()
    assert run("threads", 2, compile_for_a_direct_group) == [[2], [5]]


def two_groups_of_one_name() -> None:
    first, second = (dist.ProcessGroup(dist.HashStore(), 0, 1, name="twin") for _ in range(2))
    with pytest.raises(dist.InvalidArgumentError, match="'twin' exists already; give a group"):
        all_reduce(torch.ones(1), "sum", "twin")
    second.destroy()
    assert all_reduce(torch.ones(1), "sum", "twin") == 1
    first.destroy()
    with pytest.raises(dist.NotInitializedError, match="'twin'"):
        all_reduce(torch.ones(1), "sum", "twin")


def test_a_name_of_two_groups_is_refused() -> None:
    run("threads", 1, two_groups_of_one_name)


def reduce_at_once_and_later(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.PREMUL_SUM(2.0))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    return tensor


def compile_what_is_not_traced() -> list[float]:
    return torch.compile(reduce_at_once_and_later, backend="aot_eager")(torch.ones(1)).tolist()


def test_what_functional_collectives_cannot_do_breaks_the_graph() -> None:
    assert run("processes", 2, compile_what_is_not_traced) == [[8], [8]]


def meet(tensor: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return tensor


def compile_a_barrier() -> str:
    compiled = torch.compile(meet, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(torch.ones(1))
    return str(caught.value)


def test_a_whole_graph_is_refused_with_the_functions_name() -> None:
    """And with what there is instead."""
    (message,) = run("threads", 1, compile_a_barrier)
    assert "barrier" in message
    assert "torchestra.functional" in message
