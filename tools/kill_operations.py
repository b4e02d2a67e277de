"""The operations that kill_test.py repeats: each is made once and then stepped, and checks its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchestra as dist

SMALL, MIDDLE, LARGE = 7, 30_001, 1_000_001

Step = Callable[[], None]


def check(tensor: torch.Tensor, expected: float) -> None:
    """A sample of the elements, which is quick, so that most kills find the ranks inside the operation."""
    assert (tensor[::997] == expected).all(), f"wrong result: {tensor[::997]} instead of {expected}"


class Operations:
    """Make the operations of one rank.

    Attributes:
        rank, size: of the world.
        own: what this rank's tensors are filled with.
        total: the sum of that over all ranks.
        root: of rooted operations, the last rank.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.root = rank, size, size - 1
        self.own, self.total = rank + 1, size * (size + 1) / 2

    def all_reduce(self, length: int, allocate: Callable[..., torch.Tensor]) -> Step:
        tensor = allocate(length)

        def step() -> None:
            dist.all_reduce(tensor.fill_(self.own))
            check(tensor, self.total)

        return step

    def rooted(self, call: Callable[[torch.Tensor], Any], expected: float, length: int) -> Step:
        tensor = torch.empty(length)

        def step() -> None:
            call(tensor.fill_(self.own))
            check(tensor, expected)

        return step

    def pieces(
        self, call: Callable[[torch.Tensor, torch.Tensor], Any], ins: int, outs: int, expected: float
    ) -> Step:
        """Return a step that puts pieces into an output; its last piece is checked."""
        source, target = torch.full((ins * MIDDLE,), float(self.own)), torch.empty(outs * MIDDLE)

        def step() -> None:
            call(target.zero_(), source)
            check(target[-MIDDLE:], expected)

        return step

    def gather(self, target: torch.Tensor, source: torch.Tensor) -> None:
        dist.gather(source, parts(target) if self.rank == self.root else None, dst=self.root)
        if self.rank != self.root:
            target.fill_(self.size)

    def scatter(self, target: torch.Tensor, source: torch.Tensor) -> None:
        dist.scatter(target, parts(source) if self.rank == 0 else None, src=0)

    def send_and_receive(self, length: int) -> Step:
        source, target = torch.full((length,), float(self.own)), torch.empty(length)
        after, before = self._neighbours()

        def step() -> None:
            calls = [lambda: dist.send(source, after), lambda: dist.recv(target.zero_(), before)]
            for call in reversed(calls) if self.rank == 0 else calls:
                call()
            check(target, before + 1)

        return step

    def asynchronous(self) -> Step:
        tensors = [dist.empty(SMALL), torch.empty(MIDDLE), torch.empty(LARGE)]
        source, target = torch.full((MIDDLE,), float(self.own)), torch.empty(MIDDLE)
        after, before = self._neighbours()

        def step() -> None:
            works = [dist.isend(source, after, tag=4), dist.irecv(target.zero_(), before, tag=4)]
            for tensor in tensors:
                works.append(dist.all_reduce(tensor.fill_(self.own), async_op=True))
            works.append(dist.barrier(async_op=True))
            for work in works:
                assert work is not None
                work.wait()
            check(tensors[2], self.total)
            check(target, before + 1)

        return step

    def _neighbours(self) -> tuple[int, int]:
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces that make up a tensor."""
    return list(tensor.split(MIDDLE))


def operations(rank: int, size: int) -> dict[str, Callable[[], Step]]:
    """Return, by name, what makes the tensors and gives one step of the loop."""
    make = Operations(rank, size)
    root, total = make.root, make.total
    sum_at_root = total if rank == root else make.own
    return {
        "all_reduce, small": lambda: make.all_reduce(SMALL, torch.empty),
        "all_reduce, large": lambda: make.all_reduce(LARGE, torch.empty),
        "all_reduce, small, shared": lambda: make.all_reduce(SMALL, dist.empty),
        "all_reduce, large, shared": lambda: make.all_reduce(LARGE, dist.empty),
        "reduce": lambda: make.rooted(lambda tensor: dist.reduce(tensor, root), sum_at_root, MIDDLE),
        "broadcast": lambda: make.rooted(lambda tensor: dist.broadcast(tensor, root), size, LARGE),
        "all_gather": lambda: make.pieces(
            lambda out, tensor: dist.all_gather(parts(out), tensor), 1, size, size
        ),
        "all_gather_into_tensor": lambda: make.pieces(dist.all_gather_into_tensor, 1, size, size),
        "gather": lambda: make.pieces(make.gather, 1, size, size),
        "scatter": lambda: make.pieces(make.scatter, size, 1, 1),
        "reduce_scatter": lambda: make.pieces(lambda o, t: dist.reduce_scatter(o, parts(t)), size, 1, total),
        "reduce_scatter_tensor": lambda: make.pieces(dist.reduce_scatter_tensor, size, 1, total),
        "all_to_all": lambda: make.pieces(lambda o, t: dist.all_to_all(parts(o), parts(t)), size, size, size),
        "all_to_all_single": lambda: make.pieces(dist.all_to_all_single, size, size, size),
        "barrier": lambda: dist.barrier,
        "send, recv, small": lambda: make.send_and_receive(SMALL),
        "send, recv, large": lambda: make.send_and_receive(LARGE),
        "asynchronous mix": make.asynchronous,
    }
