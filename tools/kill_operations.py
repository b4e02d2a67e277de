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


def operations(rank: int, size: int) -> dict[str, Callable[[], Step]]:
    """By name, what makes the tensors and gives one step of the loop."""
    total = size * (size + 1) / 2
    root, after, before = size - 1, (rank + 1) % size, (rank - 1) % size
    own = rank + 1

    def all_reduce(length: int, allocate: Callable[..., torch.Tensor]) -> Step:
        tensor = allocate(length)

        def step() -> None:
            dist.all_reduce(tensor.fill_(own))
            check(tensor, total)

        return step

    def rooted(call: Callable[[torch.Tensor], Any], expected: float, length: int) -> Step:
        tensor = torch.empty(length)

        def step() -> None:
            call(tensor.fill_(own))
            check(tensor, expected)

        return step

    def pieces(
        call: Callable[[torch.Tensor, torch.Tensor], Any], ins: int, outs: int, expected: float
    ) -> Step:
        """For what puts pieces into an output; its last piece is checked."""
        source, target = torch.full((ins * MIDDLE,), float(own)), torch.empty(outs * MIDDLE)

        def step() -> None:
            call(target.zero_(), source)
            check(target[-MIDDLE:], expected)

        return step

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(tensor.split(MIDDLE))

    def gather(target: torch.Tensor, source: torch.Tensor) -> None:
        dist.gather(source, parts(target) if rank == root else None, dst=root)
        if rank != root:
            target.fill_(size)

    def scatter(target: torch.Tensor, source: torch.Tensor) -> None:
        dist.scatter(target, parts(source) if rank == 0 else None, src=0)

    def send_and_receive(length: int) -> Step:
        source, target = torch.full((length,), float(own)), torch.empty(length)

        def step() -> None:
            calls = [lambda: dist.send(source, after), lambda: dist.recv(target.zero_(), before)]
            for call in reversed(calls) if rank == 0 else calls:
                call()
            check(target, before + 1)

        return step

    def asynchronous() -> Step:
        tensors = [dist.empty(SMALL), torch.empty(MIDDLE), torch.empty(LARGE)]
        source, target = torch.full((MIDDLE,), float(own)), torch.empty(MIDDLE)

        def step() -> None:
            works = [dist.isend(source, after, tag=4), dist.irecv(target.zero_(), before, tag=4)]
            for tensor in tensors:
                works.append(dist.all_reduce(tensor.fill_(own), async_op=True))
            works.append(dist.barrier(async_op=True))
            for work in works:
                assert work is not None
                work.wait()
            check(tensors[2], total)
            check(target, before + 1)

        return step

    sum_at_root = total if rank == root else own
    return {
        "all_reduce, small": lambda: all_reduce(SMALL, torch.empty),
        "all_reduce, large": lambda: all_reduce(LARGE, torch.empty),
        "all_reduce, small, shared": lambda: all_reduce(SMALL, dist.empty),
        "all_reduce, large, shared": lambda: all_reduce(LARGE, dist.empty),
        "reduce": lambda: rooted(lambda tensor: dist.reduce(tensor, root), sum_at_root, MIDDLE),
        "broadcast": lambda: rooted(lambda tensor: dist.broadcast(tensor, root), size, LARGE),
        "all_gather": lambda: pieces(lambda out, tensor: dist.all_gather(parts(out), tensor), 1, size, size),
        "all_gather_into_tensor": lambda: pieces(dist.all_gather_into_tensor, 1, size, size),
        "gather": lambda: pieces(gather, 1, size, size),
        "scatter": lambda: pieces(scatter, size, 1, 1),
        "reduce_scatter": lambda: pieces(lambda o, t: dist.reduce_scatter(o, parts(t)), size, 1, total),
        "reduce_scatter_tensor": lambda: pieces(dist.reduce_scatter_tensor, size, 1, total),
        "all_to_all": lambda: pieces(lambda o, t: dist.all_to_all(parts(o), parts(t)), size, size, size),
        "all_to_all_single": lambda: pieces(dist.all_to_all_single, size, size, size),
        "barrier": lambda: dist.barrier,
        "send, recv, small": lambda: send_and_receive(SMALL),
        "send, recv, large": lambda: send_and_receive(LARGE),
        "asynchronous mix": asynchronous,
    }
