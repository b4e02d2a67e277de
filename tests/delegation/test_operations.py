"""Every operation, by a backend of torch's, gives what it gives by this package's own engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from cases import CASES, MOVES, check_case
from stand_in import delegating

import torchestra as dist
from torchestra.engine.dtypes import DTYPES
from torchestra.engine.operations import COLLECTIVES
from torchestra.errors import DistError, GroupAbortedError, InvalidArgumentError
from worlds import run, store_barrier

RANKS = [("threads", 3), ("processes", 2), ("processes", 3)]


def every_case() -> None:
    with delegating() as stand_in:
        for case in CASES:
            if (row := COLLECTIVES.get(case.__name__)) is not None and not row.on_devices:
                continue  # such operations go through the host
            check_case(case, (0, 1, 33, 5003), (torch.float32,), ("ordinary",))
        used = set(stand_in.calls)
    assert {"allreduce", "alltoall_base", "_allgather_base", "_reduce_scatter_base", "gather"} <= used


@pytest.mark.parametrize(("kind", "size"), RANKS)
def test_every_operation_gives_what_its_formula_says(kind: str, size: int) -> None:
    run(kind, size, every_case)


def every_dtype_moves() -> None:
    plain = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]
    with delegating():
        for case in MOVES:
            check_case(case, (77,), plain, ("ordinary",))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_moves() -> None:
    run("threads", 2, every_dtype_moves)


def reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [float(peer + 2) for peer in range(size)]
    expected = {
        dist.ReduceOp.SUM: sum(values),
        dist.ReduceOp.PRODUCT: torch.tensor(values).prod().item(),
        dist.ReduceOp.MIN: min(values),
        dist.ReduceOp.MAX: max(values),
        dist.ReduceOp.AVG: sum(values) / size,
        dist.ReduceOp.premul_sum(0.5): sum(values) / 2,
    }
    for op, value in expected.items():
        tensor = torch.full((2, 3), values[rank], dtype=torch.float64)
        dist.all_reduce(tensor, op)
        assert torch.allclose(tensor, torch.full_like(tensor, value)), op
        output = torch.zeros(1, dtype=torch.float64)
        source = torch.full((size,), values[rank], dtype=torch.float64)
        dist.reduce_scatter_tensor(output, source, op)
        assert output.item() == pytest.approx(value), op
        assert source.tolist() == [values[rank]] * size
    tensor = torch.full((3,), complex(rank, 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [complex(sum(range(size)), size)] * 3


def layouts() -> None:
    """Tensors whose elements do not lie one after the other, of one element, and that need gradients."""
    size = dist.get_world_size()
    turned = torch.arange(6, dtype=torch.float32).view(2, 3).t()
    for beside in (False, True):
        found = turned.clone(memory_format=torch.preserve_format)
        assert not found.is_contiguous()
        work = dist.all_reduce(found, async_op=beside)
        assert (work is not None) is beside
        if work is not None:
            assert work.wait()
            assert work.result()[0] is found
        assert torch.equal(found, turned * size)
    single = torch.tensor(1.0, requires_grad=True)
    outputs = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(outputs, single)
    assert torch.stack(outputs).tolist() == [1.0] * size


def works() -> None:
    """In the order of the program, whatever is waited for; futures; results; a dropped Work."""
    size = dist.get_world_size()
    tensor = torch.ones(100)
    begun = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size**5)] * 100
    for work in begun:
        assert work.wait()
        work.synchronize()
        assert work.is_completed()
        assert work.is_success()
    work = dist.broadcast(tensor, 0, async_op=True)
    assert (
        work.get_future().then(lambda future: future.wait()[0] * 2).wait().tolist() == [2.0 * size**5] * 100
    )
    assert work.wait(10)
    dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    assert tensor.tolist() == [float(size**6)] * 100


def coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    tensors = [torch.full((length,), rank + 1.0) for length in (3, 1, 5)]
    dist.all_reduce_coalesced(tensors)
    assert [tensor[0].item() for tensor in tensors] == [total] * 3
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
    future = dist.all_gather_coalesced(
        lists, [torch.full((2,), float(rank)), torch.full((1,), rank + 0.5)], async_op=True
    )
    future.wait()
    assert [[each[0].item() for each in row] for row in lists] == [[peer, peer + 0.5] for peer in range(size)]
    first, second = torch.full((4,), rank + 1.0), torch.zeros(size)
    with dist.coalescing_manager(async_ops=True) as manager:
        work = dist.all_reduce(first, async_op=True)
        dist.all_gather_into_tensor(second, torch.tensor([float(rank)]))
        assert first[0].item() == rank + 1.0  # not before the end of the block
    manager.wait()
    work.wait()
    assert first.tolist() == [total] * 4
    assert second.tolist() == [float(peer) for peer in range(size)]
    group = dist.group.WORLD
    pair = [torch.full((2,), rank + 1.0), torch.full((2,), 1.0)]
    group.allreduce(pair).wait()
    assert [each.tolist() for each in pair] == [[total + size] * 2] * 2


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    work = dist.isend(torch.full((5,), float(rank)), right)
    received = torch.zeros(10)[::2]
    assert dist.recv(received, left) == left
    assert received.tolist() == [left] * 5
    work.wait()
    incoming = [torch.zeros(3) for _ in range(size)]
    peers = [peer for peer in range(size) if peer != rank]
    ops = [dist.P2POp(dist.irecv, incoming[peer], peer) for peer in peers]
    ops += [dist.P2POp(dist.isend, torch.full((3,), rank * 10.0 + peer), peer) for peer in peers]
    for begun in dist.batch_isend_irecv(ops):
        begun.wait()
    assert [incoming[peer][0].item() for peer in peers] == [peer * 10.0 + rank for peer in peers]


def objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "data": torch.full((20_000,), rank)})
    assert [each["rank"] for each in found] == list(range(size))
    assert [each["data"][-1].item() for each in found] == list(range(size))
    given = ["a", 2] if rank == 0 else [None, None]
    dist.broadcast_object_list(given)
    assert given == ["a", 2]


def functional() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4,), float(rank))
    found = dist.functional.all_reduce(tensor, "sum", dist.group.WORLD)
    assert (found + 1).tolist() == [sum(range(size)) + 1.0] * 4


BODIES = [reductions, layouts, works, coalesced, messages, objects, functional]


@pytest.mark.parametrize("body", BODIES)
def test_delegated(body: Callable[[], None]) -> None:
    run("threads", 3, in_stand_in, body)


def in_stand_in(body: Callable[[], None]) -> None:
    with delegating():
        body()
        store_barrier()  # Gloo's operations may end late on a rank, after the others have left the group


def of_a_subgroup() -> None:
    """A group of some ranks has a backend of its own."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank != 1:
        with delegating(group):
            tensor = torch.full((2,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2.0, 2.0]
            dist.broadcast(tensor.fill_(rank), 2, group=group)
            assert tensor.tolist() == [2.0, 2.0]
    store_barrier()


def test_a_subgroup_has_a_backend_of_its_own() -> None:
    run("threads", 3, of_a_subgroup)


def leave_a_block(tensor: torch.Tensor, works: list[dist.Work], ready: threading.Barrier) -> None:
    with dist.coalescing_manager():
        works.append(dist.all_reduce(tensor, async_op=True))
        ready.wait(20)
        raise DistError("leave the block")


def bad_input(ready: threading.Barrier) -> None:
    """Refused before anything is sent; but a block that has begun is the end of the group."""
    size = dist.get_world_size()
    with delegating() as stand_in:
        tensor = torch.ones(2)
        for wrong in (
            lambda: dist.all_gather([torch.zeros(2)] * (size + 1), tensor),
            lambda: dist.all_gather_into_tensor(torch.zeros(3), tensor),
            lambda: dist.all_reduce(torch.ones(1).expand(4)),
            lambda: dist.reduce_scatter_tensor(torch.zeros(2, dtype=torch.float64), torch.ones(2 * size)),
            lambda: dist.all_to_all_single(torch.zeros(2), tensor, [3, 1, 1], [1, 1, 1]),
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        ):
            with pytest.raises(InvalidArgumentError):
                wrong()
        assert stand_in.calls == []
        whole = torch.ones(2)
        dist.all_reduce(whole)
        assert whole.tolist() == [float(size)] * 2
        works: list[dist.Work] = []
        with pytest.raises(DistError, match="leave the block"):
            leave_a_block(tensor, works, ready)
        (work,) = works
        with pytest.raises(DistError, match="was not run"):
            work.wait()
        with pytest.raises(GroupAbortedError, match=r"left coalesced all_reduce\(SUM\) with DistError"):
            dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 2


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    run("threads", 3, bad_input, threading.Barrier(3))
