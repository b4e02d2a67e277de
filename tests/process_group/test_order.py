"""In which order a group's operations run: barriers, sequence numbers, and blocks that are run as one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from direct import run_direct
from torch.utils._python_dispatch import TorchDispatchMode

import torchestra as dist
from torchestra.arguments.options import BarrierOptions
from torchestra.errors import CollectiveMismatchError, DistError, GroupAbortedError, InvalidArgumentError
from worlds import KINDS, run


def drop_works(group: dist.ProcessGroup) -> None:
    tensors = [torch.full((100, 100), float(number)) for number in range(16)]
    for tensor in tensors:
        group.allreduce(tensor)
    group.barrier().get_future().wait()
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((100, 100), float(number * group.size())))
    for work in (
        group.barrier(BarrierOptions(device_ids=[0])),
        group.barrier(20.0),
        group.barrier(timeout=20.0),
        group.barrier(BarrierOptions(asyncOp=False)),
    ):
        assert work.wait()
        assert work.result() == []


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_barrier_earlier_operations_are_done_though_nobody_waited_for_them(kind: str) -> None:
    run_direct(kind, 3, drop_works)


def count() -> None:
    group = dist.group.WORLD
    started = group.get_sequence_number_for_group()
    begun = torch.zeros(1)
    for number in range(5):
        assert group._get_sequence_number_for_group() == started + number
        dist.all_reduce(begun)
    for number in range(5, 10):
        group.allreduce(torch.zeros(1 << number))  # counted when called, not when run
        assert group.get_sequence_number_for_group() == started + number + 1
    group.barrier().wait()
    assert group.get_sequence_number_for_group() == started + 11
    group.allreduce_coalesced([torch.zeros(1), torch.zeros(2)]).wait()
    assert group.get_sequence_number_for_group() == started + 12
    group.allgather_into_tensor_coalesced([torch.zeros(3)] * 1, [torch.zeros(1)]).wait()
    assert group.get_sequence_number_for_group() == started + 13
    dist.isend(torch.zeros(1), (dist.get_rank() + 1) % 3)
    dist.recv(torch.zeros(1))
    assert group.get_sequence_number_for_group() == started + 13
    group._set_sequence_number_for_group()
    other = dist.new_group([0, 1, 2])
    numbers = torch.zeros(3, dtype=torch.int64)
    own = torch.tensor([group.get_sequence_number_for_group()])
    dist.all_gather_into_tensor(numbers, own, group=other)  # does not count in the group
    assert numbers.tolist() == [own.item()] * 3
    # Ranks 0 and 2 lag behind until they call what rank 1 has called.
    if dist.get_rank() == 1:
        work = dist.all_reduce(begun, async_op=True)
    own = torch.tensor([group.get_sequence_number_for_group()])
    dist.all_gather_into_tensor(numbers, own, group=other)
    assert numbers.tolist() == [started + 13, started + 14, started + 13]
    if dist.get_rank() != 1:
        work = dist.all_reduce(begun, async_op=True)
    work.wait()
    assert group.get_sequence_number_for_group() == started + 14


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_numbers_count_what_was_called(kind: str) -> None:
    run(kind, 3, count)


def coalesce(async_ops: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((3,), rank + float(index)) for index in range(4)]
    gathered = torch.zeros(size)
    with dist.coalescing_manager(async_ops=async_ops) as manager:
        for tensor in tensors:
            assert dist.all_reduce(tensor) is None
        work = dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), async_op=True)
        assert tensors[0][0] == rank  # nothing has been run
        assert not work.is_completed()
        with pytest.raises(DistError, match="is run at the end of the `with` block"):
            work.wait()
    manager.wait()
    work.wait()
    assert work.result()[0] is gathered
    assert gathered.tolist() == list(range(size))
    for index, tensor in enumerate(tensors):
        assert tensor.tolist() == [size * (size - 1) / 2 + size * index] * 3
    assert len(manager.works) == async_ops
    if async_ops:
        assert [id(tensor) for tensor in manager.works[0].result()] == [id(t) for t in (*tensors, gathered)]
    dist.all_reduce(tensors[0])  # what follows is run as always
    assert tensors[0][0] == size * size * (size - 1) / 2


@pytest.mark.parametrize("async_ops", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_collectives_is_run_as_one(kind: str, async_ops: bool) -> None:
    run(kind, 3, coalesce, async_ops)


def leave_block(ready: threading.Barrier) -> None:
    ready.wait(20)  # neither is still making the group
    tensor = torch.ones(1)
    works = []

    def divide_by_zero() -> None:
        with dist.coalescing_manager():
            dist.all_reduce(tensor)
            works.append(dist.all_reduce(tensor, async_op=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        divide_by_zero()
    with pytest.raises(DistError, match=r"all_reduce\(SUM\) was not run: its block ended with ZeroDivision"):
        works[0].wait()
    with pytest.raises(GroupAbortedError, match=r"left coalesced all_reduce\(SUM\) with ZeroDivisionError"):
        dist.all_reduce(tensor)
    assert tensor.item() == 1


def use_bad_arguments(ready: threading.Barrier) -> None:
    """Behind a right call, whether or not the other ranks called the same."""
    ready.wait(20)
    tensor = torch.ones(1)

    def use_another_layout() -> None:
        with dist.coalescing_manager():
            dist.all_reduce(tensor)
            dist.broadcast(torch.eye(2).to_sparse(), 0)

    with pytest.raises(InvalidArgumentError, match="unsupported layout"):
        use_another_layout()
    with pytest.raises(GroupAbortedError, match=r"left coalesced all_reduce\(SUM\) with InvalidArgument"):
        dist.all_reduce(tensor)
    assert tensor.item() == 1


@pytest.mark.parametrize("body", [leave_block, use_bad_arguments], ids=lambda body: body.__name__)
def test_a_block_that_raises_runs_nothing_and_aborts_the_group(body: Callable[..., None]) -> None:
    run("threads", 2, body, threading.Barrier(2))


def leave_empty_block() -> None:
    def call_nothing() -> None:
        with dist.coalescing_manager():
            raise ZeroDivisionError

    def call_wrongly() -> None:
        with dist.coalescing_manager():
            dist.broadcast(torch.eye(2).to_sparse(), 0)

    def gather_wrongly() -> None:  # one call, of which one operation has been collected
        dist.all_gather_coalesced([[torch.ones(1), torch.ones(2)]] * 2, [torch.ones(1), torch.ones(3)])

    for call, error in (
        (call_nothing, ZeroDivisionError),
        (call_wrongly, InvalidArgumentError),
        (gather_wrongly, InvalidArgumentError),
    ):
        with pytest.raises(error):
            call()
    with dist.coalescing_manager() as manager:
        pass
    manager.wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()


def test_a_block_that_raises_before_it_has_collected_anything_leaves_the_group_as_it_was() -> None:
    run("threads", 2, leave_empty_block)


def nest_blocks() -> None:
    size = dist.get_world_size()
    outer, inner, other = torch.ones(1), [torch.ones(1), torch.ones(2)], torch.ones(1)

    def beside() -> None:
        dist.group.WORLD.allreduce(other).wait()

    with dist.coalescing_manager():
        dist.all_reduce(outer)
        dist.all_reduce_coalesced(inner)
        dist.group.WORLD.allreduce([outer, outer])
        # What another thread calls does not belong to the block, and runs before it.
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert other.item() == size
        assert outer.item() == 1
    assert [tensor[0].item() for tensor in inner] == [size, size]
    assert outer.item() == 2 * size * size


def test_blocks_hold_lists_of_tensors_and_only_what_their_thread_calls() -> None:
    run("threads", 2, nest_blocks)


def fail_halfway() -> None:
    tensors = [torch.ones(1) for _ in range(3)]
    works = []

    def call_different_things() -> None:
        with dist.coalescing_manager():
            works.append(dist.all_reduce(tensors[0], async_op=True))
            works.append(dist.all_reduce(torch.ones(1 + dist.get_rank()), async_op=True))
            works.append(dist.all_reduce(tensors[2], async_op=True))

    with pytest.raises(CollectiveMismatchError):
        call_different_things()
    works[0].wait()
    assert isinstance(works[1].exception(), CollectiveMismatchError)
    works[2].wait()
    assert [tensor.item() for tensor in tensors] == [2, 1, 2]


def mismatch_one_by_one() -> None:
    """Rank 0 coalesces what rank 1 calls one by one."""
    rank = dist.get_rank()
    tensors = [torch.full((2,), 10.0**number) for number in range(4)]
    wrong = torch.ones(1 + rank)

    def coalesce() -> None:
        with dist.coalescing_manager():
            for tensor in (tensors[0], wrong, *tensors[1:3]):
                dist.all_reduce(tensor)

    if rank == 0:
        with pytest.raises(CollectiveMismatchError):
            coalesce()
    else:
        dist.all_reduce(tensors[0])
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(wrong)
        for tensor in tensors[1:3]:
            dist.all_reduce(tensor)
    dist.all_reduce(tensors[3])
    assert [tensor[0].item() for tensor in tensors] == [2, 20, 200, 2000]


@pytest.mark.parametrize("body", [fail_halfway, mismatch_one_by_one], ids=lambda body: body.__name__)
def test_the_operations_behind_a_mismatch_in_a_block_are_run(body: Callable[[], None]) -> None:
    run("threads", 2, body)


def from_outside() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.warns(UserWarning, match="no member"), dist.coalescing_manager(group) as manager:
            pass
        manager.wait()


def test_a_block_on_a_rank_outside_of_the_group_warns() -> None:
    run("processes", 2, from_outside)


class Dispatched(TorchDispatchMode):
    """Notes what torch does on the thread that it is entered on."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def wait_inside_of_a_mode() -> None:
    for _ in range(10):
        tensor = torch.ones(4, 4).t()[:2]
        work = dist.all_reduce(tensor, async_op=True)
        with Dispatched() as mode:
            work.wait()
        assert mode.names == []
        assert torch.equal(tensor, torch.full((2, 4), 2.0))


def test_a_tracer_does_not_see_how_the_operation_is_run_that_is_waited_for() -> None:
    """Else it would be in the traced program of those ranks whose waiting thread happened to run it."""
    run("threads", 2, wait_inside_of_a_mode)
