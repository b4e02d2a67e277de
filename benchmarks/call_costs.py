"""Measure how much of a small operation is the kernel, and how much the Python around it.

    python -m benchmarks.call_costs [ranks] [size …]     (default: 2 ranks, 4 B, 64 KB, 1 MB)

Each operation is timed twice on the same tensors: through the public call, and as the bare kernel that it
comes down to. The medians of several turns, in µs; the slowest rank's.

Before that, with 2 ranks: an all_reduce of 4 B by the public call, by a persistent operation, and by its
kernel in a compiled loop, with no Python at all; and how long a cache line takes from one rank to the other.
They are measured by turns, so that a noisy machine is noisy for all; the least of each, and how many times
the kernel's it is.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels import reduce
from torchestra.engine.layout import DONE
from torchestra.engine.native.atomics import kernel, load_acquire, spin_hint, store_release
from torchestra.engine.operations import ALL_GATHER_INTO_TENSOR, ALL_REDUCE, ALL_TO_ALL_SINGLE
from torchestra.engine.p2p import kernels
from torchestra.types import ReduceOp
from torchestra.world.init import default_group

SIZES = [4, 64 << 10, 1 << 20]
TURNS = 9


def timed(call: Callable[[], object], repetitions: int) -> float:
    """Return the µs per call: the median of some turns, on the slowest rank."""
    for _ in range(min(repetitions, 50)):
        call()
    turns = []
    for _ in range(TURNS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repetitions):
            call()
        turns.append((time.perf_counter() - began) / repetitions * 1e6)
    slowest = torch.tensor([statistics.median(turns)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


@kernel
def repeat_all_reduce(plan, count, address, number):
    """Reduce ``number`` times; return how often a call had to be repeated."""
    waits = 0
    for _ in range(number):
        while reduce.all_reduce(plan, count, address) != DONE:
            waits += 1
    return waits


@kernel
def bounce(own, peer, begins, number):
    """Bounce a value ``number`` times between two ranks, each of which writes its own cache line."""
    for step in range(1, number + 1):
        if begins:
            store_release(own, step)
        while load_acquire(peer) != step:
            spin_hint()
        if not begins:
            store_release(own, step)
    return 0


def smallest(number: int = 2000, turns: int = 41) -> dict[str, float]:
    """Return, with 2 ranks, the least µs of an all_reduce of 4 B in each way, and of a line one way."""
    engine: Any = default_group().communicator.engine
    rank, tensor, context = dist.get_rank(), torch.ones(1), engine.context
    plan = engine.plan(ALL_REDUCE, torch.float32, ReduceOp.SUM)
    persistent = dist.all_reduce_init(tensor)
    lines = dist.empty(256, dtype=torch.int64)
    offset = lines.data_ptr() - context.load_word(at.HEAPS) - rank * context.load_word(at.HEAP_BYTES)
    offsets: list[Any] = [None, None]
    dist.all_gather_object(offsets, offset)
    here, there = (
        context.load_word(at.HEAPS) + each * context.load_word(at.HEAP_BYTES) + offsets[each] + 512
        for each in (rank, 1 - rank)
    )

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        def repeat() -> None:
            for _ in range(number):
                call()

        return repeat

    def one_way() -> None:
        lines.zero_()
        dist.barrier()
        bounce(here, there, int(rank == 0), number)

    ways = {
        "public call": repeated(lambda: dist.all_reduce(tensor)),
        "persistent": repeated(persistent),
        "kernel": lambda: repeat_all_reduce(plan.address, 1, tensor.data_ptr(), number),
        "one way": one_way,
    }
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            each = (time.perf_counter() - began) / number * 1e6
            found[name] = min(found[name], each / 2 if name == "one way" else each)
    return found


def calls_of(size: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return, by operation, the public call and the kernel that it comes down to."""
    group = default_group()
    engine, ranks = group.communicator.engine, group.size()
    count = max(1, size // 4)
    given, gathered = torch.ones(count), torch.ones(count * ranks)
    part = torch.ones(max(1, count // ranks) * ranks)
    exchanged = torch.ones_like(part)
    plan = {
        "reduce": engine.plan(ALL_REDUCE, torch.float32, ReduceOp.SUM),
        "gather": engine.plan(ALL_GATHER_INTO_TENSOR, torch.float32),
        "exchange": engine.plan(ALL_TO_ALL_SINGLE, torch.float32),
    }
    reduction = (plan["reduce"].address, count, given.data_ptr())
    gathering = (plan["gather"].address, count, given.data_ptr(), gathered.data_ptr())
    bytes_each = part.nbytes // ranks
    exchange = (plan["exchange"].address, bytes_each, part.data_ptr(), exchanged.data_ptr())

    def bare(kernel: Callable[..., int], arguments: tuple[int, ...]) -> Callable[[], object]:
        def call() -> None:
            while kernel(*arguments):
                pass

        return call

    return {
        "all_reduce": (lambda: dist.all_reduce(given), bare(engine.kernels.all_reduce, reduction)),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(gathered, given),
            bare(engine.kernels.all_gather, gathering),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(exchanged, part),
            bare(engine.kernels.all_to_all_even, exchange),
        ),
    }


def there_and_back(size: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return the calls of a round trip between ranks 0 and 1, 2 and 3, …: public, and as kernels."""
    rank, tensor = dist.get_rank(), torch.ones(max(1, size // 4))
    other = rank ^ 1
    engine: Any = default_group().communicator.engine
    mailbox = engine.mailbox
    record = mailbox._spare_record()
    arguments = (tensor.data_ptr(), tensor.nbytes, 0, other, 0)

    def public() -> None:
        if rank < other:
            dist.send(tensor, other)
            dist.recv(tensor, other)
        else:
            dist.recv(tensor, other)
            dist.send(tensor, other)

    def bare() -> None:
        for sending in (1, 0) if rank < other else (0, 1):
            at_once = mailbox._send_now if sending else mailbox._receive_now
            if at_once(mailbox.address, *arguments) == DONE:
                continue
            if mailbox._transfer(mailbox.address, record.address, sending, *arguments) != DONE:
                while kernels.run(mailbox.address, record.address, 1) != DONE:
                    pass
                kernels.release(mailbox.address, record.address)

    return {"send + recv": (public, bare)}


def measure_smallest() -> dict[str, float]:
    """Return :func:`smallest`, on every rank of a group of 2."""
    torch.set_num_threads(1)
    dist.init_process_group()
    found = smallest()
    dist.destroy_process_group()
    return found


def measure(sizes: list[int]) -> list[tuple[int, str, float, float]]:
    """Return, on every rank, (size, operation, µs of the public call, µs of the kernel)."""
    torch.set_num_threads(1)
    dist.init_process_group()
    rows = []
    for size in sizes:
        repetitions = max(5, min(3000, 50_000_000 // max(size, 20_000)))
        for name, (public, bare) in calls_of(size).items():
            rows.append((size, name, timed(public, repetitions), timed(bare, repetitions)))
        if dist.get_world_size() % 2 == 0:
            for name, (public, bare) in there_and_back(size).items():
                rows.append((size, name, timed(public, repetitions) / 2, timed(bare, repetitions) / 2))
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Measure, and print a line for each size and operation."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    sizes = [int(text) for text in sys.argv[2:]] or SIZES
    if ranks == 2:
        found = dist.launch(measure_smallest, 2)[0]
        print("all_reduce of 4 B, 2 ranks: ns, and times the kernel")
        for name, each in found.items():
            print(f"{name:<14} {each * 1000:>8.0f} {each / found['kernel']:>8.2f}")
    print(f"{ranks} ranks, µs\n{'size':>9} {'operation':<14} {'call':>8} {'kernel':>8} {'Python':>8}")
    for size, name, call, bare in dist.launch(measure, ranks, sizes)[0]:
        print(f"{size:>9} {name:<14} {call:>8.2f} {bare:>8.2f} {call - bare:>8.2f}")


if __name__ == "__main__":
    main()
