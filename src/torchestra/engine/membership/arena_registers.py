"""The registers of a membership agreement, for ranks that share an arena.

The arena survives the death of any process, the store's server included. One of its words, the *decision*,
holds the epoch, the state and the proposer, and changes by compare-and-exchange alone. Before it proposes, a
rank writes the survivors, and the key under which it hands the new arena out, into its own block.

Why the ballot's invariants hold (agreement.py). A proposal is written by its proposer only, before its epoch
is proposed. Two lie side by side, by the epoch's parity. So a rank that has read PROPOSED(n) or COMMITTED(n)
with proposer p, then the proposal, and then finds the word unchanged, has read the proposal of epoch n: p
writes over it only for epoch n + 2, which it begins only after having seen OPEN(n + 2).

Whoever takes a step wakes those that sleep on the decision. Should a rank die between the two, they look all
the same when they have slept for as long as they meant to.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.membership.agreement import Ballot, Registers, State, exclusion_error
from torchestra.engine.memory.arena import Arena
from torchestra.errors import RankExcludedError

_STATE_BITS = 2
_PROPOSER_BITS = 24


class ArenaRegisters(Registers):
    """Rank ``rank``'s view of the registers in ``arena``."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self.size = arena.layout.size
        self.rank = rank
        layout = arena.layout
        self._arena = arena
        self._decision = arena.address + layout.agreement
        self._blocks, self._stride = layout.agreement + at.LINE, layout.agreement_bytes
        self._proposal_bytes = layout.proposal_bytes
        self._read: Ballot | None = None
        self._seen = 0
        self._limit = array("q", [0, 0])  # a struct timespec

    def ballot(self) -> Ballot:
        while True:
            word = self._seen = shared_words.load_acquire(self._decision)
            state = State(word & ((1 << _STATE_BITS) - 1))
            proposer = (word >> _STATE_BITS) & ((1 << _PROPOSER_BITS) - 1)
            epoch = (word >> (_STATE_BITS + _PROPOSER_BITS)) + 1
            if state is State.OPEN:
                return Ballot(word, epoch, state, proposer)
            if (read := self._read) is not None and read.word == word:
                return read  # the proposal of an epoch does not change
            survivors, key = self._proposal(proposer, epoch)
            # An exchange, because the reads of the proposal must have happened before.
            if shared_words.compare_exchange(self._decision, word, word) == word:
                self._read = Ballot(word, epoch, state, proposer, survivors, key)
                return self._read

    def exclusion(self, group: str) -> RankExcludedError | None:
        """Return the error to raise if the others go on, or will, without this rank."""
        ballot = self.ballot()
        excluder = shared_words.load_acquire(self._word(self.rank, at.EXCLUDED)) - 1
        return exclusion_error(ballot, self.rank, f"rank {excluder}" if excluder >= 0 else None, group)

    def announce(self, grows: bool = False) -> None:
        shared_words.store_ordered(self._word(self.rank, at.CANDIDATE), at.GROWS if grows else at.SHRINKS)

    def withdraw(self) -> None:
        shared_words.store_ordered(self._word(self.rank, at.CANDIDATE), 0)

    def acknowledge(self, ballot: Ballot) -> None:
        shared_words.store_ordered(self._word(self.rank, at.READY), ballot.epoch)

    def exclude(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            shared_words.compare_exchange(self._word(rank, at.EXCLUDED), 0, self.rank + 1)

    def candidates(self) -> set[int]:
        return {rank for rank, word in enumerate(self._words(at.CANDIDATE)) if word}

    def growing(self) -> set[int]:
        return {rank for rank, word in enumerate(self._words(at.CANDIDATE)) if word == at.GROWS}

    def excluded(self) -> dict[int, int]:
        return {rank: word - 1 for rank, word in enumerate(self._words(at.EXCLUDED)) if word}

    def unacknowledged(self, ballot: Ballot) -> set[int]:
        ready = self._words(at.READY)
        return {rank for rank in ballot.survivors if ready[rank] != ballot.epoch}

    def propose(self, ballot: Ballot, survivors: Iterable[int], key: bytes) -> bool:
        assert ballot.state is State.OPEN
        assert len(key) == at.PROPOSAL_KEY_BYTES
        start = self._proposal_at(self.rank, ballot.epoch)
        bits = np.zeros((self._proposal_bytes - at.PROPOSAL_RANKS) * 8, dtype=np.uint8)
        bits[list(survivors)] = 1
        text = key + np.packbits(bits).tobytes()
        self._arena.bytes[start : start + len(text)] = np.frombuffer(text, dtype=np.uint8)
        return self._exchange(ballot, State.PROPOSED, ballot.epoch, self.rank)

    def commit(self, ballot: Ballot) -> bool:
        return self._exchange(ballot, State.COMMITTED, ballot.epoch, ballot.proposer)

    def void(self, ballot: Ballot, gone: Iterable[int] = ()) -> bool:
        return self._exchange(ballot, State.OPEN, ballot.epoch + 1, 0)

    def accused(self) -> set[int]:
        return set()  # every rank sees by itself who is gone

    def sleep(self, seconds: float) -> None:
        """Sleep until a step is taken from the ballot that was read last, or for so long."""
        self._limit[0], self._limit[1] = divmod(int(seconds * 1e9), 1_000_000_000)
        shared_words.sleep_while_for(self._decision, self._seen, self._limit.buffer_info()[0])

    def _exchange(self, ballot: Ballot, state: State, epoch: int, proposer: int) -> bool:
        desired = (((epoch - 1) << _PROPOSER_BITS) + proposer << _STATE_BITS) + state
        previous: int = shared_words.compare_exchange(self._decision, ballot.word, desired)
        if previous == ballot.word:
            shared_words.wake(self._decision)
        return previous == ballot.word

    def _block(self, rank: int) -> int:
        return self._blocks + rank * self._stride

    def _word(self, rank: int, offset: int) -> int:
        return self._arena.address + self._block(rank) + offset

    def _words(self, offset: int) -> array[int]:
        """Return a word of every rank."""
        words = array("q", bytes(8 * self.size))
        shared_words.load_each(self._word(0, offset), self._stride, self.size, words.buffer_info()[0])
        return words

    def _proposal_at(self, rank: int, epoch: int) -> int:
        return self._block(rank) + at.PROPOSALS + (epoch & 1) * self._proposal_bytes

    def _proposal(self, proposer: int, epoch: int) -> tuple[tuple[int, ...], bytes]:
        start = self._proposal_at(proposer, epoch)
        raw = self._arena.bytes[start : start + self._proposal_bytes].copy()
        bits = np.unpackbits(raw[at.PROPOSAL_RANKS :])[: self.size]
        return tuple(np.flatnonzero(bits).tolist()), raw[: at.PROPOSAL_KEY_BYTES].tobytes()
