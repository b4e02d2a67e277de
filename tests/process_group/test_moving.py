"""broadcast, allgather, gather, scatter and alltoall, as methods of a group."""

from __future__ import annotations

import pytest
import torch
from direct import run_direct
from test_group_reductions import LAYOUTS

import torchestra as dist
from torchestra.arguments.options import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)
from worlds import KINDS

MANY = 150


def value(number: float) -> torch.Tensor:
    return torch.tensor([float(number)])


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor.item() for tensor in tensors]


def broadcast(group: dist.ProcessGroup, layout: str) -> None:
    make, rank = LAYOUTS[layout], group.rank()
    for root in range(group.size()):
        future = group.broadcast([make(value(rank))], BroadcastOptions(rootRank=root)).get_future()
        assert values(future.wait()) == [root]
        for number in range(3):
            tensors = [make(value(rank * 3 + index)) for index in range(3)]
            options = BroadcastOptions(rootRank=root, rootTensor=number)
            future = group.broadcast(tensors, options).get_future()
            assert [id(tensor) for tensor in future.wait()] == [id(tensor) for tensor in tensors]
            assert values(tensors) == [root * 3 + number] * 3
    for work in (
        group.broadcast(value(rank + 1), root=0),
        group.broadcast(value(rank + 1), 0, 20.0),
        group.broadcast(tensor=value(rank + 1), root=0, timeout=20.0),
        group.broadcast([value(rank + 1)]),
        group.broadcast([value(rank + 1)], BroadcastOptions(asyncOp=False)),
    ):
        work.wait()
        assert values(work.result()) == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_of_the_roots_tensor_into_all_of_every_rank(kind: str, layout: str) -> None:
    run_direct(kind, 3, broadcast, layout)


def broadcast_nothing(group: dist.ProcessGroup) -> None:
    empty = torch.zeros(0)
    future = group.broadcast([empty]).get_future()
    future.wait()
    (output,) = future.value()
    assert output is empty
    assert output.numel() == 0
    for work in (
        group.allreduce([torch.zeros(0), torch.zeros(0)]),
        group.allgather([[torch.zeros(0) for _ in range(group.size())]], [empty]),
        group.alltoall_base(torch.zeros(0), empty),
    ):
        work.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_elements(kind: str) -> None:
    run_direct(kind, 2, broadcast_nothing)


def broadcast_many(group: dist.ProcessGroup) -> None:
    size = group.size()
    inputs = [torch.tensor([index * size + group.rank()]) for index in range(MANY)]
    works = [group.broadcast(tensor, root=index % size) for index, tensor in enumerate(inputs)]
    for index, work in enumerate(works):
        work.wait()
        assert inputs[index].item() == index * size + index % size


@pytest.mark.parametrize("kind", KINDS)
def test_many_broadcasts_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, broadcast_many)


def refuse_broadcasts(group: dist.ProcessGroup) -> None:
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    for root in (-1, group.size()):
        with pytest.raises(RuntimeError, match=f"invalid root rank: {root}"):
            group.broadcast([one], BroadcastOptions(rootRank=root, rootTensor=0))
    for tensors, index in (([one], -1), ([one], 1), ([], 0)):
        with pytest.raises(RuntimeError, match=f"invalid root tensor: {index}"):
            group.broadcast(tensors, BroadcastOptions(rootRank=group.rank(), rootTensor=index))
    with pytest.raises(RuntimeError, match="invalid tensor type at index 1"):
        group.broadcast([one, double], BroadcastOptions(rootRank=group.rank()))
    with pytest.raises(RuntimeError, match="invalid tensor size at index 1"):
        group.broadcast([one, two], BroadcastOptions(rootRank=group.rank()))
    with pytest.raises(RuntimeError, match="only supports dense tensors"):
        group.broadcast(one.to_sparse(), 0)
    group.barrier().wait()


def test_broadcast_refuses_a_root_that_is_not_there() -> None:
    run_direct("threads", 2, refuse_broadcasts)


def all_gather(group: dist.ProcessGroup, layout: str) -> None:
    make, size = LAYOUTS[layout], group.size()
    for number in (1, 2, 3):
        inputs = [make(value(number * group.rank() + index)) for index in range(number)]
        outputs = [[make(value(-1)) for _ in range(number * size)] for _ in range(number)]
        future = group.allgather(outputs, inputs).get_future()
        result = future.wait()
        if number == 1:
            result = [result]
        assert [values(row) for row in result] == [list(range(number * size))] * number
        assert [values(row) for row in outputs] == [list(range(number * size))] * number
    outputs = [value(-1) for _ in range(size)]
    for begin in (
        lambda: group.allgather(outputs, value(group.rank())),
        lambda: group.allgather(outputs, input_tensor=value(group.rank()), timeout=20.0),
        lambda: group.allgather([outputs], [value(group.rank())], AllgatherOptions(asyncOp=False)),
    ):
        begin().wait()
        assert values(outputs) == list(range(size))
        for output in outputs:
            output.fill_(-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_allgather_of_several_tensors_per_rank(kind: str, layout: str) -> None:
    run_direct(kind, 3, all_gather, layout)


def all_gather_many(group: dist.ProcessGroup) -> None:
    size = group.size()
    outputs = [[torch.tensor([-1]) for _ in range(size)] for _ in range(MANY)]
    futures = [
        group.allgather([outputs[index]], [torch.tensor([index + group.rank()])]).get_future()
        for index in range(MANY)
    ]
    for index, future in enumerate(futures):
        assert values(future.wait()) == [index + rank for rank in range(size)]


@pytest.mark.parametrize("kind", KINDS)
def test_many_allgathers_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, all_gather_many)


def refuse_all_gathers(group: dist.ProcessGroup) -> None:
    size = group.size()
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    for outputs, inputs, phrase in (
        ([], [], "requires non-empty input tensor list"),
        ([], [one], "requires input/output tensor lists to have the same length"),
        ([[one] * size, [one] * size], [one], "requires input/output tensor lists to have the same length"),
        ([[one] * (size - 1)], [one], "invalid output tensor list at index 0"),
        ([[one] * (size + 1)], [one], "invalid output tensor list at index 0"),
        ([[one] * 2 * size] * 2, [one, double], "invalid tensor type at index 1"),
        ([[one] * 2 * size] * 2, [one, two], "invalid tensor size at index 1"),
        ([[one, double, one][:size]], [one], "invalid tensor type at index 1"),
        ([[one, two, one][:size]], [one], "invalid tensor size at index 1"),
        ([[one] * size], [torch.zeros(1, device="meta")], "invalid tensor type at index 0"),
    ):
        with pytest.raises(RuntimeError, match=phrase):
            group.allgather(outputs, inputs)
    for outputs, inputs in ((3, [one]), ([3], [one]), ([[3]], [one]), ([[one] * size], 3)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            group.allgather(outputs, inputs)
    group.barrier().wait()


def test_allgather_refuses_lists_that_do_not_fit() -> None:
    run_direct("threads", 3, refuse_all_gathers)


def all_gather_tensors(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    shapes = [(5, 5), (10, 1, 3), (2,)]
    inputs = [torch.full(shape, rank + 1.0) for shape in shapes]
    expected = [torch.cat([torch.full(shape, peer + 1.0) for peer in range(size)]) for shape in shapes]
    output = torch.empty(expected[0].shape)
    group.allgather_into_tensor(output, inputs[0]).wait()
    assert torch.equal(output, expected[0])
    group._allgather_base(output.zero_(), inputs[0], AllgatherOptions(asyncOp=False)).wait()
    assert torch.equal(output, expected[0])
    outputs = [torch.empty(wanted.shape) for wanted in expected]
    work = group.allgather_into_tensor_coalesced(outputs, inputs)
    work.wait()
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
    assert [id(tensor) for tensor in work.result()] == [id(tensor) for tensor in outputs]
    with pytest.raises(RuntimeError, match="to have the same length"):
        group.allgather_into_tensor_coalesced(outputs[:1], inputs)
    with pytest.raises(RuntimeError, match="requires non-empty"):
        group.allgather_into_tensor_coalesced([], [])
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        group.allgather_into_tensor_coalesced([outputs[0][:-1]], inputs[:1])
    with pytest.raises(RuntimeError, match="invalid tensor type"):
        group.allgather_into_tensor(output.double(), inputs[0])
    with pytest.raises(TypeError, match="Expected parameter `output` of type"):
        group.allgather_into_tensor([output], inputs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_allgather_of_whole_tensors_and_of_lists_of_them(kind: str) -> None:
    run_direct(kind, 3, all_gather_tensors)


def all_gather_coalesced(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()

    def of(peer: int) -> list[torch.Tensor]:
        return [torch.full((2, 2), peer), torch.full((3,), peer + 0.5), torch.zeros(0)]

    outputs = [[torch.zeros_like(tensor) for tensor in of(rank)] for _ in range(size)]
    future = group.allgather_coalesced(outputs, of(rank)).get_future()
    for found in (outputs, future.wait()):
        for peer, row in enumerate(found):
            assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(row, of(peer), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_allgather_coalesced_sorts_tensors_by_rank(kind: str) -> None:
    run_direct(kind, 3, all_gather_coalesced)


def gather(group: dist.ProcessGroup, layout: str) -> None:
    make, size, rank = LAYOUTS[layout], group.size(), group.rank()
    own = [make(value(rank))]
    outputs = [make(value(-1)) for _ in range(size)]
    works = []
    for root in range(size):  # as many gathers as ranks are under way at once, into one list each
        lists = [outputs] if root == rank else []
        works.append(group.gather(lists, own, GatherOptions(rootRank=root)))
    for root, work in enumerate(works):
        result = work.get_future().wait()
        assert values(result) == (list(range(size)) if root == rank else [])
    assert values(outputs) == list(range(size))
    short = [outputs] if rank == 1 else [[]]
    group.gather(short[0], own[0], 1, 20.0).wait()
    group.gather(short[0], input_tensor=own[0], root=1).wait()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gather_to_every_root(kind: str, layout: str) -> None:
    run_direct(kind, 3, gather, layout)


def gather_many(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    futures = []
    for index in range(MANY // size):
        for root in range(size):
            outputs = [[torch.tensor([-1]) for _ in range(size)]] if root == rank else []
            work = group.gather(outputs, [torch.tensor([index + rank])], GatherOptions(rootRank=root))
            futures.append(work.get_future())
    for number, future in enumerate(futures):
        index, root = divmod(number, size)
        assert values(future.wait()) == ([index + peer for peer in range(size)] if root == rank else [])


@pytest.mark.parametrize("kind", KINDS)
def test_many_gathers_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, gather_many)


def refuse_rooted(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    one, double, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    own, other = GatherOptions(rootRank=rank), GatherOptions(rootRank=(rank + 1) % size)
    for outputs, inputs, options, phrase in (
        ([[one] * size], [one], GatherOptions(rootRank=-1), "invalid root rank: -1"),
        ([[one] * size], [one], GatherOptions(rootRank=size), f"invalid root rank: {size}"),
        ([[one] * size], [], own, "requires a single-element input tensor list"),
        ([[one] * size], [one, one], own, "requires a single-element input tensor list"),
        ([], [one], own, "requires a single-element output list"),
        ([[one] * size] * 2, [one], own, "requires a single-element output list"),
        ([[one] * (size - 1)], [one], own, "Incorrect output list size"),
        ([[one] * (size + 1)], [one], own, "Output list size should be 2, same as size of the process group"),
        ([[one, double]], [one], own, "invalid tensor type at index 1"),
        ([[one, two]], [one], own, "invalid tensor size at index 1"),
        ([[one] * size], [one], other, "requires empty output on non-root"),
    ):
        with pytest.raises(RuntimeError, match=phrase):
            group.gather(outputs, inputs, options)
    own, other = ScatterOptions(rootRank=rank), ScatterOptions(rootRank=(rank + 1) % size)
    for outputs, inputs, options, phrase in (
        ([one], [], ScatterOptions(rootRank=-1), "invalid root rank: -1"),
        ([one], [], ScatterOptions(rootRank=size), f"invalid root rank: {size}"),
        ([], [], other, "requires a single-element output tensor list"),
        ([one, one], [], other, "requires a single-element output tensor list"),
        ([one], [], own, "requires a single-element input list"),
        ([one], [[one] * size] * 2, own, "requires a single-element input list"),
        ([one], [[one] * (size - 1)], own, "Incorrect input list size"),
        ([one], [[one] * (size + 1)], own, "Incorrect input list size"),
        ([one], [[one, double]], own, "invalid tensor type at index 1"),
        ([one], [[one, two]], own, "invalid tensor size at index 1"),
        ([one], [[one] * size], other, "requires empty input on non-root"),
    ):
        with pytest.raises(RuntimeError, match=phrase):
            group.scatter(outputs, inputs, options)
    group.barrier().wait()


def test_gather_and_scatter_refuse_lists_that_do_not_fit() -> None:
    run_direct("threads", 2, refuse_rooted)


def scatter(group: dist.ProcessGroup, layout: str) -> None:
    make, size, rank = LAYOUTS[layout], group.size(), group.rank()
    inputs = [make(value(rank * 10 + peer)) for peer in range(size)]
    outputs = [make(value(-1)) for _ in range(size)]
    works = []
    for root in range(size):
        lists = [inputs] if root == rank else []
        works.append(group.scatter([outputs[root]], lists, ScatterOptions(rootRank=root)))
    for root, work in enumerate(works):
        assert values(work.get_future().wait()) == [root * 10 + rank]
    group.scatter(outputs[0], inputs if rank == 1 else [], 1, 20.0).wait()
    group.scatter(output_tensor=outputs[1], input_tensors=inputs if rank == 1 else [], root=1).wait()
    assert values(outputs[:2]) == [10 + rank] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_scatter_from_every_root(kind: str, layout: str) -> None:
    run_direct(kind, 3, scatter, layout)


def scatter_many(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    futures = []
    for index in range(MANY // size):
        for root in range(size):
            inputs = [[torch.tensor([index + root]) for _ in range(size)]] if root == rank else []
            work = group.scatter([torch.tensor([-1])], inputs, ScatterOptions(rootRank=root))
            futures.append(work.get_future())
    for number, future in enumerate(futures):
        assert values(future.wait()) == [sum(divmod(number, size))]


@pytest.mark.parametrize("kind", KINDS)
def test_many_scatters_are_under_way_at_once(kind: str) -> None:
    run_direct(kind, 4, scatter_many)


def exchange(group: dist.ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    inputs = [torch.full((peer + 1, 2), rank * 10.0 + peer) for peer in range(size)]
    outputs = [torch.zeros(rank + 1, 2) for _ in range(size)]
    assert group.alltoall(outputs, inputs).wait()
    assert all(torch.equal(out, torch.full((rank + 1, 2), p * 10.0 + rank)) for p, out in enumerate(outputs))
    group.alltoall(output_tensor=outputs, input_tensor=inputs, timeout=20.0).wait()
    joined = torch.zeros(size * (rank + 1), 2)
    lengths = [peer + 1 for peer in range(size)]
    group.alltoall_base(joined, torch.cat(inputs), [rank + 1] * size, lengths, AllToAllOptions()).wait()
    assert torch.equal(joined, torch.cat(outputs))
    even = torch.arange(size * 2.0) + rank * 100
    received = torch.zeros(size * 2)
    group.alltoall_base(received, even, [], [], 20.0).wait()
    assert received.tolist() == [peer * 100 + rank * 2 + index for peer in range(size) for index in (0, 1)]
    with pytest.raises(RuntimeError, match="input tensor list: its length should be equal to world size"):
        group.alltoall(outputs, inputs[:-1])
    with pytest.raises(RuntimeError, match="output tensor list: its length should be equal to world size"):
        group.alltoall(outputs[:-1], inputs)
    with pytest.raises(RuntimeError, match="invalid tensor type at index 0"):
        group.alltoall_base(received.double(), even)
    with pytest.raises(RuntimeError, match="one length for each of 3 ranks"):
        group.alltoall_base(received, even, [1], [1])
    with pytest.raises(RuntimeError, match="adds up to 3, but dimension 0 has length 6"):
        group.alltoall_base(received, even, [1] * 3, [1] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_alltoall_of_lists_and_of_ranges_of_rows(kind: str) -> None:
    run_direct(kind, 3, exchange)
