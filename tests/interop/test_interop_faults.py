"""Test that faults on torchestra's engine come through torch.distributed: at once, on every rank, named."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg
from torch_worlds import outcomes, run

import torchestra
import worlds
from torchestra.interop.torch_distributed import inner_group, monitored_barrier
from torchestra.store import Store

WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sync": dist.all_reduce,
    "work": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "gather": lambda tensor: dist.all_gather_object([None] * dist.get_world_size(), "it"),
    "recv": lambda tensor: dist.recv(tensor, 1),
    "barrier": lambda tensor: dist.barrier(),
}


def lose_a_rank(wait: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
        WAITS[wait](torch.ones(4))
    assert isinstance(caught.value, torchestra.RankFailedError)
    assert caught.value.ranks == (1,)
    assert pickle.loads(pickle.dumps(caught.value)).ranks == (1,)


@pytest.mark.parametrize("wait", WAITS)
def test_a_dead_rank_is_named_by_torchs_error_and_ours(wait: str) -> None:
    ended = outcomes(2, lose_a_rank, wait)
    ended[0].result()


def sum_by_torchestra(group, bucket):
    work = torchestra.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def lose_a_rank_in_futures() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(RuntimeError, match="rank 1"):
        work.get_future().wait()
    assert isinstance(work.exception(), torchestra.RankFailedError)
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        work.result()
    # The reducer waits in C++, for a future.
    with pytest.raises(RuntimeError, match="rank 1"):
        model(torch.ones(2, 4)).sum().backward()
    hooked = DistributedDataParallel(torch.nn.Linear(4, 4), init_sync=False)
    hooked.register_comm_hook(inner_group(), sum_by_torchestra)
    with pytest.raises(RuntimeError):
        hooked(torch.ones(2, 4)).sum().backward()


def test_a_dead_rank_is_named_by_futures_and_to_torchs_reducer() -> None:
    ended = outcomes(2, lose_a_rank_in_futures)
    ended[0].result()


def wait_at(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Pass a barrier by torch's function if it takes a time-out, else by the group's method (torch 2.10)."""
    if "timeout" in inspect.signature(dist.barrier).parameters:
        dist.barrier(group, timeout=timeout)
        return
    options = BarrierOptions()
    options.timeout = timeout
    options.asyncOp = False
    group.barrier(options).wait()


def wait_in_vain() -> None:
    late, barrier, monitored = dist.new_group(), dist.new_group(), dist.new_group()
    inner_group(late).set_timeout(timedelta(seconds=0.2))  # not before: it bounds making the group, too
    dist.barrier()
    if dist.get_rank() == 1:
        worlds.await_note("over")
        return
    with pytest.raises(dist.DistBackendError, match=r"timed out after \d+\.\d s on rank 0") as caught:
        dist.all_reduce(torch.ones(1), group=late)
    assert isinstance(caught.value, torchestra.CollectiveTimeoutError)
    assert caught.value.missing == (1,)
    with pytest.raises(RuntimeError, match="timed out"):
        wait_at(barrier, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"(Rank 0 timed out in|Rank 1 failed to pass) monitoredBarrier"):
        monitored_barrier(monitored, timedelta(seconds=0.1))
    worlds.leave_note("over")


def test_a_rank_that_does_not_come_is_named() -> None:
    run(2, wait_in_vain)


def use_wrongly() -> None:
    rank = dist.get_rank()
    call = dist.all_reduce if rank == 0 else dist.barrier
    with pytest.raises(dist.DistBackendError, match=r"rank 0 .*all_reduce[\s\S]*rank 1 .*barrier"):
        call(*[torch.ones(3)] * (1 - rank))
    with pytest.raises(ValueError, match="elements"):
        dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match="expanded"):
        dist.all_reduce(torch.ones(1).expand(4))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]


def test_a_mismatch_is_an_error_on_every_rank_and_the_group_stays_usable() -> None:
    run(2, use_wrongly)


def abort_one_end() -> None:
    if dist.get_rank() == 1:
        worlds.await_note("waiting")
        dist.distributed_c10d._abort_process_group()
        assert not dist.is_initialized()
        return
    work = dist.all_reduce(torch.ones(2), async_op=True)
    worlds.leave_note("waiting")
    with pytest.raises(dist.DistBackendError, match="rank 1 has aborted the group"):
        work.wait()
    dist.destroy_process_group()


def test_abort_ends_what_peers_wait_for() -> None:
    run(2, abort_one_end)


def come_and_go(_: Store, rank: int, size: int) -> None:
    path = os.path.join(os.environ["WORLD_DIRECTORY"], "torch")
    store = dist.FileStore(path, size)
    files = 0
    for turn in range(4):
        dist.init_process_group(
            "torchestra", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        group = dist.new_group()
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        assert tensor[0] == size
        dist.destroy_process_group()
        with pytest.raises(dist.DistBackendError, match="has destroyed group"):
            group.allreduce([tensor]).wait()
        del group
        deadline = time.monotonic() + 30
        while (
            worlds.mappings() or threading.active_count() > 1 or (turn and len(worlds.descriptors()) > files)
        ):
            assert time.monotonic() < deadline, (
                worlds.mappings(),
                threading.enumerate(),
                worlds.descriptors(),
            )
            gc.collect()
        files = len(worlds.descriptors())  # after the first turn, with what loading has opened


def test_groups_come_and_go_over_one_store_and_leave_nothing() -> None:
    worlds.run("processes", 2, come_and_go, init=False)


def come_alone(_: Store, rank: int, size: int) -> None:
    if rank == 1:
        return
    store = dist.FileStore(os.path.join(os.environ["WORLD_DIRECTORY"], "torch"), size)
    with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
        dist.init_process_group(
            "torchestra", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=0.3)
        )
    assert isinstance(caught.value, torchestra.CollectiveTimeoutError)
    assert not dist.is_initialized()


def test_who_does_not_come_to_init_is_named() -> None:
    worlds.run("processes", 2, come_alone, init=False)


def be_interrupted() -> str:
    if dist.get_rank() == 1:
        worlds.await_note("over")
        return "other"
    work = dist.all_reduce(torch.ones(1), async_op=True)
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def wait() -> None:
        interrupt.start()
        work.wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    worlds.leave_note("over")
    return "interrupted"


def test_a_wait_lets_ctrl_c_through() -> None:
    ended = outcomes(2, be_interrupted)
    assert [outcome.result() for outcome in ended] == ["interrupted", "other"]


def test_ranks_may_be_threads_where_torch_makes_them_so() -> None:
    """torch.distributed's own tests of this kind replace its registry by one per thread."""
    size, store = 3, dist.HashStore()
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("torchestra", store=store, rank=rank, world_size=size)
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor)
            pair = dist.new_group([0, 2])
            if rank != 1:
                dist.all_reduce(tensor, group=pair)
            kind = inner_group().backend
            dist.destroy_process_group()
            results[rank] = (tensor.item(), kind)
        except BaseException as error:
            results[rank] = error

    world = multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        assert isinstance(world, multi_threaded_pg.ThreadLocalWorld)
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(worlds.WORLD_SECONDS)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    assert results == [(6.0, "threads"), (3.0, "threads"), (6.0, "threads")]


def plain() -> torch.Tensor:
    return torch.ones(4)


def on_root(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return tensors if dist.get_rank() == 0 else None


# By operation: a call for each of its arguments, with the given tensor there and plain ones besides.
OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce later": lambda odd: dist.all_reduce(odd, async_op=True).wait(),
    "all_reduce_coalesced": lambda odd: dist.all_reduce_coalesced([plain(), odd]),
    "reduce": lambda odd: dist.reduce(odd, 0),
    "broadcast": lambda odd: dist.broadcast(odd, 0),
    "all_gather of": lambda odd: dist.all_gather([plain(), plain()], odd),
    "all_gather into": lambda odd: dist.all_gather([plain(), odd], plain()),
    "all_gather_into_tensor of": lambda odd: dist.all_gather_into_tensor(torch.ones(8), odd),
    "all_gather_into_tensor into": lambda odd: dist.all_gather_into_tensor(odd, torch.ones(2)),
    "gather": lambda odd: dist.gather(odd, on_root([plain(), plain()]), 0),
    "scatter": lambda odd: dist.scatter(odd, on_root([plain(), plain()]), 0),
    "reduce_scatter of": lambda odd: dist.reduce_scatter(plain(), [plain(), odd]),
    "reduce_scatter into": lambda odd: dist.reduce_scatter(odd, [plain(), plain()]),
    "reduce_scatter_tensor of": lambda odd: dist.reduce_scatter_tensor(torch.ones(2), odd),
    "reduce_scatter_tensor into": lambda odd: dist.reduce_scatter_tensor(odd, torch.ones(8)),
    "all_to_all of": lambda odd: dist.all_to_all([plain(), plain()], [plain(), odd]),
    "all_to_all into": lambda odd: dist.all_to_all([plain(), odd], [plain(), plain()]),
    "all_to_all_single of": lambda odd: dist.all_to_all_single(plain(), odd),
    "all_to_all_single into": lambda odd: dist.all_to_all_single(odd, plain()),
    "send": lambda odd: dist.send(odd, 1 - dist.get_rank()),
    "recv": lambda odd: dist.recv(odd, 1 - dist.get_rank()),
    "recv from any": dist.recv,
    "isend": lambda odd: dist.isend(odd, 1 - dist.get_rank()),
    "irecv": lambda odd: dist.irecv(odd, 1 - dist.get_rank()),
    "batch": lambda odd: dist.batch_isend_irecv([dist.P2POp(dist.isend, odd, 1 - dist.get_rank())]),
}
_MESSAGES = ("send", "recv", "recv from any", "isend", "irecv", "batch")


_ALONE = {"all_reduce", "all_reduce later", "reduce", "broadcast", *_MESSAGES}
_ALONE_BUT_ON_ROOT = _ALONE | {"gather", "scatter"}


def without_memory() -> dict[str, torch.Tensor]:
    with FakeTensorMode():
        fake = plain()
    freed = plain()
    freed.untyped_storage().resize_(0)
    return {
        "fake": fake,
        "freed": freed,
        "zero": torch._efficientzerotensor(4),
        "meta": torch.ones(4, device="meta"),
        "functional": torch._to_functional_tensor(plain()),
    }


def hand_over_tensors_without_memory() -> None:
    for operation, call in OPERATIONS.items():
        if operation not in _MESSAGES:
            call(plain())  # and opens the fast path
        for kind, odd in without_memory().items():
            if kind in ("fake", "meta") and operation in (
                _ALONE if dist.get_rank() == 0 else _ALONE_BUT_ON_ROOT
            ):
                call(odd)  # as torch's fake kernels: nothing is sent
                continue
            try:
                call(odd)
            except (RuntimeError, ValueError) as error:
                assert str(error)  # noqa: PT017
            else:
                raise AssertionError(f"{operation} has taken a {kind} tensor")
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4


def test_tensors_without_memory_are_refused_by_every_operation() -> None:
    """A fake tensor ended every rank by SIGSEGV."""
    run(2, hand_over_tensors_without_memory)
