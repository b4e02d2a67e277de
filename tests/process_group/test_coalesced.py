"""all_reduce_coalesced and all_gather_coalesced; and tensors of several dtypes where one is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from torchestra.types import ReduceOp
from worlds import KINDS, run


def reduce_lists() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()

    def own(index: int) -> list[torch.Tensor]:
        return [torch.tensor([index + rank]), torch.full((2, 2), index + rank)]

    lists = [own(index) for index in range(3)]
    futures = [dist.all_reduce_coalesced(tensors, async_op=True) for tensors in lists]
    torch.futures.wait_all(futures)
    for index, (tensors, future) in enumerate(zip(lists, futures, strict=True)):
        total = index * size + size * (size - 1) // 2
        assert torch.equal(tensors[0], torch.tensor([total]))
        assert torch.equal(tensors[1], torch.full((2, 2), total))
        assert [id(tensor) for tensor in future.wait()] == [id(tensor) for tensor in tensors]
    tensors = own(0)
    assert dist.all_reduce_coalesced(tensors, ReduceOp.MAX) is None
    assert tensors[0].item() == size - 1
    alone = torch.ones(2, dtype=torch.complex64) * 1j
    dist.all_reduce_coalesced(alone)
    assert alone.tolist() == [size * 1j] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_all_reduce_coalesced(kind: str) -> None:
    run(kind, 3, reduce_lists)


def reduce_as_one_by_one(lengths: list[int], op: dist.ReduceOp, dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    lists = [
        torch.arange(length).add(3 * rank + number).remainder(7).to(dtype)
        for number, length in enumerate(lengths)
    ]
    expected = [tensor.clone() for tensor in lists]
    for tensor in expected:
        dist.all_reduce(tensor, op)
    dist.all_reduce_coalesced(lists, op)
    assert all(torch.equal(found, right) for found, right in zip(lists, expected, strict=True))


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(1, 3),
    lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 1000, 40_000, 200_000]), min_size=1, max_size=9),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
)
def test_tensors_reduced_as_one_get_what_they_get_one_by_one(
    size: int, lengths: list[int], op: dist.ReduceOp, dtype: torch.dtype
) -> None:
    """Bit for bit, however the chunks of the whole are cut by the tensors' ends."""
    run("threads", size, reduce_as_one_by_one, lengths, op, dtype)


def reduce_odd_layouts() -> None:
    rank = dist.get_rank()
    whole = torch.full((4, 6), rank + 1.0)
    tensors = [whole[:, ::2], whole.t()[1::2]]
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    work.wait()
    assert torch.equal(whole, torch.full((4, 6), 3.0))


def test_tensors_reduced_as_one_may_have_any_strides() -> None:
    run("threads", 2, reduce_odd_layouts)


def gather_lists() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    inputs = [[torch.tensor([index + rank]), torch.tensor([[index + rank]])] for index in range(2)]
    outputs = [[[torch.zeros_like(t) for t in tensors] for _ in range(size)] for tensors in inputs]
    futures = [
        dist.all_gather_coalesced(lists, tensors, async_op=True)
        for lists, tensors in zip(outputs, inputs, strict=True)
    ]
    torch.futures.wait_all(futures)
    for index, lists in enumerate(outputs):
        for peer, row in enumerate(lists):
            assert [tensor.item() for tensor in row] == [index + peer] * 2
    assert dist.all_gather_coalesced(outputs[0], inputs[1]) is None
    assert [row[0].item() for row in outputs[0]] == [1 + peer for peer in range(size)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_coalesced(kind: str) -> None:
    run(kind, 3, gather_lists)


def refuse_lists() -> None:
    size = dist.get_world_size()
    inputs = [torch.zeros(1)]

    def lists() -> list[list[torch.Tensor]]:
        return [[torch.zeros(1)] for _ in range(size)]

    with pytest.raises(RuntimeError, match="invalid size of output tensor at index 0"):
        dist.all_gather_coalesced([[torch.zeros(0)], *lists()[1:]], inputs)
    with pytest.raises(RuntimeError, match="invalid tensor type at index 0"):
        dist.all_gather_coalesced([[torch.zeros(1, dtype=torch.float64)], *lists()[1:]], inputs)
    with pytest.raises(RuntimeError, match="output lists should be equal to world size"):
        dist.all_gather_coalesced([*lists(), [torch.zeros(1)]], inputs)
    with pytest.raises(RuntimeError, match="invalid output size"):
        dist.all_gather_coalesced([[torch.zeros(1)] * 2, *lists()[1:]], inputs)
    with pytest.raises(RuntimeError, match="requires non-empty input tensor list"):
        dist.all_gather_coalesced(lists(), [])
    for bad in ([torch.zeros(0)], torch.zeros(1), [[3]]):
        with pytest.raises(TypeError, match=r"Invalid function argument.*output_tensor_lists"):
            dist.all_gather_coalesced(bad, inputs)
    with pytest.raises(TypeError, match=r"Invalid function argument.*input_tensor_list"):
        dist.all_gather_coalesced(lists(), inputs[0])
    with pytest.raises(RuntimeError, match="requires non-empty tensor list"):
        dist.all_reduce_coalesced([])
    with pytest.raises(TypeError, match=r"Invalid function argument.*tensors"):
        dist.all_reduce_coalesced([1.0])
    with pytest.raises(ValueError, match=r"does not support ReduceOp\.MAX on complex tensors"):
        dist.all_reduce_coalesced([torch.zeros(1, dtype=torch.complex128)], ReduceOp.MAX)
    dist.barrier()


def test_coalesced_operations_refuse_lists_that_do_not_fit() -> None:
    run("threads", 2, refuse_lists)


def mix_dtypes() -> None:
    size = dist.get_world_size()
    whole = torch.ones(2, 2) * 7
    half = whole.half()
    same = [torch.zeros(2, 2) for _ in range(size)]
    mixed = [*same[:1], torch.zeros(2, 2).half(), *same[2:]]
    root = {"group_dst": dist.get_rank()}
    for call in (
        lambda: dist.all_gather(mixed, whole),
        lambda: dist.all_gather(same, half),
        lambda: dist.all_gather_coalesced([mixed], same),
        lambda: dist.all_gather_coalesced([same], mixed),
        lambda: dist.all_gather_into_tensor(torch.zeros(2 * size, 2), half),
        lambda: dist.all_reduce_coalesced(mixed),
        lambda: dist.reduce_scatter(whole, mixed),
        lambda: dist.reduce_scatter(half, same),
        lambda: dist.reduce_scatter_tensor(half, torch.zeros(2 * size, 2)),
        lambda: dist.all_to_all_single(half, whole),
        lambda: dist.all_to_all(mixed, same),
        lambda: dist.all_to_all(same, mixed),
        lambda: dist.scatter(whole, mixed, group_src=dist.get_rank()),
        lambda: dist.scatter(half, same, group_src=dist.get_rank()),
        lambda: dist.gather(half, same, **root),
        lambda: dist.gather(whole, mixed, **root),
    ):
        with pytest.raises(ValueError, match="Invalid usage of tensors with different dtypes"):
            call()
    dist.barrier()


def test_dtypes_that_differ_are_refused_by_every_operation() -> None:
    run("threads", 2, mix_dtypes)


def mix_complex() -> None:
    """A complex tensor and a tensor of its parts may be mixed, as if it were one."""
    size, rank = dist.get_world_size(), dist.get_rank()
    real = torch.tensor([rank + 1.0, rank + 2.0])
    number = torch.view_as_complex(real.clone())
    expected = [[peer + 1.0, peer + 2.0] for peer in range(size)]

    def outputs(*places: int) -> list[torch.Tensor]:
        """Real ones, but for those at some places."""
        blank = [torch.zeros(2) for _ in range(size)]
        return [torch.view_as_complex(t) if place in places else t for place, t in enumerate(blank)]

    def parts(tensors: list[torch.Tensor]) -> list[list[float]]:
        return [(torch.view_as_real(t) if t.is_complex() else t).flatten().tolist() for t in tensors]

    for places in ((), (1,), tuple(range(size))):
        for tensor in (real, number):
            found = outputs(*places)
            dist.all_gather(found, tensor)
            assert parts(found) == expected
            found = outputs(*places)
            dist.gather(tensor, found if rank == 0 else None, group_dst=0)
            assert rank != 0 or parts(found) == expected
            received = outputs(*places)
            dist.all_to_all_single(torch.view_as_complex(torch.zeros(size, 2)), torch.zeros(size, 2))
            dist.scatter(received[rank], [real, number, real][:size] if rank == 0 else None, group_src=0)
            assert parts(received)[rank] == [1.0, 2.0]
    joined = torch.zeros(size, 2)
    dist.all_gather_into_tensor(joined, number.reshape(1))
    assert joined.tolist() == expected
    with pytest.raises(ValueError, match="different dtypes"):
        dist.all_gather(outputs(), number.conj())


@pytest.mark.parametrize("kind", KINDS)
def test_complex_tensors_mix_with_their_parts(kind: str) -> None:
    run(kind, 3, mix_complex)


def move_booleans() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.tensor([rank == 0, True, False])
    dist.broadcast(tensor, 0)
    assert tensor.tolist() == [True, True, False]
    mine = torch.tensor([rank == 1, True, False])
    outputs = [torch.zeros(3, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(outputs, mine)
    assert [output.tolist() for output in outputs] == [[peer == 1, True, False] for peer in range(size)]
    for op, expected in ((ReduceOp.SUM, True), (ReduceOp.BOR, True), (ReduceOp.BAND, False)):
        reduced = mine.clone()
        dist.group.WORLD.allreduce([reduced, reduced.clone()], op).wait()
        assert reduced.tolist() == [expected, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_boolean_tensors(kind: str) -> None:
    run(kind, 3, move_booleans)
