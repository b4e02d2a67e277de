"""The registers of a membership agreement, for ranks that have only the group's store in common.

Where the store's server is gone there is no agreement, hence no shrinking: two halves of a network that
cannot reach each other must not both go on. The keys::

    came        "R": rank R has come to shrink, "+R": to let others in, "-R": it has withdrawn; this and
                the next two only grow
    gone        the ranks that have died or left, as a rank of their host says
    excluded    "R:Q": rank Q goes on without rank R
    round/N     the proposal of epoch N: the ranks that shall go on, and the key
    entered/N   those of them that have entered the new group; only grows
    verdict/N   "committed", or "void" and the survivors that were found gone

Why the ballot's invariants hold (agreement.py). ``round/N`` and ``verdict/N`` are written once, by
compare_set, by the rank that comes first; and an epoch begins only after the one before it is void.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from torchestra.engine.membership.agreement import Ballot, Registers, State, exclusion_error
from torchestra.engine.multihost.peer_values import GrowingText, ranks_in_words, read_proposal
from torchestra.errors import DistBackendError, DistError
from torchestra.store import PrefixStore, Store
from torchestra.store.secret import SECRET_ADVICE

_Proposal = tuple[tuple[int, ...], bytes]
_COMMITTED, _VOID = b"committed", b"void"


def left_behind(store: Store, rank: int, size: int, group: str, timeout_s: float) -> str:
    """Return that the other ranks of a group have gone on without this one, in words; "" if they have not.

    Args:
        store: the group's.
        timeout_s: for a store that is out of reach, which does not tell.
    """
    try:
        registers = StoreRegisters(registers_store(store, timeout_s), rank, size, group)
        error = exclusion_error(registers.ballot(), rank, None, group)
    except DistError:
        return ""
    return "" if error is None else str(error)


def registers_store(store: Store, timeout_s: float) -> Store:
    """Return the part of a group's store in which its registers are, with a connection of its own."""
    found = PrefixStore("shrinking", store).clone()
    found.set_timeout(timeout_s)
    return found


class StoreRegisters(Registers):
    """A rank's view of the registers in a store. The lists are as they were at the last :meth:`ballot`.

    Args:
        store: in which only the ranks of the group, and only to agree, write.
        group: its name, for messages.
    """

    def __init__(self, store: Store, rank: int, size: int, group: str) -> None:
        self.rank, self.size = rank, size
        self._store, self._group = store, group
        self._what = f"who goes on from group {group!r}"
        self._epoch = 0
        self._reported: set[int] = set()
        self._coming: dict[int, bytes] = {}
        self._gone: set[int] = set()
        self._excluded: dict[int, int] = {}
        self._entered: set[int] = set()
        self._came_text = GrowingText(self._read_signed)
        self._gone_text, self._entered_text = GrowingText(self._read_ranks), GrowingText(self._read_ranks)
        self._excluded_text = GrowingText(self._read_pairs)
        self._lists: tuple[bytes, ...] = ()  # as they were read last
        self._proposal: tuple[bytes, _Proposal | None] = (b"", ((), b""))  # the last, and what it says
        self._accused: set[int] = set()

    def ballot(self) -> Ballot:
        if self._epoch == 0:
            self._begin_epoch()
        while True:
            verdict, proposal, came, gone, excluded, entered = self._store.multi_get(self._keys())
            if verdict in (b"", _COMMITTED):
                read = self._read_proposal(proposal)
                if read is not None:
                    break
                if verdict:  # no rank commits what it cannot read
                    raise self.forged_error()
                self._set_once(f"verdict/{self._epoch}", _VOID)
            else:  # void, or what no rank has written: all read the same
                words = ranks_in_words(verdict.removeprefix(_VOID), 1, self.size, self._what)
                self._accused = {rank for (rank,) in words}
                self._begin_epoch()
        survivors, key = read
        if (lists := (came, gone, excluded, entered)) != self._lists:
            self._lists = lists
            coming = dict(self._came_text.values(came))
            self._coming = {rank: sign for rank, sign in coming.items() if sign != b"-"}
            self._gone = set(self._gone_text.values(gone))
            self._excluded = dict(self._excluded_text.values(excluded))
            self._entered = set(self._entered_text.values(entered))
        state = State.COMMITTED if verdict else State.PROPOSED if survivors else State.OPEN
        if verdict and not survivors:
            raise self.forged_error()
        return Ballot(0, self._epoch, state, survivors[0] if survivors else 0, survivors, key)

    def _read_proposal(self, text: bytes) -> _Proposal | None:
        """Return what a proposal says, as read_proposal does; it is read again only if it is another one."""
        if text != self._proposal[0]:
            self._proposal = text, read_proposal(text, self.size) if text else ((), b"")
        return self._proposal[1]

    def forged_error(self) -> DistBackendError:
        """Return the error that says that a commit in the store cannot be the ranks' own."""
        return DistBackendError(
            f"rank {self.rank}: the store says that group {self._group!r} has been shrunk, but its survivors"
            " have not entered the new group: another process has written that into the store;"
            f" {SECRET_ADVICE}"
        )

    def announce(self, grows: bool = False) -> None:
        self._append("came", [f"{'+' if grows else ''}{self.rank}"])

    def withdraw(self) -> None:
        self._append("came", [f"-{self.rank}"])

    def acknowledge(self, ballot: Ballot) -> None:
        self._append(f"entered/{ballot.epoch}", [str(self.rank)])

    def exclude(self, ranks: Iterable[int]) -> None:
        self._append("excluded", (f"{rank}:{self.rank}" for rank in ranks))

    def report_gone(self, ranks: set[int]) -> None:
        """Tell the others which ranks of this host have died or left."""
        self._append("gone", map(str, ranks - self._reported))
        self._reported |= ranks

    def gone(self) -> set[int]:
        """Return the ranks that have died or left, as ranks of their hosts have said."""
        return self._gone | self._reported

    def candidates(self) -> set[int]:
        return set(self._coming)

    def growing(self) -> set[int]:
        return {rank for rank, how in self._coming.items() if how == b"+"}

    def excluded(self) -> dict[int, int]:
        return self._excluded

    def unacknowledged(self, ballot: Ballot) -> set[int]:
        return set(ballot.survivors) - self._entered

    def propose(self, ballot: Ballot, survivors: Sequence[int], key: bytes) -> bool:
        return self._set_once(f"round/{ballot.epoch}", json.dumps([survivors, key.hex()]).encode())

    def commit(self, ballot: Ballot) -> bool:
        return self._set_once(f"verdict/{ballot.epoch}", _COMMITTED)

    def void(self, ballot: Ballot, gone: Iterable[int] = ()) -> bool:
        words = (_VOID, *(str(rank).encode() for rank in sorted(gone)))
        return self._set_once(f"verdict/{ballot.epoch}", b" ".join(words))

    def accused(self) -> set[int]:
        return self._accused

    def _begin_epoch(self) -> None:
        """Go on to the next epoch, and make sure that there are the keys that are read together."""
        self._epoch += 1
        for key in self._keys():
            self._store.compare_set(key, "", "")

    def _keys(self) -> tuple[str, ...]:
        """Return the keys in an order in which they may be read one by one, as some stores do.

        A verdict is read before the proposal that it is on, and who has come before whom they exclude.
        """
        epoch = self._epoch
        return f"verdict/{epoch}", f"round/{epoch}", "came", "gone", "excluded", f"entered/{epoch}"

    def _read_ranks(self, text: bytes) -> Iterator[int]:
        return (rank for (rank,) in ranks_in_words(text, 1, self.size, self._what))

    def _read_pairs(self, text: bytes) -> Iterator[tuple[int, int]]:
        return ((rank, other) for rank, other in ranks_in_words(text, 2, self.size, self._what))

    def _read_signed(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield ranks, each with ``b"+"`` where it lets others in, ``b"-"`` where it has withdrawn."""
        for word in text.split():
            sign = word[:1] if word[:1] in (b"+", b"-") else b""
            for rank in self._read_ranks(word[len(sign) :]):
                yield rank, sign

    def _append(self, key: str, words: Iterable[str]) -> None:
        if text := "".join(f"{word} " for word in words):
            self._store.append(key, text)

    def _set_once(self, key: str, value: bytes) -> bool:
        return self._store.compare_set(key, "", value) == value
