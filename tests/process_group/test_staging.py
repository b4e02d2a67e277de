"""Tensors of GPUs: their operations run on copies in pinned memory.

Without a GPU, tensors of one dtype play the part of those of a device, and copies are noted down.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import torchestra as dist
from devices import gpu
from torchestra.communicator import multi_tensor
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.host_staging import POSSIBLE, StagingBuffers, run_staged, staged
from torchestra.communicator.work import Work
from torchestra.engine.operations import ALL_TO_ALL, GATHER
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp
from worlds import KINDS, run


class NotedCopies:
    """Plain copies, and what was copied."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, ...]] = []
        self.given_back: list[tuple[int, ...]] = []

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, twin in pairs:
            assert tensor.shape == twin.shape
            self.fetched.append(tuple(tensor.shape))
            twin.copy_(tensor)

    def give_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, twin in pairs:
            self.given_back.append(tuple(tensor.shape))
            tensor.copy_(twin)


def is_of_device(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float64


def call(copies: NotedCopies, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Work | None:
    """Return what ``staged`` makes of the method of a communicator, with our device and its copies."""
    bound = inspect.signature(method).bind(dist.group.WORLD.communicator, *args, **kwargs)
    return run_staged(
        method, bound, is_of_device, lambda tensors: StagingBuffers(tensors, copies, pinned=False)
    )


def on_device(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def reduce_in_place() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    copies, tensor = NotedCopies(), on_device(3, value=rank + 1.0)
    assert call(copies, Communicator.all_reduce, tensor, ReduceOp.SUM) is None
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    assert (copies.fetched, copies.given_back) == ([(3,)], [(3,)])
    tensors = [on_device(2, value=rank + 1.0), on_device(2, value=10.0)]
    work = call(copies, multi_tensor.all_reduce_together, tensors, ReduceOp.MAX, async_op=True)
    work.wait()
    assert [id(each) for each in work.result()] == [id(each) for each in tensors]
    assert [each.tolist() for each in tensors] == [[10.0, 10.0]] * 2


def copy_no_more_than_needed() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    copies, own, output = NotedCopies(), on_device(2, value=rank), on_device(2 * size)
    call(copies, Communicator.all_gather_into_tensor, output, own)
    assert output.tolist() == [peer for peer in range(size) for _ in range(2)]
    assert (copies.fetched, copies.given_back) == ([(2,)], [(2 * size,)])
    copies, outputs = NotedCopies(), [on_device(2) for _ in range(size)]
    work = call(
        copies, Communicator.collective, GATHER, outputs if rank == 1 else None, own, root=1, async_op=True
    )
    work.wait()
    assert copies.fetched == [(2,)]
    assert copies.given_back == ([(2,)] * size if rank == 1 else [])
    assert [id(each) for each in work.result()] == ([id(each) for each in outputs] if rank == 1 else [])
    assert rank != 1 or [each[0].item() for each in outputs] == list(range(size))


def mind_layouts() -> None:
    size = dist.get_world_size()
    wide = on_device(1, 3, value=1.0).expand(4, 3)
    copies, output = NotedCopies(), on_device(4 * size, 3)
    call(copies, Communicator.all_gather_into_tensor, output, wide)  # to read it is enough to copy one row
    assert copies.fetched == [(1, 3)]
    assert output.tolist() == [[1.0] * 3] * 4 * size
    with pytest.raises(InvalidArgumentError, match="expanded tensor"):
        call(copies, Communicator.all_reduce, wide, ReduceOp.SUM)
    turned = torch.arange(6, dtype=torch.float64).view(2, 3).t()
    call(copies, Communicator.all_reduce, turned, ReduceOp.SUM)
    assert turned.tolist() == [[0.0, 3.0 * size], [size, 4.0 * size], [2.0 * size, 5.0 * size]]
    leaf = on_device(2, value=1.0).requires_grad_()
    call(copies, Communicator.all_gather_into_tensor, on_device(2 * size), leaf)
    mixed = [on_device(1), torch.zeros(1, dtype=torch.float32)]
    with pytest.raises(InvalidArgumentError, match="different dtypes"):
        call(copies, Communicator.collective, ALL_TO_ALL, mixed[:size], [on_device(1)] * size)


def keep_the_order() -> None:
    """The values are copied when it is the operation's turn, after those before it have written them."""
    size = dist.get_world_size()
    copies, tensor = NotedCopies(), on_device(1, value=1.0)
    works = [call(copies, Communicator.all_reduce, tensor, ReduceOp.SUM, async_op=True) for _ in range(5)]
    with dist.coalescing_manager():
        assert call(copies, Communicator.all_reduce, tensor, ReduceOp.SUM) is None
    for work in works:
        work.wait()
    assert tensor.item() == size**6


@pytest.mark.parametrize("body", [reduce_in_place, copy_no_more_than_needed, mind_layouts, keep_the_order])
def test_operations_run_on_copies_in_pinned_memory(body: Callable[[], None]) -> None:
    run("threads", 2, body)


@pytest.mark.skipif(POSSIBLE, reason="torch was built with CUDA")
def test_without_cuda_nothing_stands_before_an_operation() -> None:
    def method() -> None: ...

    assert staged(method) is method


def on_gpu() -> None:
    """Every operation, with its tensors on the GPU and made on a stream of the program's own."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    stream = torch.cuda.Stream()

    def make(*shape: int, value: float = 0.0) -> torch.Tensor:
        torch.cuda._sleep(1_000_000)  # what is copied too early is not there yet
        return torch.full(shape, float(value), device="cuda")

    with torch.cuda.stream(stream):
        total = size * (size + 1) / 2
        tensor = make(1000, value=rank + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), torch.full((1000,), total))
        tensor = make(5, value=rank + 1)
        work = dist.all_reduce(tensor, ReduceOp.AVG, async_op=True)
        work.wait()
        assert torch.equal((tensor * 2).cpu(), torch.full((5,), float(size + 1)))
        pair = [make(3, value=1), make(3, value=2)]
        group.allreduce(pair).wait()
        assert all(torch.equal(each.cpu(), torch.full((3,), 3.0 * size)) for each in pair)
        lists = [make(3, value=rank), make(2, value=rank)]
        dist.all_reduce_coalesced(lists)
        assert lists[1].tolist() == [total - size] * 2
        tensor = make(4, value=rank)
        dist.broadcast(tensor, 1)
        assert tensor.tolist() == [1.0] * 4
        tensor = make(4, value=rank + 1)
        dist.reduce(tensor, 0)
        assert tensor.tolist() == [total if rank == 0 else rank + 1.0] * 4
        outputs = [make(2) for _ in range(size)]
        dist.all_gather(outputs, make(2, value=rank))
        assert [each[0].item() for each in outputs] == list(range(size))
        whole = make(2 * size)
        dist.all_gather_into_tensor(whole, make(2, value=rank))
        assert whole.tolist() == [peer for peer in range(size) for _ in range(2)]
        dist.gather(make(2, value=rank), outputs if rank == 0 else None, 0)
        own = make(2)
        dist.scatter(own, [make(2, value=peer) for peer in range(size)] if rank == 0 else None, 0)
        assert own.tolist() == [rank] * 2
        dist.reduce_scatter(own, [make(2, value=peer) for peer in range(size)])
        assert own.tolist() == [rank * size] * 2
        dist.reduce_scatter_tensor(own, make(2 * size, value=1))
        assert own.tolist() == [size] * 2
        dist.all_to_all(outputs, [make(2, value=rank * 10 + peer) for peer in range(size)])
        assert [each[0].item() for each in outputs] == [peer * 10 + rank for peer in range(size)]
        dist.all_to_all_single(whole, make(2 * size, value=rank))
        assert whole.tolist() == [peer for peer in range(size) for _ in range(2)]
        right, left = (rank + 1) % size, (rank - 1) % size
        received = make(7)
        sent = dist.isend(make(7, value=rank), right)
        assert dist.recv(received, left) == left
        sent.wait()
        assert received.tolist() == [left] * 7
        work = dist.irecv(received, left, tag=1)
        dist.send(make(7, value=rank + 100), right, tag=1)
        work.wait()
        assert work.result()[0] is received
        assert received.tolist() == [left + 100] * 7
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], size=(size,), check_invariants=True).cuda()
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1.0] * size
        mixed = [torch.zeros(2), *[make(2) for _ in range(size - 1)]]
        dist.all_gather(mixed, make(2, value=rank))  # on the CPU as well as on the GPU
        assert [each[0].item() for each in mixed] == list(range(size))
    dist.barrier(device_ids=[0])


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_takes_tensors_of_gpus(kind: str) -> None:
    run(kind, 2, on_gpu)
