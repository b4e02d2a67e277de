"""Every collective over several hosts gives what it gives on one."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from cases import CASES, MOVES, check_case
from simulated import LAYOUTS, Layout, on_processes, on_threads

import torchestra as dist
from references import DEFINED, INTEGERS, reduced, sample
from torchestra.engine.dtypes import DTYPES
from torchestra.engine.multihost import all_to_all, broadcast_gather, hierarchy, reduction
from torchestra.types import ReduceOp

PREMUL_SUM = ReduceOp.premul_sum(0.5)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand elements travel in several chunks."""
    for module in (reduction, broadcast_gather, all_to_all):
        monkeypatch.setattr(module, "_CHUNK_BYTES", 2048)
    monkeypatch.setattr(hierarchy, "_INLINE_BYTES", 64)
    monkeypatch.setattr(hierarchy, "_MIN_INLINE_BYTES", 64)


def every_case(lengths: tuple[int, ...]) -> None:
    for case in CASES:
        check_case(case, lengths, (torch.float32,), ("mixed",))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("layout", [*LAYOUTS, (1, 1, 1), (3, 1)])
def test_every_operation_gives_what_its_formula_says(layout: Layout) -> None:
    on_threads(layout, every_case, (0, 1, 33, 5003))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("layout", "bridge"), [*((each, "curve") for each in LAYOUTS), ((1, 2, 3), "gloo")])
def test_every_operation_over_sockets(layout: Layout, bridge: str) -> None:
    on_threads(layout, every_case, (33, 3001), bridge=bridge)  # six chunks: more than are sent at once


def every_case_and_sums(lengths: tuple[int, ...]) -> None:
    every_case(lengths)
    tensor = torch.full((3_000_017,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    size = dist.get_world_size()
    assert torch.equal(tensor, torch.full_like(tensor, size * (size - 1) / 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_among_processes(layout: Layout) -> None:
    on_processes(layout, every_case_and_sums, (1, 5003))


def every_dtype_moves() -> None:
    plain = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]
    for case in MOVES:
        check_case(case, (77,), plain, ("ordinary",))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_can_be_sent() -> None:
    on_threads((1, 2), every_dtype_moves)


class Samples:
    """What ranks that are threads reduce, and the result: made once for all of them."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, ReduceOp, int], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._lock = threading.Lock()

    def of(self, dtype: torch.dtype, op: ReduceOp, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the tensors of the ranks, of ``length`` for each of them, and their reduction."""
        with self._lock:
            if (key := (dtype, op, length)) not in self._made:
                size = dist.get_world_size()
                inputs = [finite(sample(dtype, size * length, seed=peer)) for peer in range(size)]
                self._made[key] = inputs, reduced(inputs, op)
            return self._made[key]


def every_reduction(samples: Samples) -> list[bytes]:
    """All pairs of dtype and operation, few elements and several chunks; the results of all_reduce."""
    rank, everything = dist.get_rank(), []
    for dtype, op in [*DEFINED, (torch.float32, PREMUL_SUM)]:
        for length in (2, 1200 // dtype.itemsize):
            inputs, expected = samples.of(dtype, op, length)
            everywhere = inputs[rank].clone()
            dist.all_reduce(everywhere, op)
            part = torch.empty(length, dtype=dtype)
            dist.reduce_scatter_tensor(part, inputs[rank], op)
            at_one = inputs[rank].clone()
            dist.reduce(at_one, 1, op)
            mine = expected[rank * length : (rank + 1) * length]
            wanted = [(everywhere, expected), (part, mine), (at_one, expected if rank == 1 else inputs[rank])]
            for found, right in wanted:
                assert alike(found, right), (dtype, op, length, rank)
            everything.append(bytes(everywhere.view(torch.uint8).numpy()))
    return everything


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of these hardly depend on their order."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return (
            torch.nan_to_num(tensor, nan=1.0, posinf=2.0, neginf=3.0).clamp(-4, 4)
            if (not tensor.dtype.is_complex)
            else torch.complex(finite(tensor.real), finite(tensor.imag))
        )
    return tensor


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype in INTEGERS or found.dtype == torch.bool:
        return torch.equal(found, expected)
    loose = 3e-2 if found.dtype.itemsize == 2 else 1e-4
    kind = torch.complex128 if found.dtype.is_complex else torch.float64
    return torch.allclose(found.to(kind), expected.to(kind), rtol=loose, atol=loose)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reduction_is_right_and_the_same_on_every_rank(layout: Layout) -> None:
    first, *others = on_threads(layout, every_reduction, Samples())
    assert all(other == first for other in others)


def sums_of_floats(length: int) -> bytes:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(tensor)
    return bytes(tensor.view(torch.uint8).numpy())


@pytest.mark.usefixtures("small_chunks")
def test_all_bridges_give_the_same_bits() -> None:
    found = [on_threads((1, 2), sums_of_floats, 5001, bridge=bridge) for bridge in ("", "curve", "gloo")]
    assert len({bits for ranks in found for bits in ranks}) == 1


def subgroups_in_any_pattern(seed: int) -> None:
    """Groups within a host, of one rank per host, and across hosts in any pattern and order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dice = random.Random(seed)
    for number in range(12):
        ranks = dice.sample(range(size), dice.randint(1, size))
        group = dist.new_group(ranks, sort_ranks=number % 2 == 0)
        members = sorted(ranks) if number % 2 == 0 else ranks
        if rank not in ranks:
            continue
        assert dist.get_process_group_ranks(group) == members
        tensor = torch.tensor([rank, 1])
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [sum(ranks), len(ranks)]
        gathered = [torch.empty(1, dtype=torch.int64) for _ in ranks]
        dist.all_gather(gathered, torch.tensor([rank]), group=group)
        assert [each.item() for each in gathered] == members
        dist.destroy_process_group(group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_subgroups_in_any_pattern(layout: Layout) -> None:
    on_threads(layout, subgroups_in_any_pattern, 7)


def test_subgroups_among_processes() -> None:
    on_processes((1, 2), subgroups_in_any_pattern, 11)


def objects_and_the_rest() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 3000 * rank, "tensor": torch.full((20_000,), rank)}
    everybodys: list[object] = [None] * size
    dist.all_gather_object(everybodys, mine)
    assert [each["rank"] for each in everybodys] == list(range(size))  # type: ignore[index]
    assert all((each["tensor"] == peer).all() for peer, each in enumerate(everybodys))  # type: ignore[index]
    listed = [mine if rank == size - 1 else None]
    dist.broadcast_object_list(listed, src=size - 1)
    assert listed[0]["rank"] == size - 1  # type: ignore[index]
    found: list[object] = [None]
    dist.scatter_object_list(found, [{"for": peer} for peer in range(size)] if rank == 0 else None, src=0)
    assert found == [{"for": rank}]
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, 0]]), torch.tensor([1.0, 2.0]), (size,), check_invariants=False
    )
    dist.all_reduce(sparse)
    expected = torch.ones(size)
    expected[0] += 2 * size
    assert torch.equal(sparse.to_dense(), expected)
    tensors = [torch.full((10 * (number + 1),), float(rank)) for number in range(3)]
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == size * (size - 1) / 2).all() for tensor in tensors)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    assert all(work.wait() for work in works if work is not None)
    dist.monitored_barrier()
    dist.barrier()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objects_sparse_tensors_lists_and_asynchronous_operations(layout: Layout) -> None:
    on_threads(layout, objects_and_the_rest)


def test_objects_among_processes() -> None:
    on_processes((2, 1), objects_and_the_rest)
