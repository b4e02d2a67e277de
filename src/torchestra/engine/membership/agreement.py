"""Who goes on when ranks of a group have failed: the word by which the survivors decide it.

The survivors of a group still share its arena, whatever has died, the store's server included; so the arena
is where they agree. It has one word for this, the *decision*, which holds a round's number, a state and a
proposer, and changes only by compare-and-exchange::

    OPEN(n)  ──propose──▶  PROPOSED(n, p)  ──commit──▶  COMMITTED(n, p)
                                 │
                                 └──void──▶  OPEN(n + 1)

*Propose*: rank p writes into its own block who shall go on (the *survivors*) and the key under which it hands
the new arena out, and then tries to exchange OPEN(n). It proposes every rank that has come to shrink(), and
does so only when each other rank is dead, has left, or was excluded. *Commit*: by any survivor that has seen
all of them ready, which is said in words of their own: they have entered the new arena. *Void*: by any
rank that has found a survivor dead, gone or excluded, and by a survivor that gives up (its deadline, Ctrl-C).
shrinking.py says when a rank takes which step; what follows holds whenever it does.

Invariants.

1. A proposal is written by its proposer only, before its round is proposed. Two lie side by side, by the
   round's parity. So who has read PROPOSED(n, p) or COMMITTED(n, p), then the proposal, and then finds
   the word unchanged, has read the proposal of round n: p writes over it only for round n + 2, which it
   begins only after having seen OPEN(n + 2).
2. COMMITTED is final: no step leaves it.
3. A rank says that it is ready for round n only after it has entered the arena that round n proposes.

Agreement (no split brain). The word can become COMMITTED once (2), and everybody reads the same survivors,
by the same key, from then on (1). A rank takes a new group from shrink() only if the word is COMMITTED and
the proposal names it, so all who get a group get that one; a rank that the proposal does not name gets an
error, and so does one that gave up, whose void came before any commit or else failed and showed it the
commit. None of this depends on the ranks' knowledge of who lives: a wrong belief could only void a round.

Validity. Who is committed has come, was ready, and nobody that came with it had excluded it: an excluder
writes the exclusion before it says that it comes, and a proposer reads who comes before who is excluded.

Termination. Deaths on one host are known for certain (liveness.py), to every rank that looks. Let the last of
them have happened, and let each live rank come, be excluded, or leave. From then on the lowest rank that has
come finds nobody missing and proposes; a round that names a dead rank is voided by whoever looks; and the
round after it has only survivors that get ready, because the proposer hands the arena out while it waits. A
rank that lives and never comes is waited for until the deadline, and named then.

A process that dies between any two steps leaves the word in a state from which the others go on: nothing is
ever locked.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.errors import RankExcludedError

__all__ = ["MembershipAgreement", "Round", "State"]

_STATE_BITS = 2
_PROPOSER_BITS = 24


class State(IntEnum):
    """How far a round has come."""

    OPEN = 0
    PROPOSED = 1
    COMMITTED = 2


class Round(NamedTuple):
    """What the decision was at one moment.

    Attributes:
        word: as it stood in the arena.
        number: from 1.
        state: how far it has come.
        survivors: who shall go on, or does; empty while it is open.
        key: 32 secret bytes by which the survivors know each other; empty while it is open.
    """

    word: int
    number: int
    state: State
    proposer: int
    survivors: tuple[int, ...] = ()
    key: bytes = b""

    def __repr__(self) -> str:
        return f"Round({self.number}, {self.state.name}, {self.proposer}, {self.survivors})"  # not the key


class MembershipAgreement:
    """Rank ``rank``'s view of what comes after the group that meets in ``arena``."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self.size = arena.layout.size
        self.rank = rank
        self._arena = arena
        self._decision = arena.address + arena.layout.agreement

    def now(self) -> Round:
        """The decision as it stands, with its proposal."""
        while True:
            word = shared_words.load_acquire(self._decision)
            state = State(word & ((1 << _STATE_BITS) - 1))
            proposer = (word >> _STATE_BITS) & ((1 << _PROPOSER_BITS) - 1)
            number = (word >> (_STATE_BITS + _PROPOSER_BITS)) + 1
            if state is State.OPEN:
                return Round(word, number, state, proposer)
            survivors, key = self._proposal(proposer, number)
            # An exchange, because what was read of the proposal must have been read before.
            if shared_words.compare_exchange(self._decision, word, word) == word:
                return Round(word, number, state, proposer, survivors, key)

    def exclusion(self, group: str) -> RankExcludedError | None:
        """The error that says so, if the others go on, or will, without this rank."""
        now = self.now()
        excluder = shared_words.load_acquire(self._word(self.rank, at.EXCLUDED)) - 1
        remedy = "this rank has no part in what the others do; end it, or start it anew"
        by = f", because rank {excluder} has excluded it" if excluder >= 0 else ""
        if now.state is State.COMMITTED and self.rank not in now.survivors:
            others = ", ".join(map(str, now.survivors))
            return RankExcludedError(
                f"rank {self.rank}: group {group!r} was shrunk to ranks {others} without rank"
                f" {self.rank}{by}; {remedy}",
                now.survivors,
            )
        if excluder >= 0 and now.state is not State.COMMITTED:
            return RankExcludedError(
                f"rank {self.rank}: rank {excluder} has excluded rank {self.rank} from group {group!r};"
                f" {remedy}"
            )
        return None

    # -- this rank's own words

    def come(self) -> None:
        """Say that this rank wants to go on."""
        shared_words.store_ordered(self._word(self.rank, at.COMES), 1)

    def stop_coming(self) -> None:
        """Take that back."""
        shared_words.store_ordered(self._word(self.rank, at.COMES), 0)

    def get_ready(self, now: Round) -> None:
        """Say that this rank has entered the arena that a round proposes."""
        shared_words.store_ordered(self._word(self.rank, at.READY), now.number)

    def exclude(self, ranks: Iterable[int]) -> None:
        """Have the group go on without these ranks, whether they live or not. To be called before coming."""
        for rank in ranks:
            shared_words.compare_exchange(self._word(rank, at.EXCLUDED), 0, self.rank + 1)

    # -- the others' words

    def coming(self) -> set[int]:
        """The ranks that want to go on."""
        return {rank for rank in range(self.size) if shared_words.load_acquire(self._word(rank, at.COMES))}

    def excluded(self) -> dict[int, int]:
        """The ranks that shall not go on, and who has said so."""
        said = {rank: shared_words.load_acquire(self._word(rank, at.EXCLUDED)) for rank in range(self.size)}
        return {rank: excluder - 1 for rank, excluder in said.items() if excluder}

    def unready(self, now: Round) -> set[int]:
        """The survivors of a proposed round that have not entered its arena yet."""
        return {
            rank
            for rank in now.survivors
            if shared_words.load_acquire(self._word(rank, at.READY)) != now.number
        }

    # -- the three steps; each returns whether it was taken

    def propose(self, now: Round, survivors: Iterable[int], key: bytes) -> bool:
        """Make an open round a proposed one."""
        assert now.state is State.OPEN
        assert len(key) == at.PROPOSAL_KEY_BYTES
        start = self._proposal_at(self.rank, now.number)
        bits = np.zeros((self._arena.layout.proposal_bytes - at.PROPOSAL_RANKS) * 8, dtype=np.uint8)
        bits[list(survivors)] = 1
        text = key + np.packbits(bits).tobytes()
        self._arena.bytes[start : start + len(text)] = np.frombuffer(text, dtype=np.uint8)
        return self._exchange(now, State.PROPOSED, now.number, self.rank)

    def commit(self, now: Round) -> bool:
        """Make a proposed round, whose survivors are all ready, final."""
        return self._exchange(now, State.COMMITTED, now.number, now.proposer)

    def void(self, now: Round) -> bool:
        """Give a proposed round up, and open the next."""
        return self._exchange(now, State.OPEN, now.number + 1, 0)

    def _exchange(self, now: Round, state: State, number: int, proposer: int) -> bool:
        wanted = (((number - 1) << _PROPOSER_BITS) + proposer << _STATE_BITS) + state
        found: int = shared_words.compare_exchange(self._decision, now.word, wanted)
        return found == now.word

    def _block(self, rank: int) -> int:
        layout = self._arena.layout
        return layout.agreement + at.LINE + rank * layout.agreement_bytes

    def _word(self, rank: int, offset: int) -> int:
        return self._arena.address + self._block(rank) + offset

    def _proposal_at(self, rank: int, number: int) -> int:
        return self._block(rank) + at.PROPOSALS + (number & 1) * self._arena.layout.proposal_bytes

    def _proposal(self, proposer: int, number: int) -> tuple[tuple[int, ...], bytes]:
        start = self._proposal_at(proposer, number)
        raw = self._arena.bytes[start : start + self._arena.layout.proposal_bytes].copy()
        bits = np.unpackbits(raw[at.PROPOSAL_RANKS :])[: self.size]
        return tuple(np.flatnonzero(bits).tolist()), raw[: at.PROPOSAL_KEY_BYTES].tobytes()
