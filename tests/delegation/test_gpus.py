"""The same by NCCL, where there are two GPUs."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from cases import CASES, MOVES, check_case
from test_operations import coalesced

import torchestra as dist
from devices import gpus
from torchestra.errors import CollectiveTimeoutError, DistBackendError, RankFailedError
from torchestra.store import Store
from worlds import processes, run

pytestmark = gpus(2)


def begin(store: Store, rank: int, size: int, device: int) -> None:
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=30)


def every_case(store: Store, rank: int, size: int) -> None:
    begin(store, rank, size, rank)
    assert dist.get_backend_config() == "cpu:native,cuda:nccl"
    for case in CASES:
        check_case(case, (0, 1, 33, 5003), (torch.float32, torch.bfloat16), ("ordinary",), "cuda")
    for case in MOVES:
        check_case(case, (77,), (torch.int16, torch.bool, torch.complex64), ("ordinary",), "cuda")
    coalesced()  # on tensors of the CPU, beside
    dist.destroy_process_group()


def test_every_operation_gives_what_its_formula_says() -> None:
    run("processes", 2, every_case, init=False)


def on_streams(store: Store, rank: int, size: int) -> None:
    """An operation sees what precedes it on the caller's stream, and what follows sees its result."""
    begin(store, rank, size, rank)
    dist.all_reduce(torch.ones(1, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        for beside in (False, True):
            torch.cuda._sleep(50_000_000)  # an operation that does not wait for it reduces zeros
            tensor = torch.zeros(1 << 20, device="cuda").add_(rank + 1)
            found = tensor.view(1 << 10, 1 << 10).t() if beside else tensor
            work = dist.all_reduce(found, async_op=beside)
            if work is not None:
                work.wait()
            assert (found * 2).eq(size * (size + 1.0)).all().item()
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.zeros(5, device="cuda")
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank), device="cuda"), right),
        dist.P2POp(dist.irecv, received, left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.tolist() == [left] * 5
    future = dist.all_reduce(received, async_op=True).get_future()
    assert future.wait()[0].tolist() == [float(sum(range(size)))] * 5
    dist.destroy_process_group()


def test_operations_keep_the_order_of_streams() -> None:
    run("processes", 2, on_streams, init=False)


def share(store: Store, rank: int, size: int) -> None:
    with pytest.raises(DistBackendError, match=r"ranks \[0, 1\] share device"):
        begin(store, rank, size, 0)


def test_ranks_that_share_a_gpu_hear_it() -> None:
    run("processes", 2, share, init=False)


def miss(store: Store, rank: int, size: int) -> None:
    """The rank that waits gives up; the device is let go."""
    begin(store, rank, size, rank)
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    if rank == 1:
        with pytest.raises(DistBackendError):
            dist.barrier()
        return
    dist.group.WORLD.set_timeout(1)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with pytest.raises(CollectiveTimeoutError, match="timed out"):
        dist.all_reduce(tensor)


def test_an_operation_that_a_rank_does_not_come_to_times_out() -> None:
    run("processes", 2, miss, init=False)


def lose_one(store: Store, rank: int, size: int) -> None:
    begin(store, rank, size, rank)
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError, match="rank 1 died"):
        dist.all_reduce(tensor, async_op=True).synchronize()
    group = dist.group.WORLD.shrink()
    dist.all_reduce(tensor.fill_(5), group=group)
    assert tensor.tolist() == [5.0] * 3


def test_a_dead_rank_is_an_error_and_the_others_go_on_without_it() -> None:
    with processes(2, lose_one, init=False) as world:
        assert world.wait(0).error is None
