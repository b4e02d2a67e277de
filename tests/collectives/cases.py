"""The table of collectives: how each is called, and what it must give, as a formula in rank and size.

A case is called on every rank as ``case(make, rank, size, length)``; it makes its tensors through ``make``,
so that one table serves every dtype and both kinds of memory, and checks its results itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

import torchestra as dist
from torchestra.engine.operations import COLLECTIVES

_GUARD = 3
_GUARD_VALUE = 99


def pattern(rank: int, length: int, salt: int = 0) -> torch.Tensor:
    """Return what a rank sends: small numbers that every dtype holds, and a sum of a few of them too."""
    return (torch.arange(length) * 3 + rank * 5 + salt * 7) % 13


class Maker:
    """Makes tensors of one dtype, in ordinary memory, the arena or on a device; guards on both sides."""

    def __init__(self, dtype: torch.dtype, in_arena: bool, salt: int = 0, device: str = "cpu") -> None:
        self.dtype = dtype
        self.device = device
        self.in_arena = in_arena
        self.salt = salt
        self._guarded: list[tuple[torch.Tensor, int]] = []

    def pattern(self, rank: int, length: int, salt: int = 0) -> torch.Tensor:
        """Return what a rank sends; another salt gives other values."""
        return pattern(rank, length, self.salt + salt)

    def total(self, size: int, length: int, salt: int = 0) -> torch.Tensor:
        """The sum of what all ranks send."""
        return torch.stack([self.pattern(rank, length, salt) for rank in range(size)]).sum(0)

    def in_rank_order(self, size: int, length: int) -> torch.Tensor:
        """Return what all ranks send, one after the other."""
        return torch.cat([self.pattern(peer, length) for peer in range(size)])

    def holding(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that holds these values."""
        tensor = self.blank(values.numel())
        self.fill(tensor, values)
        return tensor

    def blank(self, length: int) -> torch.Tensor:
        """A tensor that holds what no operation here gives."""
        shape = (length + 2 * _GUARD,)
        if self.in_arena:
            whole = dist.empty(shape, dtype=self.dtype)
        else:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(whole, torch.tensor(_GUARD_VALUE).expand(whole.shape))
        self._guarded.append((whole, length))
        return whole[_GUARD : _GUARD + length]

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The values in this dtype; of small floats, which torch hardly computes with, the bits."""
        if self.dtype.is_floating_point and self.dtype.itemsize == 1:
            return values.to(torch.uint8).view(self.dtype)
        return values.to(self.dtype)

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Put the values into the tensor."""
        if tensor.numel():
            tensor.view(torch.uint8).copy_(self.of(values.contiguous()).view(torch.uint8))

    def check(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """The tensor holds these values, and nothing was written beside any that was made."""
        wanted = self.of(expected)
        assert found.shape == wanted.shape, what
        if not torch.equal(_comparable(found), _comparable(wanted)):
            wrong = (_comparable(found) != _comparable(wanted)).any(1).nonzero().flatten()
            raise AssertionError(
                f"{what}: {len(wrong)} of {found.numel()} elements differ, the first at {wrong[0].item()}:"
                f" {found[wrong[0]]} instead of {wanted[wrong[0]]}"
            )

    def check_guards(self, what: str) -> None:
        guard = _comparable(self.of(torch.full((_GUARD,), _GUARD_VALUE)))
        for whole, length in self._guarded:
            for part in (whole[:_GUARD], whole[_GUARD + length :]):
                assert torch.equal(_comparable(part), guard), f"{what}: written beside a tensor"
        self._guarded.clear()


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes on the CPU, which compare whatever the dtype; a row for each element."""
    tensor = tensor.cpu()
    if not tensor.numel():
        return torch.empty(0, 1)
    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1)


Case: TypeAlias = Callable[[Maker, int, int, int], None]


def all_reduce(make: Maker, rank: int, size: int, length: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    assert dist.all_reduce(tensor) is None
    make.check(tensor, make.total(size, length), "sum")


def reduce_first(make: Maker, rank: int, size: int, length: int) -> None:
    _reduce(make, rank, size, length, root=0)


def reduce_last(make: Maker, rank: int, size: int, length: int) -> None:
    _reduce(make, rank, size, length, root=size - 1)


def _reduce(make: Maker, rank: int, size: int, length: int, root: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    dist.reduce(tensor, root)
    make.check(
        tensor, make.total(size, length) if rank == root else make.pattern(rank, length), f"reduce to {root}"
    )


def broadcast_first(make: Maker, rank: int, size: int, length: int) -> None:
    _broadcast(make, rank, length, root=0)


def broadcast_last(make: Maker, rank: int, size: int, length: int) -> None:
    _broadcast(make, rank, length, root=size - 1)


def _broadcast(make: Maker, rank: int, length: int, root: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    dist.broadcast(tensor, root)
    make.check(tensor, make.pattern(root, length), f"broadcast from {root}")


def all_gather(make: Maker, rank: int, size: int, length: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    outputs = [make.blank(length) for _ in range(size)]
    dist.all_gather(outputs, tensor)
    for peer, output in enumerate(outputs):
        make.check(output, make.pattern(peer, length), f"piece of {peer}")
    make.check(tensor, make.pattern(rank, length), "input")


def all_gather_in_place(make: Maker, rank: int, size: int, length: int) -> None:
    outputs = [make.blank(length) for _ in range(size)]
    make.fill(outputs[rank], make.pattern(rank, length))
    dist.all_gather(outputs, outputs[rank])
    for peer, output in enumerate(outputs):
        make.check(output, make.pattern(peer, length), f"piece of {peer}")


def all_gather_uneven(make: Maker, rank: int, size: int, length: int) -> None:
    """Rank p has length * p / (size - 1) elements, so one has none and one has them all."""
    lengths = _shares(size, length)
    tensor = make.holding(make.pattern(rank, lengths[rank]))
    outputs = [make.blank(share) for share in lengths]
    dist.all_gather(outputs, tensor)
    for peer, output in enumerate(outputs):
        make.check(output, make.pattern(peer, lengths[peer]), f"piece of {peer}")


def _shares(size: int, length: int) -> list[int]:
    return [length * peer // max(1, size - 1) for peer in range(size)]


def all_gather_into_tensor(make: Maker, rank: int, size: int, length: int) -> None:
    output = make.blank(size * length)
    dist.all_gather_into_tensor(output, make.holding(make.pattern(rank, length)))
    make.check(output, make.in_rank_order(size, length), "output")


def all_gather_into_tensor_in_place(make: Maker, rank: int, size: int, length: int) -> None:
    output = make.blank(size * length)
    piece = output[rank * length : (rank + 1) * length]
    make.fill(piece, make.pattern(rank, length))
    dist.all_gather_into_tensor(output, piece)
    make.check(output, make.in_rank_order(size, length), "output")


def gather_first(make: Maker, rank: int, size: int, length: int) -> None:
    _gather(make, rank, size, length, root=0)


def gather_last(make: Maker, rank: int, size: int, length: int) -> None:
    _gather(make, rank, size, length, root=size - 1)


def _gather(make: Maker, rank: int, size: int, length: int, root: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    outputs = [make.blank(length) for _ in range(size)] if rank == root else None
    dist.gather(tensor, outputs, root)
    for peer, output in enumerate(outputs or ()):
        make.check(output, make.pattern(peer, length), f"piece of {peer}")
    make.check(tensor, make.pattern(rank, length), "input")


def scatter_first(make: Maker, rank: int, size: int, length: int) -> None:
    _scatter(make, rank, size, length, root=0)


def scatter_last(make: Maker, rank: int, size: int, length: int) -> None:
    _scatter(make, rank, size, length, root=size - 1)


def _scatter(make: Maker, rank: int, size: int, length: int, root: int) -> None:
    output = make.blank(length)
    inputs = (
        [make.holding(make.pattern(root, length, peer)) for peer in range(size)] if rank == root else None
    )
    dist.scatter(output, inputs, root)
    make.check(output, make.pattern(root, length, rank), f"scatter from {root}")


def reduce_scatter(make: Maker, rank: int, size: int, length: int) -> None:
    inputs = [make.holding(make.pattern(rank, length, peer)) for peer in range(size)]
    output = make.blank(length)
    dist.reduce_scatter(output, inputs)
    make.check(output, make.total(size, length, rank), "output")
    for peer, tensor in enumerate(inputs):
        make.check(tensor, make.pattern(rank, length, peer), f"input {peer}")


def reduce_scatter_uneven(make: Maker, rank: int, size: int, length: int) -> None:
    lengths = _shares(size, length)
    output = make.blank(lengths[rank])
    dist.reduce_scatter(
        output, [make.holding(make.pattern(rank, lengths[peer], peer)) for peer in range(size)]
    )
    make.check(output, make.total(size, lengths[rank], rank), "output")


def reduce_scatter_tensor(make: Maker, rank: int, size: int, length: int) -> None:
    tensor = make.holding(torch.cat([make.pattern(rank, length, peer) for peer in range(size)]))
    output = make.blank(length)
    dist.reduce_scatter_tensor(output, tensor)
    make.check(output, make.total(size, length, rank), "output")
    make.check(tensor, torch.cat([make.pattern(rank, length, peer) for peer in range(size)]), "input")


def reduce_scatter_tensor_in_place(make: Maker, rank: int, size: int, length: int) -> None:
    tensor = make.holding(torch.cat([make.pattern(rank, length, peer) for peer in range(size)]))
    output = tensor[rank * length : (rank + 1) * length]
    dist.reduce_scatter_tensor(output, tensor)
    make.check(output, make.total(size, length, rank), "output")


def all_to_all(make: Maker, rank: int, size: int, length: int) -> None:
    inputs = [make.holding(make.pattern(rank, length, peer)) for peer in range(size)]
    outputs = [make.blank(length) for _ in range(size)]
    dist.all_to_all(outputs, inputs)
    for peer, output in enumerate(outputs):
        make.check(output, make.pattern(peer, length, rank), f"from {peer}")


def all_to_all_uneven(make: Maker, rank: int, size: int, length: int) -> None:
    inputs = [make.holding(make.pattern(rank, _between(rank, peer, length), peer)) for peer in range(size)]
    outputs = [make.blank(_between(peer, rank, length)) for peer in range(size)]
    dist.all_to_all(outputs, inputs)
    for peer, output in enumerate(outputs):
        make.check(output, make.pattern(peer, _between(peer, rank, length), rank), f"from {peer}")


def _between(sender: int, receiver: int, length: int) -> int:
    """Return how much a rank sends to another in the uneven cases: some pairs nothing."""
    return length * ((sender + 2 * receiver) % 3) // 2


def all_to_all_single(make: Maker, rank: int, size: int, length: int) -> None:
    output = make.blank(size * length)
    dist.all_to_all_single(
        output, make.holding(torch.cat([make.pattern(rank, length, peer) for peer in range(size)]))
    )
    make.check(output, torch.cat([make.pattern(peer, length, rank) for peer in range(size)]), "output")


def all_to_all_single_split(make: Maker, rank: int, size: int, length: int) -> None:
    sent = [_between(rank, peer, length) for peer in range(size)]
    expected = [_between(peer, rank, length) for peer in range(size)]
    source = torch.cat([make.pattern(rank, sent[peer], peer) for peer in range(size)])
    output = make.blank(sum(expected))
    dist.all_to_all_single(output, make.holding(source), expected, sent)
    make.check(
        output, torch.cat([make.pattern(peer, expected[peer], rank) for peer in range(size)]), "output"
    )


def scan(make: Maker, rank: int, size: int, length: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    assert dist.scan(tensor) is None
    make.check(tensor, make.total(rank + 1, length), "sum")


def exscan(make: Maker, rank: int, size: int, length: int) -> None:
    tensor = make.holding(make.pattern(rank, length))
    assert dist.exscan(tensor) is None
    make.check(tensor, make.total(rank, length) if rank else make.pattern(0, length), "sum")


def barrier(make: Maker, rank: int, size: int, length: int) -> None:
    assert dist.barrier() is None


REDUCTIONS: tuple[Case, ...] = (
    all_reduce,
    reduce_first,
    reduce_last,
    reduce_scatter,
    reduce_scatter_uneven,
    reduce_scatter_tensor,
    reduce_scatter_tensor_in_place,
    scan,
    exscan,
)
MOVES: tuple[Case, ...] = (
    broadcast_first,
    broadcast_last,
    all_gather,
    all_gather_in_place,
    all_gather_uneven,
    all_gather_into_tensor,
    all_gather_into_tensor_in_place,
    gather_first,
    gather_last,
    scatter_first,
    scatter_last,
    all_to_all,
    all_to_all_uneven,
    all_to_all_single,
    all_to_all_single_split,
    barrier,
)
CASES = REDUCTIONS + MOVES

# The first case of each row of the table: a collective without one is an error here.
ONE_OF_EACH: tuple[Case, ...] = tuple(
    next(case for case in CASES if case.__name__.startswith(name)) for name in COLLECTIVES
)

WHERE = {"ordinary": lambda rank: False, "arena": lambda rank: True, "mixed": lambda rank: rank % 2 == 0}
"""In what memory each rank's tensors lie."""


def check_case(
    case: Case,
    lengths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    where: Sequence[str] = (),
    device: str = "cpu",
) -> None:
    """On every rank: the case for all these lengths and dtypes, in all kinds of memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in lengths:
        for dtype in dtypes:
            for memory in where:
                with saying(f"{case.__name__} of {length} {dtype}, {memory}, rank {rank} of {size}"):
                    make = Maker(dtype, WHERE[memory](rank), device=device)
                    case(make, rank, size, length)
                    make.check_guards(case.__name__)


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Put what was done in front of an assertion that fails."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
