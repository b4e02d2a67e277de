"""The membership of a group that workers join and leave: a log of events in the store that they share.

    kind        "static" or "dynamic": what the first worker that came here made of this place
    event/N     the event with number N, from 0: a worker has joined, or one is gone

An event is appended by one ``compare_set`` of the first key that has no value. So

1. **the log has no gaps and never changes**: a worker that is killed at any moment has appended its event, or
   has not, and nobody ever waits for it; there is no lock that it could hold.
2. **all workers read the same events in the same order**, and so agree on who is a member. The Nth worker
   that has joined has number N, which no other ever has: it is its *incarnation*. A replacement has the name
   and the rank of the worker in whose place it comes, and another number.
3. **at most one member has a name, and at most one has a rank**: whoever joins has read every event before
   its own (else ``compare_set`` fails, and it reads on), and appends its own only if both are free.

Each event bears a proof that whoever wrote it knows the group's secret, made for its place in the log. One
without is skipped, by all alike.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torchestra.errors import InvalidArgumentError, RpcError
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.store import PrefixStore, Store
from torchestra.store.process import ProcessIdentity
from torchestra.system.authentication import PROOF_BYTES, is_proof, proof

STATIC, DYNAMIC = "static", "dynamic"
_PURPOSE = "rpc membership event"
_KEY_LENGTH = 40  # of a CURVE key in Z85


@dataclass(frozen=True)
class WorkerJoined:
    """The event that a worker has joined.

    Attributes:
        name, rank: of the worker.
        address, key: of its port, see :class:`~torchestra.transport.endpoint.EndpointRecord`.
        process: its process, see :class:`~torchestra.store.process.ProcessIdentity`.
    """

    name: str
    rank: int
    address: str
    key: str
    process: str


@dataclass(frozen=True)
class WorkerLeft:
    """The event that the worker with a number is no member any more; ``how`` says how it ended."""

    number: int
    end_reason: str


Event = WorkerJoined | WorkerLeft
_KINDS: dict[str, type[WorkerJoined] | type[WorkerLeft]] = {"joined": WorkerJoined, "left": WorkerLeft}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def claim_group_kind(store: Store, kind: str) -> None:
    """Reserve a store for a group of workers of this kind.

    Raises:
        RpcError: it has one of the other kind.
    """
    found = PrefixStore("torchestra/rpc", store).compare_set("kind", "", kind).decode(errors="replace")
    if found != kind:
        raise RpcError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
            f" At {store} workers have met"
            + (" with world_size= and this one has none" if kind == DYNAMIC else " without world_size=")
            + ": give it to all of them, or to none"
        )


@dataclass
class Membership:
    """The members after some events.

    Attributes:
        joined: all workers that have ever joined, by number.
        left: how those ended that are gone, by number.
        position: the number of the next event.
    """

    joined: list[WorkerJoined] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    position: int = 0

    def holder(self, name: str, rank: int) -> int | None:
        """Return the number of a member that has this name or this rank, if there is one."""
        for number, each in enumerate(self.joined):
            if number not in self.left and (each.name == name or each.rank == rank):
                return number
        return None

    def apply(self, event: Event | None) -> bool:
        """Apply the next event; return whether it has changed anything."""
        self.position += 1
        if isinstance(event, WorkerJoined):
            self.joined.append(event)
            return True
        if event is None or event.number >= len(self.joined) or event.number in self.left:
            return False
        self.left[event.number] = event.end_reason
        return True


class MembershipLog:
    """The log in the store.

    Args:
        store: the place at which the workers meet.
        secret: of the group.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store = PrefixStore("torchestra/rpc", store)
        self._secret = secret

    def append(self, position: int, event: Event) -> bool:
        """Append an event if ``position`` is the end of the log; return whether it was."""
        key = _key(position)
        text = encode_event(event, self._secret, self._store.full_key(key))
        return self._store.compare_set(key, "", text) == text

    def has(self, position: int) -> bool:
        """Return whether there is an event of this number."""
        return self._store.check([_key(position)])

    def await_event(self, position: int, timeout_s: float) -> None:
        """Wait until there is an event of this number.

        Raises:
            StoreTimeoutError: none came in time.
        """
        self._store.wait([_key(position)], timeout_s)

    def read(self, position: int) -> Event | None:
        """Return the event of this number, which is there; None if it is not to be trusted."""
        key = _key(position)
        return decode_event(self._store.get(key), self._secret, self._store.full_key(key))


def _key(position: int) -> str:
    return f"event/{position}"


def encode_event(event: Event, secret: bytes, store_key: str) -> bytes:
    """Return an event with its proof, for the store. ``store_key``: its key, prefixes included."""
    content = json.dumps({"event": _NAMES[type(event)], **asdict(event)}).encode()
    return proof(secret, _PURPOSE, store_key.encode(), content) + content


def decode_event(text: bytes, secret: bytes, store_key: str) -> Event | None:
    """Return the event that a text from the store says, or None if no worker of this group has written it."""
    content = text[PROOF_BYTES:]
    if not is_proof(text[:PROOF_BYTES], secret, _PURPOSE, store_key.encode(), content):
        return None
    try:
        return _checked(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError):  # another version's, whoever wrote it
        return None


def _checked(fields: Any) -> Event:
    """Return the event with these fields, a dictionary if they are an event's.

    Raises:
        ValueError, TypeError, KeyError: there is none.
    """
    if not isinstance(fields, dict):
        raise TypeError
    event = _KINDS[fields.pop("event")](**fields)
    if isinstance(event, WorkerLeft):
        if type(event.number) is not int or event.number < 0 or not isinstance(event.end_reason, str):
            raise ValueError
        return event
    texts = event.address, event.key, event.process
    if type(event.rank) is not int or not all(isinstance(each, str) for each in texts):
        raise TypeError
    if len(event.key) != _KEY_LENGTH:
        raise ValueError
    event.key.encode("ascii")
    ProcessIdentity.decode(event.process)
    try:
        WorkerInfo(event.name, event.rank)
    except InvalidArgumentError as error:
        raise ValueError from error
    return event
