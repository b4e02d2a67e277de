"""allreduce, reduce, reduce_scatter and their coalesced forms, as methods of a group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from direct import run_direct
from reductions import Reduction, several, simple

import torchestra as dist
from torchestra.arguments.options import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.types import ReduceOp
from worlds import KINDS

MANY = 150


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not one after the other in memory."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"plain": torch.clone, "strided": strided}


def reduce_all(group: dist.ProcessGroup, layout: str) -> None:
    make = LAYOUTS[layout]
    cases: list[Reduction] = simple(group.rank(), group.size())
    for number in (2, 3):
        cases += several(group.rank(), group.size(), number)
    for op, inputs, output in cases:
        tensors = [make(tensor) for tensor in inputs]
        future = group.allreduce(tensors, AllreduceOptions(reduceOp=op)).get_future()
        future.wait()
        assert len(future.value()) == len(tensors)
        for tensor, result in zip(tensors, future.value(), strict=True):
            assert result is tensor
            assert torch.equal(tensor, output), (op, tensor, output)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_allreduce_of_one_and_of_several_tensors_per_rank(kind: str, layout: str) -> None:
    run_direct(kind, 3, reduce_all, layout)


def reduce_all_forms(group: dist.ProcessGroup) -> None:
    total, largest = torch.tensor([3.0]), torch.tensor([2.0])

    def mine() -> torch.Tensor:
        return torch.tensor([group.rank() + 1.0])

    for work, expected in (
        (group.allreduce(mine()), total),
        (group.allreduce(mine(), ReduceOp.MAX), largest),
        (group.allreduce([mine()], ReduceOp.MAX), largest),
        (group.allreduce(mine(), op=ReduceOp.MAX), largest),
        (group.allreduce(tensor=mine(), op=ReduceOp.MAX), largest),
        (group.allreduce(tensors=[mine()], opts=AllreduceOptions(reduceOp=ReduceOp.MAX)), largest),
        (group.allreduce(mine(), ReduceOp.SUM, 20.0), total),
        (group.allreduce(mine(), timeout=20.0), total),
        (group.allreduce([mine()], AllreduceOptions(asyncOp=False)), total),
        (group.allreduce(mine(), ReduceOp.premul_sum(2.0)), 2 * total),
        (group.allreduce([mine() / 4, mine() / 4], ReduceOp.premul_sum(2.0)), total),
    ):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert all(torch.equal(tensor, expected) for tensor in work.result())
    waited = group.allreduce(mine(), AllreduceOptions(asyncOp=False))
    assert waited.is_completed()


def test_allreduce_takes_options_or_an_operation_and_a_time_out() -> None:
    run_direct("threads", 2, reduce_all_forms)


def reduce_half_precision(group: dist.ProcessGroup) -> None:
    """Three numbers of which two are lost if the sum is rounded after each step."""
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        tensors = [torch.tensor([value], dtype=dtype) for value in (large, 1.0, 1.0)]
        group.allreduce(tensors).wait()
        assert tensors[0].item() == group.size() * (large + 2)


def test_several_tensors_of_a_rank_are_added_as_those_of_several_ranks() -> None:
    run_direct("threads", 2, reduce_half_precision)


def refuse_all_reductions(group: dist.ProcessGroup) -> None:
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    entry = torch.sparse_coo_tensor([[0]], [1.0], size=(1,), check_invariants=True)
    with pytest.raises(RuntimeError, match="requires non-empty tensor list"):
        group.allreduce([], AllreduceOptions())
    with pytest.raises(RuntimeError, match="invalid tensor type at index 1"):
        group.allreduce([one, double], AllreduceOptions())
    with pytest.raises(RuntimeError, match="invalid tensor type at index 1"):
        group.allreduce([one, torch.zeros(1, device="meta")])
    with pytest.raises(RuntimeError, match="invalid tensor size at index 1"):
        group.allreduce([one, two], AllreduceOptions())
    with pytest.raises(RuntimeError, match="invalid tensor layout at index 1"):
        group.allreduce([one, entry])
    with pytest.raises(RuntimeError, match="unsupported reduction operation"):
        group.allreduce([entry], ReduceOp.MAX)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        group.allreduce(3)
    with pytest.raises(TypeError, match="incompatible function arguments: expected AllreduceOptions"):
        group.allreduce(one, "sum")
    with pytest.raises(InvalidArgumentTypeError, match=r"`op` must be a torchestra.ReduceOp"):
        group.allreduce(one, AllreduceOptions(reduceOp="sum"))
    with pytest.raises(InvalidArgumentError, match="expanded tensor"):
        group.allreduce([torch.zeros(1).expand(3), torch.zeros(3)])
    with pytest.raises(RuntimeError, match="requires non-empty tensor list"):
        group.allreduce_coalesced([], AllreduceCoalescedOptions())
    with pytest.raises(RuntimeError, match="tensors must all have the same type"):
        group.allreduce_coalesced([one, double], AllreduceCoalescedOptions())
    with pytest.raises(RuntimeError, match="invalid tensor layout at index 1"):
        group.allreduce_coalesced([one, entry], AllreduceCoalescedOptions())
    with pytest.raises(RuntimeError, match="unsupported layout"):
        group.allreduce_coalesced([entry, entry.clone()], AllreduceCoalescedOptions())
    with pytest.raises(TypeError, match="requires list of tensors"):
        group.allreduce_coalesced(one)
    group.allreduce(one).wait()  # nothing of this has harmed the group


def test_allreduce_refuses_what_does_not_go_together() -> None:
    run_direct("threads", 2, refuse_all_reductions)


def reduce_many(group: dist.ProcessGroup) -> None:
    inputs = [torch.tensor([index + group.rank()]) for index in range(MANY)]
    futures = [group.allreduce(tensor).get_future() for tensor in inputs]
    size = group.size()
    for index, future in enumerate(futures):
        assert future.wait()[0].item() == index * size + size * (size - 1) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_many_allreduces_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, reduce_many)


def reduce_coalesced(group: dist.ProcessGroup) -> None:
    size = group.size()
    for op, factor in ((ReduceOp.SUM, size), (ReduceOp.MAX, 1), (ReduceOp.MIN, 1)):
        best = {"SUM": (size + 1) / 2, "MAX": size, "MIN": 1}[op.name]
        shapes = [(1,), (2, 3), (0,), (5, 1, 2), ()]
        tensors = [
            torch.full(shape, (group.rank() + 1.0) * (index + 1)) for index, shape in enumerate(shapes)
        ]
        future = group.allreduce_coalesced(tensors, AllreduceCoalescedOptions(reduceOp=op)).get_future()
        assert [id(tensor) for tensor in future.wait()] == [id(tensor) for tensor in tensors]
        for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            assert torch.equal(tensor, torch.full(shape, factor * best * (index + 1.0)))


def reduce_coalesced_in_one_operation(group: dist.ProcessGroup) -> None:
    """Whatever lies between the tensors in memory, and though one is in the list twice."""
    size, rank = group.size(), group.rank()
    large = torch.full((40_000,), rank + 1.0)
    rows = torch.full((4, 6), rank + 1.0)
    tensors = [torch.full((3,), rank + 1.0), large, rows[:, ::2], torch.full((), rank + 1.0), large]
    before = group.get_sequence_number_for_group()
    group.allreduce_coalesced(tensors).wait()
    assert group.get_sequence_number_for_group() == before + 1
    assert all(bool((tensor == size * (size + 1) / 2).all()) for tensor in tensors)
    assert bool((rows[:, 1::2] == rank + 1.0).all())
    with pytest.raises(InvalidArgumentError, match="expanded tensor"):
        group.allreduce_coalesced([torch.zeros(3), torch.zeros(1).expand(3)])


@pytest.mark.parametrize("kind", KINDS)
def test_allreduce_coalesced_is_one_operation(kind: str) -> None:
    run_direct(kind, 3, reduce_coalesced_in_one_operation)


@pytest.mark.parametrize("kind", KINDS)
def test_allreduce_coalesced_reduces_each_tensor_on_its_own(kind: str) -> None:
    run_direct(kind, 3, reduce_coalesced)


def reduce_many_coalesced(group: dist.ProcessGroup) -> None:
    # Every other list has one tensor twice, which is reduced once.
    inputs = [
        2 * [torch.tensor([index + group.rank()])]
        if index % 2
        else [torch.tensor([index + group.rank()]) for _ in range(2)]
        for index in range(MANY)
    ]
    futures = [group.allreduce_coalesced(tensors).get_future() for tensors in inputs]
    size = group.size()
    for index, future in enumerate(futures):
        assert [tensor.item() for tensor in future.wait()] == [index * size + size * (size - 1) // 2] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_many_coalesced_allreduces_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, reduce_many_coalesced)


def reduce_to_roots(group: dist.ProcessGroup, layout: str) -> None:
    make = LAYOUTS[layout]
    for op, (tensor,), output in simple(group.rank(), group.size()):
        for root in range(group.size()):
            own = make(tensor)
            future = group.reduce([own], ReduceOptions(reduceOp=op, rootRank=root)).get_future()
            assert future.wait()[0] is own
            assert torch.equal(own, output if root == group.rank() else tensor)
    own = torch.tensor([group.rank() + 1.0])
    group.reduce(own, 1, ReduceOp.MAX).wait()
    group.reduce(own, root=0, op=ReduceOp.SUM, timeout=20.0).wait()
    group.reduce(tensor=own, root=0, op=ReduceOp.MIN).wait()
    group.reduce([own], ReduceOptions(asyncOp=False)).wait()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_changes_the_roots_tensor_alone(kind: str, layout: str) -> None:
    run_direct(kind, 3, reduce_to_roots, layout)


def reduce_many_to_roots(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    futures = []
    for index in range(MANY // size):
        for root in range(size):
            tensor = torch.tensor([index + rank])
            futures.append(group.reduce([tensor], ReduceOptions(rootRank=root)).get_future())
    for number, future in enumerate(futures):
        index, root = divmod(number, size)
        expected = index * size + size * (size - 1) // 2 if root == rank else index + rank
        assert future.wait()[0].item() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_many_reduces_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, reduce_many_to_roots)


def refuse_reduces(group: dist.ProcessGroup) -> None:
    one = torch.zeros(1)
    for root in (-1, group.size()):
        with pytest.raises(RuntimeError, match=f"invalid root rank: {root}"):
            group.reduce([one], ReduceOptions(rootRank=root, rootTensor=0))
    with pytest.raises(TypeError, match="`root` must be an int"):
        group.reduce([one], ReduceOptions(rootRank=True))
    for tensors, index in (([one], 1), ([one], -1), ([], 0)):
        with pytest.raises(RuntimeError, match=f"invalid root tensor: {index}"):
            group.reduce(tensors, ReduceOptions(rootRank=group.rank(), rootTensor=index))
    with pytest.raises(RuntimeError, match="requires a single-element tensor list"):
        group.reduce([one, one], ReduceOptions(rootRank=group.rank()))
    with pytest.raises(RuntimeError, match="only supports dense tensors"):
        group.reduce(one.to_sparse(), 0)
    with pytest.raises(RuntimeError, match=r"does not support ReduceOp\.MIN on complex tensors"):
        group.reduce(torch.zeros(1, dtype=torch.complex64), 0, ReduceOp.MIN)
    group.barrier().wait()


def test_reduce_refuses_a_root_that_is_not_there() -> None:
    run_direct("threads", 2, refuse_reduces)


def reduce_scatter(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    inputs = [torch.full((2, peer + 1), rank + peer * 10.0) for peer in range(size)]  # sizes differ by rank
    output = torch.empty(2, rank + 1)
    group.reduce_scatter([output], [inputs], ReduceScatterOptions()).wait()
    assert torch.equal(output, torch.full((2, rank + 1), size * (size - 1) / 2 + size * rank * 10.0))
    group.reduce_scatter(output, inputs, ReduceOp.MAX).wait()
    assert torch.equal(output, torch.full((2, rank + 1), size - 1 + rank * 10.0))
    group.reduce_scatter(output, inputs, op=ReduceOp.MIN, timeout=20.0).wait()
    assert torch.equal(output, torch.full((2, rank + 1), rank * 10.0))
    with pytest.raises(RuntimeError, match="reduce_scatter only supports 1 output"):
        group.reduce_scatter([output, output], [inputs, inputs])
    with pytest.raises(RuntimeError, match="must be world size"):
        group.reduce_scatter([output], [inputs[:-1]])
    with pytest.raises(RuntimeError, match="invalid tensor type at index 1"):
        group.reduce_scatter([output], [[inputs[0], inputs[1].double(), *inputs[2:]]])


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_scatter_gives_each_rank_its_tensor(kind: str) -> None:
    run_direct(kind, 3, reduce_scatter)


def reduce_scatter_tensors(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    shapes = [(5, 5), (10, 3), (2, 3, 4)]
    inputs = [torch.arange(float(size * torch.Size(s).numel())).view(size * s[0], *s[1:]) for s in shapes]
    expected = [tensor.chunk(size)[rank] * size for tensor in inputs]
    outputs = [torch.empty(shape) for shape in shapes]
    group.reduce_scatter_tensor(outputs[0], inputs[0]).wait()
    assert torch.equal(outputs[0], expected[0])
    group._reduce_scatter_base(outputs[1], inputs[1], ReduceScatterOptions()).wait()
    assert torch.equal(outputs[1], expected[1])
    outputs = [torch.empty(shape) for shape in shapes]
    work = group.reduce_scatter_tensor_coalesced(outputs, inputs)
    work.wait()
    assert [id(tensor) for tensor in work.result()] == [id(tensor) for tensor in outputs]
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
    with pytest.raises(RuntimeError, match="to have the same length"):
        group.reduce_scatter_tensor_coalesced(outputs[:1], inputs)
    with pytest.raises(RuntimeError, match="requires non-empty"):
        group.reduce_scatter_tensor_coalesced([], [])
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        group.reduce_scatter_tensor(torch.empty(5, 4), inputs[0])
    with pytest.raises(RuntimeError, match="invalid tensor type"):
        group.reduce_scatter_tensor_coalesced([outputs[0].double()], inputs[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_scatter_of_whole_tensors_and_of_lists_of_them(kind: str) -> None:
    run_direct(kind, 3, reduce_scatter_tensors)


def sum_sparse(group: dist.ProcessGroup) -> None:
    """Two tensors per rank, one of them without entries on all ranks but the last."""
    size, rank = group.size(), group.rank()
    own = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], size=(size + 1,), check_invariants=True)
    empty = torch.sparse_coo_tensor(
        torch.zeros(1, 0), torch.zeros(0), size=(size + 1,), check_invariants=True
    )
    tensors = [own, empty]
    future = group.allreduce(tensors).get_future()
    assert [id(tensor) for tensor in future.wait()] == [id(tensor) for tensor in tensors]
    for tensor in tensors:
        assert torch.equal(tensor.to_dense(), torch.tensor([1.0] * size + [2.0 * size]))


@pytest.mark.parametrize("kind", KINDS)
def test_allreduce_sums_lists_of_sparse_tensors(kind: str) -> None:
    run_direct(kind, 3, sum_sparse)
