"""The shared memory protocol under stress: it never gives wrong data, and each of its rules is needed.

Every stress runs twice over kernels with pauses in bad places (kernel_variants.py): as they are, where every
value must be right in every round, and with one rule of the protocol broken, where the same checks must find
wrong values. If the second part fails, the stress has become blind, or the rule superfluous.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kernel_variants import Rule, broken, edited

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels import exchange as exchange_kernels
from torchestra.engine.kernels import move, reduce
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.local import LocalEngine
from torchestra.engine.native.kernel import Kernel
from torchestra.engine.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER_TENSOR,
    Collective,
    Kind,
    pack,
)
from torchestra.types import ReduceOp
from worlds import KINDS, run

# The first test compiles kernels, 6 seconds on an idle machine.
pytestmark = pytest.mark.timeout(300)

ROUNDS = 40
SECONDS = 30.0
CHUNK = 2048
# Five whole chunks and a short one, whose pieces lie elsewhere in a buffer than those of the whole ones.
CHUNKED = 5 * CHUNK // 8 + 150
DIRECT = 32

Turn = Callable[[LocalEngine, int], bool]


def setup() -> LocalEngine:
    engine = dist.group.WORLD.communicator.engine
    engine.choices = Choices(direct=DIRECT * 8, chunk=CHUNK, share=CHUNK)
    return engine


def values(rank: int, turn: int, length: int) -> torch.Tensor:
    """Different for every rank and position, and in every round."""
    return torch.arange(length) * 1000 + rank * 10_000_000 + turn * 7_000_000_000


def run_here(
    engine: LocalEngine,
    row: Collective,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    op: ReduceOp | None = None,
) -> None:
    engine.collective(engine.plan(row, torch.int64, op), inputs, outputs, SECONDS)


def all_reduce(engine: LocalEngine, turn: int, length: int) -> bool:
    tensor = values(engine.rank, turn, length)
    run_here(engine, ALL_REDUCE, [tensor], [tensor], ReduceOp.SUM)
    return torch.equal(tensor, sum(values(rank, turn, length) for rank in range(engine.size)))


def direct_all_reduce(engine: LocalEngine, turn: int) -> bool:
    return all_reduce(engine, turn, DIRECT)


def chunked_all_reduce(engine: LocalEngine, turn: int) -> bool:
    return all_reduce(engine, turn, CHUNKED)


def all_reduce_iovec(engine: LocalEngine, turn: int, length: int) -> bool:
    """Tensors of many lengths, none among them, count as one."""
    whole = values(engine.rank, turn, length)
    lengths = [1, 0, length // 3, 2, length // 2]
    tensors = [part.clone() for part in whole.split([*lengths, length - sum(lengths)])]
    run_here(engine, ALL_REDUCE, tensors, tensors, ReduceOp.SUM)
    return torch.equal(torch.cat(tensors), sum(values(rank, turn, length) for rank in range(engine.size)))


def direct_all_reduce_iovec(engine: LocalEngine, turn: int) -> bool:
    return all_reduce_iovec(engine, turn, DIRECT)


def chunked_all_reduce_iovec(engine: LocalEngine, turn: int) -> bool:
    return all_reduce_iovec(engine, turn, CHUNKED)


def all_reduce_in_place(engine: LocalEngine, turn: int) -> bool:
    """Tensors in the arena are reduced and written by all ranks, up to the end of the operation."""
    tensor = engine.empty((CHUNKED,), torch.int64)
    tensor.copy_(values(engine.rank, turn, CHUNKED))
    run_here(engine, ALL_REDUCE, [tensor], [tensor], ReduceOp.SUM)
    found = tensor.clone()
    tensor.zero_()
    return torch.equal(found, sum(values(rank, turn, CHUNKED) for rank in range(engine.size)))


def all_reduce_list(engine: LocalEngine, turn: int, in_heap: bool) -> bool:
    """All but a few elements of a list lie in the arena, or those of some ranks do; so do both halves."""
    whole = values(engine.rank, turn, CHUNKED)
    lengths = [5, CHUNKED // 2, 0, 2, CHUNKED - CHUNKED // 2 - 7]
    tensors = [part.clone() for part in whole.split(lengths)]
    for index in (1, 4) if in_heap else ():
        tensors[index] = engine.empty((lengths[index],), torch.int64).copy_(tensors[index])
    run_here(engine, ALL_REDUCE, tensors, tensors, ReduceOp.SUM)
    found = torch.cat(tensors)
    for tensor in tensors:
        tensor.zero_()
    return torch.equal(found, sum(values(rank, turn, CHUNKED) for rank in range(engine.size)))


def list_in_place(engine: LocalEngine, turn: int) -> bool:
    return all_reduce_list(engine, turn, in_heap=True)


def list_of_some_in_place(engine: LocalEngine, turn: int) -> bool:
    return all_reduce_list(engine, turn, in_heap=engine.rank > 0)


def all_gather(engine: LocalEngine, turn: int, length: int = CHUNKED) -> bool:
    tensor = values(engine.rank, turn, length)
    outputs = [torch.empty_like(tensor) for _ in range(engine.size)]
    run_here(engine, ALL_GATHER, [tensor], outputs)
    return all(torch.equal(output, values(rank, turn, length)) for rank, output in enumerate(outputs))


def short_all_gather(engine: LocalEngine, turn: int) -> bool:
    return all_gather(engine, turn, DIRECT)


def all_gather_in_place(engine: LocalEngine, turn: int) -> bool:
    """Tensors in the arena are read where they lie, and changed as soon as the operation is over."""
    tensor = engine.empty((CHUNKED,), torch.int64)
    tensor.copy_(values(engine.rank, turn, CHUNKED))
    outputs = [torch.empty_like(tensor) for _ in range(engine.size)]
    run_here(engine, ALL_GATHER, [tensor], outputs)
    tensor.zero_()
    return all(torch.equal(output, values(rank, turn, CHUNKED)) for rank, output in enumerate(outputs))


def eager_broadcast(engine: LocalEngine, turn: int, length: int = DIRECT) -> bool:
    """Rank 0 does not wait for the others, which are the slower as they read."""
    tensor = values(0, turn, length) if engine.rank == 0 else torch.zeros(length, dtype=torch.int64)
    engine.collective(engine.plan(BROADCAST, torch.int64, None, 0), [tensor], [tensor], SECONDS)
    return torch.equal(tensor, values(0, turn, length))


def awaited_broadcast(engine: LocalEngine, turn: int) -> bool:
    """All others look for rank 0 before it begins."""
    time.sleep(0.0005 * (engine.rank == 0))
    return eager_broadcast(engine, turn)


def inline_broadcast(engine: LocalEngine, turn: int) -> bool:
    """Return what is broadcast lies beside the flag."""
    return eager_broadcast(engine, turn, 4)


def eager_reduce(engine: LocalEngine, turn: int, length: int = DIRECT) -> bool:
    """All others do not wait for rank 0, which pauses before it reads."""
    tensor = values(engine.rank, turn, length)
    engine.collective(engine.plan(REDUCE, torch.int64, ReduceOp.SUM, 0), [tensor], [tensor], SECONDS)
    total = sum(values(rank, turn, length) for rank in range(engine.size))
    return engine.rank > 0 or torch.equal(tensor, total)


def inline_all_reduce(engine: LocalEngine, turn: int) -> bool:
    """Return what is reduced lies beside the flags."""
    return all_reduce(engine, turn, 4)


def exchange(engine: LocalEngine, turn: int) -> bool:
    """Piece p of rank r is the values of rank 100 r + p."""
    size, rank = engine.size, engine.rank
    pieces = [values(100 * rank + peer, turn, CHUNKED) for peer in range(size)]
    outputs = [torch.empty_like(pieces[0]) for _ in range(size)]
    run_here(engine, ALL_TO_ALL, pieces, outputs)
    return all(
        torch.equal(output, values(100 * peer + rank, turn, CHUNKED)) for peer, output in enumerate(outputs)
    )


def reduce_scatter(engine: LocalEngine, turn: int) -> bool:
    size, rank = engine.size, engine.rank
    pieces = torch.cat([values(100 * rank + peer, turn, CHUNKED) for peer in range(size)])
    output = torch.empty(CHUNKED, dtype=torch.int64)
    run_here(engine, REDUCE_SCATTER_TENSOR, [pieces], [output], ReduceOp.SUM)
    return torch.equal(output, sum(values(100 * peer + rank, turn, CHUNKED) for peer in range(size)))


TURNS = (
    direct_all_reduce,
    chunked_all_reduce,
    direct_all_reduce_iovec,
    chunked_all_reduce_iovec,
    list_in_place,
    list_of_some_in_place,
    all_reduce_in_place,
    short_all_gather,
    all_gather,
    all_gather_in_place,
    eager_broadcast,
    inline_broadcast,
    eager_reduce,
    inline_all_reduce,
    exchange,
    reduce_scatter,
)


def wrong_rounds(turn: Turn, kernels: dict[str, Kernel], gate: threading.Barrier) -> int:
    """On one rank: in how many rounds the results were wrong, with these kernels in place of the engine's."""
    engine = setup()
    # With the engine's own: all words of both parities have then been written.
    for number in range(4):
        assert turn(engine, number)
    gate.wait(SECONDS)
    for attribute, kernel in kernels.items():
        assert hasattr(engine.kernels, attribute)  # else the engine's own would run on
        setattr(engine.kernels, attribute, kernel)
    return sum(not turn(engine, number) for number in range(4, 4 + ROUNDS))


def stress(turn: Turn, rule: Rule | None) -> int:
    """Over worlds of two and three threads; in how many rounds any rank had wrong results."""
    kernels = {
        "all_reduce": edited(reduce.all_reduce),
        "all_reduce_iovec": edited(reduce.all_reduce_iovec),
        "share": edited(move.share),
        "broadcast": edited(move.broadcast),
        "exchange": edited(exchange_kernels.exchange),
        "reduce_scatter_even": edited(reduce.reduce_scatter_even),
    }
    with broken(rule):
        return sum(
            sum(run("threads", size, wrong_rounds, turn, kernels, threading.Barrier(size))) for size in (2, 3)
        )


def check(turn: Turn, rule: Rule) -> None:
    """Whether a broken rule shows depends on what else the machine does: it has twenty tries."""
    assert stress(turn, None) == 0
    assert any(stress(turn, rule) for _ in range(20)), "the stress does not notice that the rule is broken"


@pytest.mark.parametrize(
    "turn",
    [
        direct_all_reduce,
        chunked_all_reduce,
        direct_all_reduce_iovec,
        short_all_gather,
        awaited_broadcast,
        exchange,
        reduce_scatter,
    ],
)
def test_what_was_written_before_a_rank_arrived_is_there(turn: Turn) -> None:
    """waiting.py: "publishes a step when everything it wrote for that step is in place"; here step 1."""
    check(turn, Rule.FIRST_PIECE_BEFORE_ARRIVAL)


@pytest.mark.parametrize(
    "turn", [chunked_all_reduce, chunked_all_reduce_iovec, all_gather, exchange, reduce_scatter]
)
def test_what_was_written_before_a_later_step_is_there(turn: Turn) -> None:
    """waiting.py: "publishes a step when everything it wrote for that step is in place"; here from 2 on."""
    check(turn, Rule.COPY_BEFORE_PUBLISHING)


def test_the_pipelined_all_reduce_needs_its_third_pipe() -> None:
    """reduce.py: "A buffer is written again three iterations later: to be there a rank has seen everybody
    past iteration t + 2, where chunk t was read for the last time"."""
    check(chunked_all_reduce, Rule.THREE_PIPES)


@pytest.mark.parametrize("turn", [chunked_all_reduce, all_gather, exchange, reduce_scatter])
def test_a_chunk_is_not_written_where_peers_still_read_the_last(turn: Turn) -> None:
    """buffers.py: "Later chunks go through the three pipes"."""
    check(turn, Rule.MORE_THAN_ONE_PIPE)


@pytest.mark.parametrize("turn", [direct_all_reduce, short_all_gather])
def test_the_next_operation_does_not_write_where_peers_still_read_of_this_one(turn: Turn) -> None:
    """buffers.py: chunk 0 "goes into the slot of the operation's parity, which nobody reads any more"."""
    check(turn, Rule.TWO_SLOTS)


def slow_readers(engine: LocalEngine, turn: int) -> bool:
    """Rank 0 gets ahead as far as it is let."""
    time.sleep(0.0005 * (engine.rank > 0))
    return eager_broadcast(engine, turn)


def slow_root(engine: LocalEngine, turn: int) -> bool:
    """All but rank 0 do."""
    time.sleep(0.0005 * (engine.rank == 0))
    return eager_reduce(engine, turn)


@pytest.mark.parametrize("turn", [slow_readers, slow_root])
def test_who_does_not_wait_stays_within_the_window(turn: Turn) -> None:
    """waiting.py: "what it writes in operation n into a place that was last used in n - WINDOW or before is
    read by nobody any more"."""
    check(turn, Rule.NOT_TOO_FAR_APART)


@pytest.mark.parametrize("turn", [direct_all_reduce, short_all_gather, all_gather])
def test_nobody_reads_before_all_have_arrived(turn: Turn) -> None:
    """waiting.py: only "a peer that sees the value (acquire) may read what was written before it"."""
    check(turn, Rule.MEETING)


def test_chunks_that_are_late_are_there_before_their_step() -> None:
    """in_place.py: "If others cannot, it does that then, and everybody waits for one step more"."""
    check(list_of_some_in_place, Rule.LATE_BEFORE_PUBLISHING)


@pytest.mark.parametrize("turn", [all_reduce_in_place, list_in_place, all_gather_in_place])
def test_nobody_leaves_before_all_have_read_its_tensor_in_place(turn: Turn) -> None:
    """waiting.part: "wait until all have read"."""
    check(turn, Rule.PARTING)


def mixed_rounds(number: int) -> list[str]:
    """Operations of all kinds, one after the other in an order that is the same on every rank."""
    engine = setup()
    order = random.Random(number).choices(TURNS, k=number)
    return [turn.__name__ for step, turn in enumerate(order) if not turn(engine, step)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_kernels_as_they_are_never_give_wrong_data(kind: str, size: int) -> None:
    """Many small chunks of many operations, at full speed."""
    assert run(kind, size, mixed_rounds, 200) == [[]] * size


def false_mismatches(barrier: Kernel) -> int:
    """On one rank: how often barriers of which all ranks say the same, each time another thing, mismatch."""
    context = setup().context
    plan = np.array([context.address, pack(Kind.barrier), 0, 0, -1], dtype=np.int64)
    found = 0
    for turn in range(5 * ROUNDS):
        while (code := barrier(plan.ctypes.data, turn)) == at.PENDING:
            pass
        assert code in (at.DONE, at.MISMATCH)
        context.store_word(at.RESUME, 0)
        found += code == at.MISMATCH
    return found


def test_a_fingerprint_stays_until_all_have_compared_it() -> None:
    """waiting.py: "FLAGS = 2 WINDOW lines suffice". One would not."""
    barrier = edited(move.barrier)
    assert run("threads", 3, false_mismatches, barrier) == [0] * 3
    with broken(Rule.SEVERAL_LINES):
        assert any(sum(run("threads", 3, false_mismatches, barrier)) for _ in range(5))
