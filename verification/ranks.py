"""Make the first state of a model: the product sets up an arena and its ranks, whose memory the model reads.

So only the product defines the layout of memory and the words of a context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.local import LocalPlan
from torchestra.engine.membership.lending import publish_token
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena
from torchestra.engine.memory.heap import find_heaps
from torchestra.engine.native.declarations import KernelSource
from torchestra.engine.p2p import layout as p2p
from torchestra.engine.p2p.endpoint import Endpoint
from torchestra.engine.p2p.layout import channel_area_bytes
from torchestra.engine.p2p.mailbox import Mailbox
from verification.execution import Execution, Start
from verification.memory import Known, SharedMemory
from verification.operations import ALLOCATED, process_of
from verification.program import Library
from verification.violations import WrongResult
from verification.world import Rules, World

_FIRST_PAGE = 4096
"""No process has memory below: a word that was never written, taken for an address, leads there."""

HEAP_BYTES = 1 << 16
WORD = 8


@dataclass(frozen=True)
class Sizes:
    """The sizes in bytes into which operations are cut; small, so that there are several chunks."""

    direct: int = 64
    chunk: int = 1040
    share: int = 48
    peer_chunk: int = 48
    eager: int = 64
    single_copy: int = 1 << 40
    stream_above: int = 1 << 40
    unable: tuple[int, ...] = ()  # the ranks that cannot read the memory of others


class Ranks:
    """Some ranks of a group in an arena, in this process; nothing runs.

    Args:
        size: how many ranks.
        sizes: into which operations are cut.
    """

    def __init__(self, size: int, sizes: Sizes = Sizes()) -> None:
        self.size = size
        self.layout = at.Layout(size, 4096, 4096, channel_area_bytes(size), HEAP_BYTES)
        self.arena, _ = Arena.create(self.layout, "model")
        self.contexts = [RankContext(self.arena, rank, "model", SpinPolicy(0, 0)) for rank in range(size)]
        self._private: list[list[range]] = [[range(ALLOCATED, ALLOCATED + (1 << 30))] for _ in range(size)]
        self._kept: list[object] = []
        self._words: np.ndarray | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        for rank, context in enumerate(self.contexts):
            for offset, value in (
                (at.SPINS, 0), (at.YIELDS, 0), (at.STREAM_ABOVE, sizes.stream_above),
                (at.DIRECT, sizes.direct), (at.CHUNK, sizes.chunk), (at.SHARE, sizes.share),
                (at.PEER_CHUNK, sizes.peer_chunk),
                (at.EAGER_BYTES, sizes.eager), (at.SINGLE_COPY, sizes.single_copy),
                (at.READER, at.CANNOT if rank in sizes.unable else at.BY_SYSTEM_CALL),
            ):  # fmt: skip
                context.store_word(offset, value)
            publish_token(self.arena, rank, context._words)
            self.arena.store_word(self.arena.control(rank) + at.PROCESS, process_of(rank))
            find_heaps(self.arena, context._words)
            self.own(rank, context._words)
            self.own(rank, context._tables)
            self.own(rank, context.sleep_times.times)
            self.own(rank, context._masks)

    def own(self, rank: int, words: np.ndarray) -> int:
        """Make an array private to one rank; return its address."""
        self._kept.append(words)
        start = words.ctypes.data
        self._private[rank].append(range(start, start + words.nbytes))
        return start

    def tensor(self, rank: int, words: int) -> int:
        """Return the address of memory of one rank."""
        return self.own(rank, np.zeros(words, dtype=np.int64))

    def lent_tensor(self, rank: int, words: int) -> int:
        """Return the address of memory of one rank, which others may read if it lends it."""
        self._kept.append(made := np.zeros(words, dtype=np.int64))
        return int(made.ctypes.data)

    def heap_tensor(self, rank: int, offset: int = 0) -> int:
        """Return the address of memory in a rank's heap, which peers may use."""
        return int(self.arena.heaps.ctypes.data) + rank * HEAP_BYTES + offset

    def plan(self, rank: int, meta: int = 1, unit: int = WORD, function: int = 1, root: int = -1) -> int:
        """Return the address of a plan (local.py)."""
        plan = LocalPlan(self.contexts[rank].address, meta, unit, function, root)
        self._kept.append(plan)
        return self.own(rank, plan._words)

    def begin_after(self, sequence: int) -> None:
        """Have all ranks begin as after so many operations."""
        for rank, context in enumerate(self.contexts):
            context.store_word(at.SEQUENCE, sequence)
            context.store_word(at.SEEN, sequence)
            flags = self.arena.control(rank) + at.FLAG_LINES
            for number in range(sequence - at.FLAGS + 1, sequence + 1):
                line = flags + (number & (at.FLAGS - 1)) * at.LINE
                self.arena.store_word(line + at.FLAG, (number << at.STEP_BITS) + 2)

    def mailbox_after(self, rank: int, number: int, ring: int = 256) -> int:
        """Return :meth:`mailbox` as after so many messages each way, and after many wake-ups."""
        address = self.mailbox(rank, ring)
        words = self._kept[-1]
        assert isinstance(words, np.ndarray)
        for peer in range(self.size):
            known = (p2p.PEERS_AT + peer * p2p.PEER_BYTES) // WORD
            words[known + p2p.SENT // WORD] = words[known + p2p.GOT // WORD] = number
            channel = self.layout.channels + p2p.doorbells_bytes(self.size)
            channel += (rank * self.size + peer) * p2p.channel_bytes(self.size)
            self._set(channel + p2p.TAKEN, number)
            for slot in range(p2p.SLOTS):
                stamp = channel + p2p.SLOTS_AT + slot * p2p.SLOT_BYTES + p2p.STAMP
                self._set(stamp, slot + 1 if slot < number else 0)
        self._set(self.layout.channels + rank * p2p.DOORBELL_BYTES + p2p.RUNG, (1 << 32) - 1)
        return address

    def _set(self, offset: int, value: int) -> None:
        """Write a word of the arena."""
        ctypes.c_int64.from_address(self.arena.address + offset).value = value

    def mailbox(self, rank: int, ring: int = 256, piece: int = 256) -> int:
        """Return the address of the state of a rank's mailbox, with a short ring."""
        base = self.arena.address + self.layout.channels
        mailbox = Mailbox(self.contexts[rank].address, base, rank, self.size, peers_are_threads=True)
        self._kept.append(mailbox)
        for offset, value in ((p2p.RING_BYTES, ring), (p2p.PIECE_BYTES, piece)):
            mailbox._words[offset // WORD] = value
        return self.own(rank, mailbox._words)

    def shared_mailbox(self, rank: int) -> int:
        """Return :meth:`mailbox` for several threads of a rank; the same at each call."""
        if rank not in self._mailboxes:
            base = self.arena.address + self.layout.channels
            made = Mailbox(self.contexts[rank].address, base, rank, self.size, peers_are_threads=True)
            self._mailboxes[rank] = made
        return int(self._mailboxes[rank]._words.ctypes.data)

    def endpoint(self, rank: int, threads: int, ring: int = 256) -> int:
        """Return the address of the state of a rank's endpoint, with a short ring; the same at each call.

        Args:
            threads: how many use it; if several, it is no rank's own.
        """
        if rank not in self._endpoints:
            base = self.arena.address + self.layout.channels
            made = Endpoint(self.contexts[rank].address, base, rank, self.size, lambda _: False)
            for offset, value in ((p2p.RING_BYTES, ring), (p2p.PIECE_BYTES, ring)):
                made._words[offset // WORD] = value
            self._endpoints[rank] = made
            if threads == 1:
                for words in (made._words, made._grace, made._text):
                    self.own(rank, words)
        return int(self._endpoints[rank]._words.ctypes.data)

    def shared_words(self, number: int, *first: int) -> int:
        """Return the address of words that all ranks use; the same at each call. ``first``: their values."""
        if self._words is None:
            self._words = np.zeros(number, dtype=np.int64)
            self._words[: len(first)] = first
        return int(self._words.ctypes.data)

    def record(self, rank: int) -> int:
        """Return the address of a rank's flight record."""
        return int(self.contexts[rank].load_word(at.RECORD))

    def is_private(self, rank: int) -> Callable[[int], bool]:
        """Return a function that tells which addresses only that rank uses."""
        ranges = self._private[rank]
        known: dict[int, bool] = {}

        def test(address: int) -> bool:
            found = known.get(address)
            if found is None:
                found = known[address] = any(address in each for each in ranges)
            return found

        return test

    def world(
        self, library: Library, driver: KernelSource, arguments: Callable[[int], Sequence[int]], rules: Rules
    ) -> Callable[[Known], World]:
        """Return the function that makes the first state, in which each rank calls a driver."""
        program = library.program(driver)
        starts = [Start(program, arguments(rank), self.is_private(rank)) for rank in range(self.size)]
        values: dict[int, int] = {}
        relaxed = frozenset(
            self.arena.address + self.arena.control(rank) + at.WAITERS for rank in range(self.size)
        )

        def initial(address: int) -> int:
            found = values.get(address)
            if found is None:
                if address < _FIRST_PAGE:
                    raise WrongResult(f"a rank reads at address {address}, of which nobody has told it")
                made = address < ALLOCATED
                found = values[address] = ctypes.c_int64.from_address(address).value if made else 0
            return found

        abort = self.arena.address + at.HEADER_ABORT
        first = self.arena.address + self.layout.records
        loose = range(first, first + self.size * self.layout.record_bytes)

        executions: dict[tuple[int, ...], Execution] = {}  # by the words that are known to be written

        def make(known: Known) -> World:
            written = tuple(known.written)
            if written not in executions:
                executions.clear()
                executions[written] = Execution(starts, initial, frozenset(written))
            memory = SharedMemory(self.size, initial, known, relaxed, loose)
            return World(executions[written], memory, rules, abort)

        return make
