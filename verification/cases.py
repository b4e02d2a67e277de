"""The cases to search: the ranks' programs, the sizes of chunks, and the rules for other events."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torchestra.engine import layout as at
from torchestra.engine.native.declarations import KernelSource
from torchestra.engine.p2p import layout as w
from verification import block_drivers, drivers, endpoint_drivers, message_drivers, record_drivers
from verification.execution import load, now, store
from verification.memory import Known
from verification.operations import ALLOCATED, OPERATIONS
from verification.program import Edit, Library, unchanged
from verification.ranks import Ranks, Sizes
from verification.violations import WrongResult
from verification.world import Rules, World

Make = Callable[[Known], World]
Arguments = Callable[[Ranks, int], tuple[int, ...]]
"""Returns the arguments of a rank's driver, given the ranks and the rank's number."""


def _expect(found: int, wanted: int) -> int:
    if found != wanted:
        raise WrongResult(f"rank {now.rank} got {found} instead of {wanted}")
    return 0


def _nothing(*words: int) -> int:
    return 0


_RECORDER = (
    "open_entry", "close_entry", "begin_wait", "end_wait", "open_message", "close_message", "message_came",
)  # fmt: skip
_LEFT_OUT: dict[str, Callable[..., int]] = dict.fromkeys(
    ("recorder.clock.read_coarse_clock", "kernels.placement.rebalance_sometimes"), _nothing
)
"""Kernels that models leave out: they do not decide when ranks go on."""
REPLACED = _LEFT_OUT | dict.fromkeys((f"recorder.recorder.{name}" for name in _RECORDER), _nothing)
"""These, and those that record events."""
_ATTEMPTS = 2
_CLOCK = ALLOCATED + 8


def _tick(*words: int) -> int:
    """Return how often the rank has looked at its clock."""
    store(_CLOCK, load(_CLOCK) + 1)
    return load(_CLOCK)


def _fewer_attempts(edit: Edit) -> Edit:
    """Have readers of an entry try twice: more attempts are as the second."""

    def change(name: str, tree: ast.FunctionDef) -> ast.FunctionDef:
        tree = edit(name, tree)
        if name != "recorder.recorder.read_entry":
            return tree
        text = ast.unparse(tree)
        assert text.count("range(_ATTEMPTS)") == 1
        return cast(ast.FunctionDef, ast.parse(text.replace("_ATTEMPTS", str(_ATTEMPTS))).body[0])

    return change


def library(edit: Edit = unchanged, *, recorded: bool = False) -> Library:
    """Return the kernels, ready to run; ``edit`` changes their trees.

    Args:
        recorded: with those that record events, and a clock that counts how often it is looked at.
    """
    operations: dict[str, Callable[..., Any]] = {
        **OPERATIONS,
        "expect": _expect,
    }
    if recorded:
        return Library(operations, {**_LEFT_OUT, "recorder.clock.read_clock": _tick}, _fewer_attempts(edit))
    return Library(operations, REPLACED, edit)


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        name: for reports.
        size: how many ranks.
        driver: the program of each rank.
        arguments: gives the driver's arguments.
        sizes: into which operations are cut.
        rules: for events other than the ranks' own steps.
        recorded: with the flight recorder.
        model: changes kernels, so that there are fewer states.
    """

    name: str
    size: int
    driver: KernelSource
    arguments: Arguments
    sizes: Sizes = field(default_factory=Sizes)
    rules: Rules = field(default_factory=Rules)
    recorded: bool = False
    model: Edit = unchanged

    def kernels(self, edit: Edit = unchanged) -> Library:
        """Return the kernels that this case runs."""
        return library(lambda name, tree: self.model(name, edit(name, tree)), recorded=self.recorded)

    def make(self, kernels: Library, ranks: Ranks) -> Make:
        """Return the function that makes the first state, of ranks in a new arena."""
        return ranks.world(kernels, self.driver, lambda rank: self.arguments(ranks, rank), self.rules)


def in_place(count: int, *more: int, root: int = -1) -> Arguments:
    """Return the arguments of operations on one tensor of ``count`` words."""
    return lambda ranks, rank: (ranks.plan(rank, root=root), count, ranks.tensor(rank, count), *more)


def of_list(count: int, first: int, operations: int, in_heap: Callable[[int], bool]) -> Arguments:
    """Return the arguments of operations on two tensors, of ``first`` and all other of ``count`` words.

    The second lies in the heaps of some ranks.
    """
    return lambda ranks, rank: (
        ranks.plan(rank),
        count,
        ranks.tensor(rank, first),
        ranks.heap_tensor(rank) if in_heap(rank) else ranks.tensor(rank, count - first),
        ranks.tensor(rank, 8),
        first,
        operations,
    )


def _all(_: int) -> bool:
    return True


def _none(_: int) -> bool:
    return False


def between(count: int, inputs: int, outputs: int, *more: int, root: int = -1) -> Arguments:
    """Return the arguments of operations with an input and an output of some numbers of words."""
    return lambda ranks, rank: (
        ranks.plan(rank, root=root),
        count,
        ranks.tensor(rank, inputs),
        ranks.tensor(rank, outputs),
        *more,
    )


def in_heap(count: int, *more: int, root: int = -1) -> Arguments:
    """Return the arguments of operations on one tensor of ``count`` words in the rank's heap."""
    return lambda ranks, rank: (ranks.plan(rank, root=root), count, ranks.heap_tensor(rank), *more)


def lent(count: int, inputs: int, outputs: int, *more: int) -> Arguments:
    """Return the arguments of operations with an input that others may read, and an output of their own."""
    return lambda ranks, rank: (
        ranks.plan(rank),
        count,
        ranks.lent_tensor(rank, inputs),
        ranks.tensor(rank, outputs),
        *more,
    )


def from_heap(count: int, outputs: int, *more: int) -> Arguments:
    """Return the arguments of operations with an input in the rank's heap, and an output outside it."""
    return lambda ranks, rank: (
        ranks.plan(rank),
        count,
        ranks.heap_tensor(rank),
        ranks.tensor(rank, outputs),
        *more,
    )


def record(of: Callable[[Ranks], int], *more: int) -> Arguments:
    """Return the arguments of a rank that writes a record, and of another that reads it."""
    return lambda ranks, rank: (ranks.contexts[rank].address, of(ranks), ranks.tensor(rank, 8), *more)


def message(count: int, *more: int, ring: int = 256) -> Arguments:
    """Return the arguments of messages of ``count`` words, through a ring of ``ring`` bytes."""
    return lambda ranks, rank: (
        ranks.mailbox(rank, ring),
        ranks.tensor(rank, 16),
        ranks.tensor(rank, count),
        count,
        *more,
    )


def calls(count: int, messages: int, *, threads: int, ring: int = 256) -> Arguments:
    """Return the arguments of rank 0, which sends messages, and of threads of rank 1's pool.

    The first of these works with its first message until all have come, if there is another.
    """
    return lambda ranks, rank: (
        ranks.endpoint(min(rank, 1), 1 if rank == 0 else threads, ring),
        ranks.shared_words(32),
        ranks.tensor(rank, 16),
        ranks.tensor(rank, count),
        count,
        messages,
        rank == 0,
        rank == 1 and threads > 1,
    )


def calls_of_two_to_two(messages: int) -> Arguments:
    """Return the arguments of two threads of rank 0, which send to ranks 1 and 2, and of a thread of each."""
    return lambda ranks, thread: (
        ranks.endpoint(thread % 3, 1 if thread % 3 else 2),
        ranks.shared_words(64) + 256 * (thread == 2),
        ranks.tensor(thread, 16),
        ranks.tensor(thread, 1),
        1,
        messages,
        {0: 1, 3: 2}.get(thread, 0),
        0,
    )


def _no_grace(name: str, tree: ast.FunctionDef) -> ast.FunctionDef:
    """Have a follower watch once, without a grace: other threads may do as much between two of its steps."""
    if name != "p2p.endpoint_kernels.watch":
        return tree
    text = ast.unparse(tree)
    for old, new in (("syscall(FUTEX, state + CLOSING, FUTEX_WAIT, 0, grace, 0, 0)", "0"), ("_WATCHES", "1")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return cast(ast.FunctionDef, ast.parse(text).body[0])


def _slots(number: int) -> Edit:
    """Have channels be full with so many messages."""

    def change(name: str, tree: ast.FunctionDef) -> ast.FunctionDef:
        if not name.startswith("p2p."):
            return tree
        text = re.sub(r"w\.SLOTS\b", str(number), ast.unparse(tree))
        return cast(ast.FunctionDef, ast.parse(text).body[0])

    return change


_CRASH = Rules(crashes=1)
_SPURIOUS = Rules(spurious=1)
_BOUNDED = Rules(preemptions=2)
_TIMED = Rules(time_outs=True)
_LENT = Sizes(single_copy=64)
_LENT_IN_VAIN = Sizes(single_copy=64, unable=(1,))
# Beside the flag, in a slot, in two chunks.
_SMALL, _SLOT, _CHUNKS = 1, 7, 200
d, m, e, c, b = drivers, message_drivers, record_drivers, endpoint_drivers, block_drivers


def _beside_another(sending: bool) -> Arguments:
    """Return the arguments of two threads of rank 0, and of rank 1."""
    return lambda ranks, thread: (
        ranks.mailbox(1) if thread == 1 else ranks.shared_mailbox(0),
        ranks.shared_words(16),
        ranks.tensor(thread, 16),
        ranks.tensor(thread, 1),
        thread,
        sending,
    )


def _blocks(ranks: Ranks) -> tuple[int, int, int]:
    """Return the addresses of a table of blocks, and of the memory of two."""
    table = ranks.shared_words(32)
    return table, table + 128, table + 192


def _after(ranks: Ranks, rank: int, sequence: int) -> int:
    """Return the address of a plan of a rank that has done so many operations.

    Of a flag the system compares the low 32 bits, which wrap every 256 operations.
    """
    ranks.begin_after(sequence)
    return ranks.plan(rank)


def _entry(offset: int) -> Callable[[Ranks], int]:
    """Return the function that gives the address of an entry of rank 0's record, of number 1."""
    return lambda ranks: ranks.record(0) + offset + at.ENTRY_BYTES


CASES = [
    Case("barrier", 2, d.barriers, lambda r, k: (r.plan(k), 3)),
    Case("barrier, woken for nothing", 2, d.barriers, lambda r, k: (r.plan(k), 2), rules=_SPURIOUS),
    Case("barrier, a rank crashes", 2, d.barriers, lambda r, k: (r.plan(k), 2), rules=_CRASH),
    Case("barrier, counts differ", 2, d.barriers_with_mismatch, lambda r, k: (r.plan(k), 3, 7 * (k == 0))),
    Case("all_reduce beside the flag", 2, d.all_reduces, in_place(_SMALL, -1, 3)),
    Case("all_reduce in slots", 2, d.all_reduces, in_place(_SLOT, -1, 3)),
    Case("all_reduce in slots, a rank crashes", 2, d.all_reduces, in_place(_SLOT, -1, 2), rules=_CRASH),
    Case("all_reduce, started", 2, d.started,
         lambda r, k: (r.plan(k), _SLOT, r.tensor(k, _SLOT), r.shared_words(16), 2)),
    Case("all_reduce in chunks", 2, d.all_reduces, in_place(_CHUNKS, -1, 1)),
    Case("all_reduce in heaps", 2, d.all_reduces, in_heap(_CHUNKS, -1, 2)),
    Case("all_reduce in heaps, a rank crashes", 2, d.all_reduces, in_heap(_CHUNKS, -1, 1), rules=_CRASH),
    Case("all_reduce of a list", 2, d.list_all_reduces, of_list(_SLOT, 3, 3, _none)),
    Case("all_reduce of a list in chunks", 2, d.list_all_reduces, of_list(_CHUNKS, 60, 1, _none)),
    Case("all_reduce of a list in heaps", 2, d.list_all_reduces, of_list(_CHUNKS, 3, 2, _all)),
    Case("all_reduce of a list in heaps, a rank crashes", 2, d.list_all_reduces,
         of_list(_CHUNKS, 3, 1, _all), rules=_CRASH),
    Case("all_reduce of a list, in the heap of one", 2, d.list_all_reduces, of_list(_CHUNKS, 3, 1, bool)),
    Case("reduce", 2, d.all_reduces, in_place(_SLOT, 0, 3, root=0)),
    Case("reduce in chunks", 2, d.all_reduces, in_place(_CHUNKS, 0, 1, root=0)),
    Case("broadcast", 2, d.broadcasts, in_place(6, 0, 3, root=0)),
    Case("broadcast, far ahead", 2, d.broadcasts, in_place(6, 0, 18, root=0)),
    Case("broadcast, a rank crashes", 2, d.broadcasts, in_place(6, 0, 2, root=0), rules=_CRASH),
    Case("broadcast in parts", 2, d.broadcasts, in_place(13, 0, 1, root=0)),
    Case("broadcast, counts differ", 2, d.differing_broadcasts,
         lambda r, k: (r.plan(k, root=0), 1, r.tensor(k, 4), 0, 3 if k else 1)),
    Case("all_reduces and broadcasts in turn", 2, d.alternating,
         lambda r, k: (r.plan(k, meta=2, root=0), r.plan(k), 6, r.tensor(k, 6), 3)),
    Case("all_gather", 2, d.all_gathers, between(3, 3, 6, 3)),
    Case("all_gather in parts", 2, d.all_gathers, between(13, 13, 26, 1)),
    Case("all_gather from heaps", 2, d.all_gathers, from_heap(13, 26, 2)),
    Case("gather", 2, d.gathers, between(6, 6, 12, 0, 3, root=0)),
    Case("scatter", 2, d.scatters, between(6, 12, 6, 0, 3, root=0)),
    Case("reduce_scatter", 2, d.reduce_scatters, between(6, 12, 6, 2)),
    Case("reduce_scatter in parts", 2, d.reduce_scatters, between(13, 26, 13, 1)),
    Case("all_to_all", 2, d.exchanges, between(6, 12, 12, 2)),
    Case("all_to_all in parts", 2, d.exchanges, between(13, 26, 26, 1)),
    Case("all_gather, lent", 2, d.all_gathers, lent(13, 13, 26, 2), _LENT),
    Case("all_gather, lent, a rank crashes", 2, d.all_gathers, lent(13, 13, 26, 1), _LENT, _CRASH),
    Case("all_gather, lent in vain", 2, d.all_gathers, lent(13, 13, 26, 2), _LENT_IN_VAIN),
    Case("all_to_all, lent", 2, d.exchanges, lent(13, 26, 26, 2), _LENT),
    Case("all_to_all, lent in vain", 2, d.exchanges, lent(13, 26, 26, 2), _LENT_IN_VAIN),
    Case("scan", 2, d.scans, in_place(_CHUNKS, 1)),
    Case("messages", 2, m.stream, message(1, 3)),
    Case("messages there and back", 2, m.ping_pong, message(2, 2)),
    Case("messages without a record", 2, m.at_once, message(2, 3)),
    Case("messages through the ring", 2, m.stream, message(12, 1)),
    Case("a message longer than the ring", 2, m.stream, message(40, 1), rules=_BOUNDED),
    Case("a message as long as two rings", 2, m.stream, message(32, 1, ring=128), rules=_BOUNDED),
    Case("a message longer than the ring, a rank crashes", 2, m.stream, message(40, 1),
         rules=Rules(crashes=1, preemptions=1)),
    Case("a message, and what another thread leaves", 3, m.call_and_leave, _beside_another(True)),
    Case("a message for what another thread leaves", 3, m.call_and_leave, _beside_another(False)),
    Case("calls", 2, c.calls, calls(1, 2, threads=1)),
    Case("calls through the ring", 2, c.calls, calls(12, 3, threads=1)),
    Case("calls, few slots", 2, c.calls, calls(1, 4, threads=1), model=_slots(2)),
    Case("calls of two threads to two ranks, one slot", 4, c.calls, calls_of_two_to_two(2), model=_slots(1)),
    Case("a call longer than the ring", 2, c.calls, calls(40, 1, threads=1), rules=_BOUNDED),
    Case("calls, the caller crashes", 2, c.calls, calls(1, 2, threads=1), rules=_CRASH),
    Case("calls of two threads", 3, c.calls, calls(1, 2, threads=2), model=_no_grace),
    Case("calls of two threads, few slots", 3, c.calls, calls(1, 3, threads=2),
         model=lambda name, tree: _slots(2)(name, _no_grace(name, tree))),
    Case("blocks, of two threads", 3, b.blocks_of_a_process,
         lambda r, k: (*_blocks(r), k, (0, b.SHORT, b.SHORT)[k])),
    Case("blocks, another in the place of one", 3, b.blocks_of_a_process,
         lambda r, k: (*_blocks(r), k, (0, b.SHORT, b.LONG)[k])),
    Case("doorbell", 2, m.queue_and_thread, lambda r, k: (r.shared_words(8), k, 2, 0), rules=_TIMED),
    Case("doorbell, urgent", 2, m.queue_and_thread, lambda r, k: (r.shared_words(8), k, 1, 1), rules=_TIMED),
    Case("barrier, numbers wrap", 2, d.barriers, lambda r, k: (_after(r, k, 254), 3)),
    Case("all_reduce in slots, numbers wrap", 2, d.all_reduces,
         lambda r, k: (_after(r, k, 254), _SLOT, r.tensor(k, _SLOT), -1, 3)),
    Case("messages, numbers wrap", 2, m.stream,
         lambda r, k: (r.mailbox_after(k, w.SLOTS - 2), r.tensor(k, 16), r.tensor(k, 1), 1, 3)),
    Case("doorbell, the count wraps", 2, m.queue_and_thread,
         lambda r, k: (r.shared_words(8, (1 << 32) - 1, (1 << 32) - 1), k, 2, 0), rules=_TIMED),
    Case("record of collectives", 2, e.collectives, record(_entry(at.OPERATIONS_AT), 3, 2), recorded=True),
    Case("record of collectives, a rank crashes", 2, e.collectives, record(_entry(at.OPERATIONS_AT), 2, 1),
         rules=_CRASH, recorded=True),
    Case("record of a wait", 2, e.waits, record(lambda r: r.record(0), 3, 2), recorded=True),
    Case("record of messages", 2, e.messages, record(_entry(at.MESSAGES_AT), 0, 2), recorded=True),
    Case("record of barriers", 2, e.recorded_barriers,
         lambda r, k: (r.plan(k), r.record(1 - k), r.tensor(k, 8), 2), recorded=True),
    Case("barrier of three", 3, d.barriers, lambda r, k: (r.plan(k), 2), rules=_BOUNDED),
    Case("all_reduce of three", 3, d.all_reduces, in_place(_SMALL, -1, 2), rules=_BOUNDED),
    Case("broadcast of three", 3, d.broadcasts, in_place(6, 1, 2, root=1), rules=_BOUNDED),
    Case("reduce of three", 3, d.all_reduces, in_place(6, 1, 2, root=1), rules=_BOUNDED),
    Case("a message from any of two", 3, m.any_source, message(1, 2), rules=_BOUNDED),
]  # fmt: skip


def case_named(name: str) -> Case:
    """Return the case with a name."""
    return next(case for case in CASES if case.name == name)
