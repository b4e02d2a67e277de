"""torch.distributed's own functions on torchestra's engine: each gives what its formula says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, GatherOptions, _coalescing_manager
from torch_worlds import run

from torchestra.interop.torch_distributed import TorchestraGroup, inner_group, monitored_barrier

MOVED = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
REDUCED = [dtype for dtype in MOVED if dtype is not torch.bool]


def of(rank: int, length: int = 5) -> torch.Tensor:
    """Return what a rank brings: small numbers, which every dtype can add up."""
    return (torch.arange(length) * 3 + rank * 5) % 7


def total(size: int, length: int = 5) -> torch.Tensor:
    return torch.stack([of(rank, length) for rank in range(size)]).sum(0)


def done(work: Any, async_op: bool) -> None:
    """Check that a call returned what torch's functions return, then wait for it."""
    if async_op:
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
    else:
        assert work is None


def reduce_everything(async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in REDUCED:
        tensor = of(rank).to(dtype)
        done(dist.all_reduce(tensor, async_op=async_op), async_op)
        assert torch.equal(tensor, total(size).to(dtype)), dtype

        tensor = of(rank).to(dtype)
        done(dist.reduce(tensor, size - 1, async_op=async_op), async_op)
        assert torch.equal(tensor, (total(size) if rank == size - 1 else of(rank)).to(dtype)), dtype

        output = torch.empty(3, dtype=dtype)
        done(dist.reduce_scatter_tensor(output, of(rank, 3 * size).to(dtype), async_op=async_op), async_op)
        assert torch.equal(output, total(size, 3 * size).to(dtype).chunk(size)[rank]), dtype

        pieces = list(of(rank, 3 * size).to(dtype).chunk(size))
        done(dist.reduce_scatter(output.zero_(), pieces, async_op=async_op), async_op)
        assert torch.equal(output, total(size, 3 * size).to(dtype).chunk(size)[rank]), dtype


def gather_single(tensor: torch.Tensor, output: torch.Tensor | None, async_op: bool) -> Any:
    """Gather into one tensor of rank 1, by torch's function if it has one (2.15), else by the method."""
    if hasattr(dist, "gather_single"):
        return dist.gather_single(tensor, output, dst=1, async_op=async_op)
    options = GatherOptions()
    options.rootRank, options.asyncOp = 1, async_op
    group: Any = dist.group.WORLD
    work = group.gather_single(tensor.new_empty(0) if output is None else output, tensor, options)
    return work if async_op else None


def move_everything(async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        mine = of(rank).to(dtype)
        all_ranks = [of(peer).to(dtype) for peer in range(size)]

        tensor = mine.clone()
        done(dist.broadcast(tensor, size - 1, async_op=async_op), async_op)
        assert torch.equal(tensor, all_ranks[-1]), dtype

        outputs = [torch.zeros(5, dtype=dtype) for _ in range(size)]
        done(dist.all_gather(outputs, mine, async_op=async_op), async_op)
        assert torch.equal(torch.stack(outputs), torch.stack(all_ranks)), dtype

        output = torch.zeros(5 * size, dtype=dtype)
        done(dist.all_gather_into_tensor(output, mine, async_op=async_op), async_op)
        assert torch.equal(output, torch.cat(all_ranks)), dtype

        gathered = [torch.zeros(5, dtype=dtype) for _ in range(size)] if rank == 1 else None
        done(dist.gather(mine, gathered, dst=1, async_op=async_op), async_op)
        if gathered is not None:
            assert torch.equal(torch.stack(gathered), torch.stack(all_ranks)), dtype

        gathered_whole = torch.zeros(size, 5, dtype=dtype)
        done(gather_single(mine, gathered_whole if rank == 1 else None, async_op), async_op)
        assert torch.equal(gathered_whole, torch.stack(all_ranks) * (rank == 1)), dtype

        received = torch.zeros(5, dtype=dtype)
        done(dist.scatter(received, all_ranks if rank == 0 else None, src=0, async_op=async_op), async_op)
        assert torch.equal(received, mine), dtype

        output = torch.zeros(size, dtype=dtype)
        done(dist.all_to_all_single(output, of(rank, size).to(dtype), async_op=async_op), async_op)
        column = torch.stack([of(peer, size) for peer in range(size)])[:, rank].to(dtype)
        assert torch.equal(output, column), dtype

        outputs = [torch.zeros(peer + 1, dtype=dtype) for peer in range(size)]
        inputs = [of(rank, rank + 1).to(dtype) for _ in range(size)]
        done(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
        assert all(torch.equal(outputs[peer], of(peer, peer + 1).to(dtype)) for peer in range(size)), dtype

    lengths = [peer + 1 for peer in range(size)]
    output = torch.zeros(sum(lengths))
    splits = [rank + 1] * size
    source = of(rank, sum(splits)).float()
    done(dist.all_to_all_single(output, source, lengths, splits, async_op=async_op), async_op)
    sent = [of(peer, (peer + 1) * size).float().chunk(size)[rank] for peer in range(size)]
    assert torch.equal(output, torch.cat(sent))
    done(dist.barrier(async_op=async_op), async_op)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_in_every_dtype(size: int) -> None:
    run(size, in_both_ways)


def in_both_ways() -> None:
    for async_op in (False, True):
        reduce_everything(async_op)
        move_everything(async_op)


def reduce_in_every_way() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    stack = torch.stack([of(peer) for peer in range(size)])
    expected: dict[Any, torch.Tensor] = {
        dist.ReduceOp.SUM: stack.sum(0),
        dist.ReduceOp.PRODUCT: stack.prod(0),
        dist.ReduceOp.MIN: stack.amin(0),
        dist.ReduceOp.MAX: stack.amax(0),
        dist.ReduceOp.BAND: stack[0] & stack[1] & stack[2],
        dist.ReduceOp.BOR: stack[0] | stack[1] | stack[2],
        dist.ReduceOp.BXOR: stack[0] ^ stack[1] ^ stack[2],
    }
    for op, result in expected.items():
        tensor = of(rank)
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, result), op
    averaged = of(rank).double()
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    torch.testing.assert_close(averaged, stack.double().mean(0))
    scaled = of(rank).double()
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(3.0))
    torch.testing.assert_close(scaled, stack.double().sum(0) * 3)
    with pytest.raises(ValueError, match=r"BAND is not defined for tensors of dtype torch\.float32"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)

    indices = torch.tensor([[rank, size]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (size + 1,), check_invariants=True)
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size + [float(size)]

    strided = torch.zeros(4, 6).t()[::2]
    strided += rank
    dist.all_reduce(strided)
    assert (strided == sum(range(size))).all()


def test_every_reduce_operation_sparse_and_strided_tensors() -> None:
    run(3, reduce_in_every_way)


def send_and_receive() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    received = torch.zeros(4)
    work = dist.isend(torch.full((4,), float(rank)), ahead)
    assert dist.recv(received, behind) == behind
    work.wait()
    assert (received == behind).all()

    if rank == 0:  # the last first, though sent last
        for tag in (3, 2, 1):
            number = torch.zeros(1, dtype=torch.int64)
            dist.recv(number, 1, tag=tag)
            assert number == tag
        for _ in range(size - 1):
            number = torch.zeros(1, dtype=torch.int64)
            source = dist.recv(number)
            assert number == source * 10
    else:
        works = [dist.isend(torch.tensor([tag]), 0, tag=tag) for tag in (1, 2, 3)] if rank == 1 else []
        for work in works:
            work.wait()
        dist.send(torch.tensor([rank * 10]), 0)
    dist.barrier()

    incoming = [torch.zeros(3) for _ in range(size)]
    operations = [dist.P2POp(dist.irecv, incoming[peer], peer) for peer in range(size) if peer != rank]
    operations += [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), peer) for peer in range(size) if peer != rank
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all((incoming[peer] == peer).all() for peer in range(size) if peer != rank)


def test_messages_with_tags_from_any_source_and_in_batches() -> None:
    run(3, send_and_receive)


def leave_a_block_halfway() -> None:
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(torch.zeros(1), 0)
        raise ZeroDivisionError


def coalesce() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for async_ops in (False, True):
        tensors = [of(rank, length).float() for length in (1, 5, 70_000)]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(torch.equal(tensor, total(size, len(tensor)).float()) for tensor in tensors)

        outputs = [torch.zeros(length * size) for length in (2, 6)]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for output, length in zip(outputs, (2, 6), strict=True):
                dist.all_gather_into_tensor(output, of(rank, length).float())
        manager.wait()
        for output, length in zip(outputs, (2, 6), strict=True):
            assert torch.equal(output, torch.cat([of(peer, length) for peer in range(size)]).float())

        outputs = [torch.zeros(2), torch.zeros(4)]
        with _coalescing_manager(async_ops=async_ops) as manager:
            for output in outputs:
                dist.reduce_scatter_tensor(output, of(rank, len(output) * size).float())
        manager.wait()
        for output in outputs:
            assert torch.equal(output, total(size, len(output) * size).float().chunk(size)[rank])

        # With a device, whatever is called in the block, messages too.
        tensor, output, received = of(rank).float(), of(rank).float(), torch.zeros(1)
        with _coalescing_manager(device=torch.device("cpu"), async_ops=async_ops) as manager:
            dist.broadcast(tensor, 0)
            dist.irecv(received, (rank - 1) % size)
            dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
            dist.reduce(output, 1)
        manager.wait()
        assert torch.equal(tensor, of(0).float())
        assert received == (rank - 1) % size
        assert rank != 1 or torch.equal(output, total(size).float())

    tensors = [of(rank).float(), of(rank, 2).float()]
    dist.all_reduce_coalesced(tensors)
    assert torch.equal(tensors[1], total(size, 2).float())


def test_coalesced_operations() -> None:
    run(2, coalesce)


def leave_a_block() -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"made the group/{dist.get_rank()}", "")
    store.wait([f"made the group/{rank}" for rank in range(2)])
    with pytest.raises(ZeroDivisionError):
        leave_a_block_halfway()
    dist.distributed_c10d._world.pg_coalesce_state.clear()  # where torch leaves the block's operations
    with pytest.raises(dist.DistBackendError, match=r"left coalesced broadcast with DistError"):
        coalesce_one()


def coalesce_one() -> None:
    with _coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(torch.zeros(1), 0)


def test_a_block_left_by_an_exception_aborts_the_group() -> None:
    """When the next begins; torch does not tell sooner."""
    run(2, leave_a_block)


def use_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=20), group_desc="a pair")
    tensor = torch.tensor([rank])
    if rank in (1, 2):
        assert isinstance(pair, TorchestraGroup)
        assert (pair.rank(), pair.size(), pair.name(), pair.group_desc) == (
            rank - 1,
            2,
            "torchestra",
            "a pair",
        )
        assert pair.options.timeout == timedelta(seconds=20)
        assert dist.get_process_group_ranks(pair) == list(inner_group(pair).ranks) == [1, 2]
        assert dist.get_backend(pair) == "torchestra"
        assert pair._get_backend(torch.device("cpu")) is pair
        assert pair._device_types[0] == torch.device("cpu")
        assert dist.get_group_rank(pair, 2) == 1
        dist.broadcast(tensor, 2, group=pair)
        assert tensor == 2
    else:
        assert pair is dist.GroupMember.NON_GROUP_MEMBER
    only_ours = (
        dist.new_group([rank, (rank + 1) % size], use_local_synchronization=True) if size == 2 else None
    )
    assert only_ours is None or dist.get_world_size(only_ours) == 2

    world = dist.group.WORLD
    half = world.split_group([0, 2], group_name="half")
    if rank == 1:
        assert half is None
    else:
        assert half.group_name == "half"
        work = half.allreduce([tensor := torch.tensor([rank + 1])])
        assert work.wait()
        assert work.result()[0] is tensor
        assert tensor == 4
        half.shutdown()

    group, other = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    assert dist.get_world_size(group) == (1 if rank == 2 else 2)
    assert len(other) == 2
    dist.destroy_process_group(group)
    assert inner_group() is world.inner
    with pytest.raises(ValueError, match='is not a group of backend "torchestra"'):
        inner_group(dist.GroupMember.NON_GROUP_MEMBER)


def test_groups() -> None:
    run(3, use_groups)


def merge_halves() -> tuple[int, int, list[float], str]:
    """Merge two groups by torch's method of a group. (Gloo's, in torch 2.13, numbers ranks as they come.)"""
    rank, size = dist.get_rank(), dist.get_world_size()
    half: Any = dist.new_subgroups(size // 2)[0]
    store = dist.PrefixStore("merging", dist.distributed_c10d._get_default_store())
    whole = half.merge_remote_group(store, size, group_name="whole", group_desc="of halves")
    tensor = torch.tensor([1.0 + rank])
    whole.allreduce([tensor]).wait()
    gathered = [torch.zeros(1) for _ in range(size)]
    whole.allgather([gathered], [torch.tensor([float(rank)])]).wait()
    assert tensor == size * (size + 1) / 2
    dist.barrier()
    return whole.rank(), whole.size(), [each.item() for each in gathered], whole.group_desc


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="this torch merges no groups"
)
def test_groups_are_merged() -> None:
    ranks = [float(rank) for rank in range(4)]
    assert run(4, merge_halves) == [(rank, 4, ranks, "of halves") for rank in range(4)]


def pass_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": peer} for peer in range(size)]
    words = ["a", "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(words, src=0)
    assert words == ["a", "b"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [(peer,) for peer in range(size)] if rank == 1 else None, src=1)
    assert mine == [(rank,)]
    gathered: list[Any] = [None] * size
    dist.gather_object(rank * 2, gathered if rank == 0 else None, dst=0)
    assert rank != 0 or gathered == [peer * 2 for peer in range(size)]
    if rank == 0:
        dist.send_object_list(["to one"], 1)
    elif rank == 1:
        got: list[Any] = [None]
        dist.recv_object_list(got, 0)
        assert got == ["to one"]
    monitored_barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


def test_objects_and_the_monitored_barrier() -> None:
    run(3, pass_objects)


def call_methods_directly() -> None:
    """Code that calls a group's methods: torch's shorter forms, keywords, results and futures."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    forms: list[Callable[[torch.Tensor], Any]] = [
        group.allreduce,
        lambda tensor: group.allreduce([tensor]),
        lambda tensor: group.allreduce([tensor], dist.ReduceOp.SUM),
        lambda tensor: group.allreduce(tensor, op=dist.ReduceOp.SUM, timeout=timedelta(seconds=20)),
        lambda tensor: group.allreduce([tensor], AllreduceOptions()),
    ]
    for form in forms:
        tensor = of(rank)
        work = form(tensor)
        assert isinstance(work, dist.Work)
        assert work.get_future().wait()[0] is tensor
        assert work.exception() is None
        assert torch.equal(tensor, total(size))
    tensor = torch.tensor([rank])
    group.broadcast(tensor, root=1).wait()
    assert tensor == 1
    options = AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([tensor], options)
    assert work.is_completed()
    assert work.result()[0] is tensor
    assert work.get_future().value()[0] is tensor
    twice = group.allreduce([of(rank)]).get_future().then(lambda future: future.value()[0] * 2).wait()
    assert torch.equal(twice, total(size) * 2)
    assert group._get_sequence_number_for_group() == inner_group().get_sequence_number_for_group() > 0


def test_methods_called_directly() -> None:
    run(2, call_methods_directly)


def profile_some() -> list[tuple[str, list[list[int]]]]:
    rank = dist.get_rank()
    with torch.profiler.profile(record_shapes=True) as profiled:
        dist.all_reduce(torch.ones(3, 5))
        dist.broadcast(torch.ones(7), 0, async_op=True).wait()
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
    names = ("torchestra::", "gloo:")
    return [(event.name, event.input_shapes) for event in profiled.events() if event.name.startswith(names)]


def test_torchs_profiler_has_operations_by_name_and_size() -> None:
    for rank, found in enumerate(run(2, profile_some)):
        assert ("gloo:all_reduce", [[3, 5]]) in found
        assert ("gloo:broadcast", [[7]]) in found
        assert ("gloo:send" if rank == 0 else "gloo:recv", [[2]]) in found
        assert [name for name, _ in found if name.startswith("torchestra::")] == [
            "torchestra::all_reduce",
            "torchestra::broadcast",
            "torchestra::send" if rank == 0 else "torchestra::recv",
        ]
