"""Admission: what joiners and members of a job tell each other, in the job's store.

A *joiner* is a process or thread that asks to be let in. It writes a *request*, and proves by its
*heartbeats* that it lives. The members decide among themselves (agreement.py): a proposal that lets somebody
in is an *offer*, named by its key. Then all whom it names enter that group, and the members commit it, or
void it and begin anew without those who are gone. The keys::

    waiting        the requests, a line each; changed by compare_set, so it has those that wait and no others
    heartbeat/R    grows while the joiner with request R lives
    invited/R      "GENERATION EPOCH KEY": an epoch of that generation has proposed the offer KEY, which names
                   R; "refused WHY". Only grows
    offer/KEY      the offer, as JSON; written once, before it is proposed
    verdict/KEY    "committed" or "void"; written once
    offers         "GENERATION KEY", a line for each offer whose keys are still there
    left/GROUP     how many members of a group have destroyed it, and joined no other
    ended          all members of a group have: nobody is let in any more
    next/KEY/...   where those whom it names meet, and then the keys of their group

No split brain: a joiner belongs to a group only when its offer's verdict is "committed".

1. A member writes a verdict only after it has read it in the registers of the old group: "committed" if these
   say that the epoch with this key is, "void" if they are in a later epoch or have committed another key.
   Both are final there, so two members never write different ones, whatever they believe of each other.
2. The registers commit at most one epoch, so of all offers of a generation at most one gets "committed".
3. Whoever goes on in the old group's name does so by a commit of the same registers: a group of members alone
   and a group with joiners cannot both come out of it.

A joiner follows the invitation of the highest generation and epoch that is not void. An invitation is written
by the proposer after its proposal was taken, so it names an epoch that has been proposed; if the proposer
dies before that, its death voids the epoch. A request is used up when its joiner has read "committed".

The keys of offers are removed once an offer of a later generation is committed: all members that live have
then left the earlier ones. A joiner that still follows one (it was stopped) finds no verdict there, which is
never taken for "committed", and gives it up in time. A joiner removes the keys of its request itself, and
members that have let it in leave its request aside until then.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torchestra.engine import layout as at
from torchestra.errors import DistBackendError
from torchestra.store import PrefixStore, Store
from torchestra.store.process import ProcessIdentity
from torchestra.store.secret import SECRET_ADVICE

_OFFER = 0x80
"""Set in the first byte of an offer's key, and in no other key that a rank proposes."""

_UNREADABLE = (ValueError, TypeError, LookupError, RecursionError)
COMMITTED, VOID = b"committed", b"void"
_REFUSED = "refused"


def is_offer(key: bytes) -> bool:
    """Return whether the key of a proposal names an offer, in the admission store."""
    return bool(key) and bool(key[0] & _OFFER)


def offer_key() -> bytes:
    """Return a new key for an offer."""
    key = secrets.token_bytes(at.PROPOSAL_KEY_BYTES)
    return bytes([key[0] | _OFFER]) + key[1:]


class JoinRequest(NamedTuple):
    """A request to be let in.

    Attributes:
        number: names it; random.
        member: the member id that the joiner asks for, or None.
        kind: the backend of its rank: ``"native"`` or ``"threads"``.
        host: the same for processes that surely share a host; empty where that must be tried.
        process: the joiner's.
    """

    number: str
    member: int | None
    kind: str
    host: str
    process: ProcessIdentity

    @classmethod
    def new(cls, member: int | None, kind: str, host: str = "") -> JoinRequest:
        """Return a request for the calling process."""
        return cls(secrets.token_hex(8), member, kind, host, ProcessIdentity.current())

    def encode(self) -> str:
        """Return a line, for :meth:`decode`."""
        member = "-" if self.member is None else self.member
        return f"{self.number} {member} {self.kind} {self.host or '-'} {self.process.encode()}\n"

    @classmethod
    def decode(cls, line: str) -> JoinRequest:
        """Read a line; ValueError if it is no request."""
        number, member, kind, host, process = line.split(" ", 4)
        wanted = None if member == "-" else int(member)
        return cls(number, wanted, kind, "" if host == "-" else host, ProcessIdentity.decode(process))

    def __str__(self) -> str:
        asks = "" if self.member is None else f", which asks to be member {self.member}"
        return f"{self.process}{asks}"


@dataclass(frozen=True)
class Terms:
    """The terms of the group that members make, the same on all of them.

    Attributes:
        name, generation, description, timeout_s: the new group's.
        kind: the ranks' backend.
        bridge: the kind of bridge between hosts, or None for the choice of start().
        members: by rank of the old group, its member id.
    """

    name: str
    generation: int
    description: str
    timeout_s: float
    kind: str
    bridge: str | None
    members: tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    """A group that an epoch proposes, with joiners.

    Attributes:
        key: names it.
        terms: of the group; ``members`` are those of the old one.
        members: by new rank, its member id; in ascending order.
        previous: by new rank, the rank in the old group; -1 for a joiner.
        lost: the ranks of the old group that are not in it.
        joiners: by request, the new rank.
        processes: by request, the joiner's process.
        one_host: all ranks surely share one host, so they need not find out.
    """

    key: bytes
    terms: Terms
    members: tuple[int, ...]
    previous: tuple[int, ...]
    lost: tuple[int, ...]
    joiners: dict[str, int] = field(default_factory=dict)
    processes: dict[str, ProcessIdentity] = field(default_factory=dict)
    one_host: bool = False

    @classmethod
    def of(
        cls, terms: Terms, survivors: Sequence[int], requests: Sequence[JoinRequest], host: str = ""
    ) -> Offer:
        """Number the survivors (ranks of the old group) and the joiners.

        Survivors keep their ids. A joiner gets the id that it asks for, or, if that is taken, the lowest free
        one; those that ask for one choose first.

        Args:
            host: of all survivors, as of a request; empty if they have several, or that must be tried.
        """
        ids: dict[int, int | str] = {terms.members[rank]: rank for rank in survivors}
        for request in sorted(requests, key=lambda each: each.member is None):
            wanted = request.member
            if wanted is None or wanted in ids:
                wanted = next(free for free in range(len(ids) + 1) if free not in ids)
            ids[wanted] = request.number
        holders = [ids[member] for member in sorted(ids)]
        return cls(
            offer_key(),
            terms,
            tuple(sorted(ids)),
            tuple(-1 if isinstance(holder, str) else holder for holder in holders),
            tuple(rank for rank in range(len(terms.members)) if rank not in survivors),
            {holder: rank for rank, holder in enumerate(holders) if isinstance(holder, str)},
            {request.number: request.process for request in requests},
            bool(host) and all(request.host == host and request.process.is_alive() for request in requests),
        )

    @property
    def size(self) -> int:
        """Return how many ranks the group has."""
        return len(self.members)

    def encode(self) -> str:
        """Return JSON, for :meth:`decode`."""
        processes = {number: process.encode() for number, process in self.processes.items()}
        return json.dumps({**asdict(self), "key": self.key.hex(), "processes": processes})

    @classmethod
    def decode(cls, text: bytes) -> Offer:
        """Read JSON; ValueError and the like if it is no offer."""
        read: dict[str, Any] = json.loads(text)
        terms = {**read["terms"], "members": tuple(read["terms"]["members"])}
        lists = {name: tuple(read[name]) for name in ("members", "previous", "lost")}
        joiners = dict(read["joiners"])
        processes = {number: ProcessIdentity.decode(str(read["processes"][number])) for number in joiners}
        one_host = read["one_host"] is True
        offer = cls(
            bytes.fromhex(read["key"]),
            Terms(**terms),
            **lists,
            joiners=joiners,
            processes=processes,
            one_host=one_host,
        )
        numbers = (*offer.members, *offer.previous, *offer.lost, *offer.terms.members)
        ranks = [rank for rank, before in enumerate(offer.previous) if before == -1]
        if not all(type(each) is int for each in (*numbers, offer.terms.generation)):
            raise ValueError(f"it has something else than numbers: {text!r:.100}")
        if len(offer.previous) != offer.size or sorted(offer.joiners.values()) != ranks:
            raise ValueError(f"its ranks do not add up: {text!r:.100}")
        return offer


class Invitation(NamedTuple):
    """An epoch of a generation, and the offer that it has proposed."""

    generation: int
    epoch: int
    key: bytes


class Admission:
    """Read and write those keys.

    Args:
        store: the part of the job's store that is for them.
        bound_s: the heartbeat bound, for which a store that is out of reach is waited for.

    Attributes:
        bound_s: the same.
    """

    def __init__(self, store: Store, bound_s: float) -> None:
        self._meetings, self._store = store, store.clone()
        self._store.set_timeout(bound_s)
        self.bound_s = bound_s

    # -- joiners

    def ask(self, request: JoinRequest) -> None:
        """Ask to be let in; the joiner does."""
        self.send_heartbeat(request)
        self._change_waiting(add=[request])

    def send_heartbeat(self, request: JoinRequest) -> None:
        """Show that the joiner lives."""
        self._store.add(f"heartbeat/{request.number}", 1)

    def invitation(self, request: JoinRequest, timeout_s: float = 0.0) -> Invitation | None:
        """Return the newest invitation of a joiner; None if it has none after a time.

        Raises:
            DistBackendError: the members have refused it; says why.
        """
        key = f"invited/{request.number}"
        if timeout_s:
            try:
                self._store.wait([key], timeout_s)
            except TimeoutError:
                return None
        newest: Invitation | None = None
        for line in self._read(key).decode(errors="replace").splitlines():
            if line.startswith(_REFUSED):
                raise DistBackendError(
                    f"the members of the job have refused this rank: {line[len(_REFUSED) + 1 :]}"
                )
            try:
                generation, epoch, name = line.split(" ")
                found = Invitation(int(generation), int(epoch), bytes.fromhex(name))
            except ValueError as error:
                raise _forged(f"the invitation {line!r:.100}") from error
            newest = found if newest is None else max(newest, found)
        return newest

    def forget(self, request: JoinRequest) -> None:
        """Remove the keys of a request; its joiner does, at the end."""
        self.remove([request.number])
        self._delete(f"heartbeat/{request.number}")
        self._delete(f"invited/{request.number}")

    def has_ended(self) -> bool:
        """Return whether all members have left the job."""
        return self._store.check(["ended"])

    # -- members

    def leave(self, group: str, size: int) -> None:
        """Say that a member of a group of that size has left the job."""
        if self._store.add(f"left/{group}", 1) >= size:
            self._store.set("ended", b"1")

    def waiting(self) -> list[JoinRequest]:
        """Return the requests of those that wait."""
        try:
            return [JoinRequest.decode(line) for line in self._read("waiting").decode().splitlines()]
        except ValueError as error:
            raise _forged("the list of those that wait to be let in") from error

    def heartbeats(self, requests: Sequence[JoinRequest]) -> list[bytes]:
        """Return the counts of heartbeats of some joiners; nothing for one that has removed its keys."""
        counts = []
        for request in requests:  # not by multi_get(), which waits for keys that are not there
            counts.append(self._read(f"heartbeat/{request.number}"))
            if not counts[-1]:
                self._delete(f"heartbeat/{request.number}")
        return counts

    def remove(self, numbers: Collection[str]) -> None:
        """Take requests off the list."""
        if numbers:
            self._change_waiting(remove=numbers)

    def refuse(self, numbers: Iterable[str], why: str) -> None:
        """Tell joiners that they are not let in, and why."""
        refused = list(numbers)
        for number in refused:
            self._store.append(f"invited/{number}", f"{_REFUSED} {' '.join(why.split())}\n")
        self.remove(refused)

    def write(self, offer: Offer) -> None:
        """Write an offer, before it is proposed."""
        self._store.append("offers", f"{offer.terms.generation} {offer.key.hex()}\n")
        self._store.set(f"offer/{offer.key.hex()}", offer.encode())

    def remove_offers(self, generation: int) -> None:
        """Remove the keys of offers of generations before one that has been committed."""
        try:
            lines = self._read("offers").decode().splitlines(keepends=True)
            old = [line for line in lines if int(line.split(" ")[0]) < generation]
            keys = [bytes.fromhex(line.split()[1]).hex() for line in old]
        except _UNREADABLE as error:
            raise _forged("the list of offers") from error
        # A proposer may be writing here meanwhile; the next one removes them, then.
        left = "".join(line for line in lines if line not in old)
        if not old or self._store.compare_set("offers", "".join(lines), left).decode() != left:
            return
        for key in keys:
            self._delete(f"offer/{key}")
            self._delete(f"verdict/{key}")

    def _delete(self, key: str) -> None:
        with contextlib.suppress(NotImplementedError):  # some stores of torch keep what they have
            self._store.delete_key(key)

    def offer(self, key: bytes) -> Offer:
        """Return the offer that a proposal or an invitation names."""
        try:
            return Offer.decode(self._read(f"offer/{key.hex()}"))
        except _UNREADABLE as error:
            raise _forged("the offer of a group") from error

    def invite(self, offer: Offer, epoch: int) -> None:
        """Tell the joiners of an offer that it has been proposed."""
        for number in offer.joiners:
            self._store.append(f"invited/{number}", f"{offer.terms.generation} {epoch} {offer.key.hex()}\n")

    # -- both

    def verdict(self, key: bytes, timeout_s: float = 0.0) -> bytes:
        """Return what has become of an offer: COMMITTED, VOID, or nothing, if it is so after a time."""
        name = f"verdict/{key.hex()}"
        try:
            if timeout_s:
                return self._store.await_values([name], timeout_s)[0]
            return self._store.get(name) if self._store.check([name]) else b""  # _read() would make the key
        except TimeoutError:
            return b""

    def write_verdict(self, key: bytes, verdict: bytes) -> None:
        """Write what has become of an offer, as the registers say; see invariant 1."""
        self._store.compare_set(f"verdict/{key.hex()}", "", verdict)

    def meeting(self, key: bytes) -> Store:
        """Return the store of the group of an offer."""
        return PrefixStore(f"next/{key.hex()}", self._meetings)

    def _read(self, key: str) -> bytes:
        return self._store.compare_set(key, "", "")

    def _change_waiting(self, add: Sequence[JoinRequest] = (), remove: Collection[str] = ()) -> None:
        before = _lines(self._read("waiting"))
        while True:
            kept = [line for line in before.splitlines(keepends=True) if line.split(" ", 1)[0] not in remove]
            after = "".join([*kept, *(request.encode() for request in add)])
            found = _lines(self._store.compare_set("waiting", before, after))
            if found == after:
                return
            before = found


def _lines(waiting: bytes) -> str:
    try:
        return waiting.decode()
    except ValueError as error:
        raise _forged("the list of those that wait to be let in") from error


def _forged(what: str) -> DistBackendError:
    return DistBackendError(
        f"{what} in the job's store was not written by a rank of the job; {SECRET_ADVICE}"
    )
