"""Descriptor passing: ranks, and processes that are none, that want a descriptor from a server.

The product's are memory/fd_passing.py and memory/bounded_listener.py. A model stands for sockets of
SOCK_SEQPACKET as Linux has them (packets are whole and in order; an end that is closed, or whose process has
died, is told after what it sent), for random bytes, and for clocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from torchestra.errors import DistBackendError
from verification.memory import Known
from verification.protocols.product import Mutation, copies
from verification.protocols.replay import SLEEP, Raised, perform, resumed, turn
from verification.protocols.world import Model, ProtocolWorld, Rules
from verification.violations import WrongResult

MODULES = ("memory.bounded_listener", "memory.fd_passing")
GOT, REFUSED, SERVED = "has it", "was refused", "has served"
DESCRIPTOR = 7
_SERVER, _CLIENT = "server", "client"
_ADDRESS, _TOKEN = "address", "token"


class ModelSocket:
    """A socket: of a connection, or the one that listens (``connection`` is None)."""

    def __init__(self, *kind: object, connection: Any = None, side: str = _CLIENT) -> None:
        self.connection, self.side = connection, side

    def __enter__(self) -> ModelSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __hash__(self) -> int:
        return hash(self.connection)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelSocket) and other.connection == self.connection

    def setblocking(self, blocks: bool) -> None:
        """Do nothing: no operation blocks."""

    def bind(self, address: str) -> None:
        """Be the one that listens."""
        self.side = "listener"

    def listen(self, backlog: int) -> None:
        """Let others connect."""
        perform("listens")

    def connect(self, address: str) -> None:
        """Connect to the one that listens."""
        self.connection = perform("connects")

    def accept(self) -> tuple[ModelSocket, None]:
        """Take the next connection."""
        return ModelSocket(connection=perform("accepts"), side=_SERVER), None

    def send(self, packet: bytes) -> None:
        """Send a packet."""
        perform("sends", self.connection, self.side, packet, ())

    def recv(self, longest: int) -> bytes:
        """Receive a packet."""
        return bytes(perform("receives", self.connection, self.side)[0])

    def fileno(self) -> int:
        """Return a number for it."""
        return hash(self.connection)

    def close(self) -> None:
        """End it."""
        if self.side == "listener":
            perform("listens no more")
        elif self.connection is not None:
            perform("ends", self.connection, self.side)


class _Selector:
    """Tells which sockets have something to read."""

    def __init__(self) -> None:
        self._sockets: dict[ModelSocket, None] = {}

    def register(self, one: ModelSocket, events: int) -> None:
        self._sockets[one] = None

    def unregister(self, one: ModelSocket) -> None:
        del self._sockets[one]

    def select(self, timeout_s: float) -> list[tuple[Any, int]]:
        names = tuple(one.connection for one in self._sockets)
        ready = perform("looks for packets", *names)
        return [(SimpleNamespace(fileobj=one), 1) for one in self._sockets if one.connection in ready]

    def close(self) -> None:
        """Forget them."""


@dataclass(frozen=True)
class Passing:
    """A server, ranks that ask for the descriptor, and others.

    Attributes:
        name: for reports.
        ranks: which rank each process asks as; several may claim to be the same.
        strangers: how many processes connect that do not know the key.
        room: for how many connections that have not proved themselves there is room, besides the ranks'.
        rules: for other events.
    """

    name: str
    ranks: tuple[int, ...]
    strangers: int = 0
    room: int = 64
    rules: Rules = field(default_factory=Rules)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 + len(self.ranks) + self.strangers

    def make(self, mutation: Mutation | None = None) -> Any:
        """Return the function that makes the first state."""
        made = copies(MODULES, _REPLACED, mutation)
        listener, passing = (made[name] for name in MODULES)
        listener.__dict__["MAX_UNAUTHENTICATED"] = self.room
        liar = copies(MODULES, {**_REPLACED, MODULES[1]: {**_REPLACED[MODULES[1]], "_is_proof": _believe}})
        programs = [
            partial(self._serve, passing),
            *[partial(_ask, passing, rank, _TOKEN) for rank in self.ranks],
            *[partial(_ask, liar[MODULES[1]], 1, "another token")] * self.strangers,
        ]
        model = Model(
            programs,
            SERVICES,
            self.check,
            {"listening": False, "backlog": (), "warned": False, "members": len(self.ranks)},
            self.rules,
            CHOICES,
            frozenset({"draws", "warns"}),
        )

        def first(known: Known) -> ProtocolWorld:
            return ProtocolWorld(model, known)

        return first

    def name_of(self, address: int) -> str:
        """Return the name of a word, of which this has none."""
        return hex(address)

    def _serve(self, passing: Any) -> Any:
        wanted = range(1, 1 + len(set(self.ranks)))
        server = passing.DescriptorServer(wanted, None, "model", address=_ADDRESS, token=_TOKEN)
        return _serve_on(passing, server)

    def check(self, world: ProtocolWorld) -> None:
        """Refuse a rank that gets it twice, and a stranger that gets it."""
        if world.facts["warned"] and not (self.strangers or world.crashed):
            raise WrongResult("a rank was taken for a process that does not know the key")
        got = [rank for rank, result in enumerate(world.results) if result == (GOT,)]
        if any(rank > len(self.ranks) for rank in got):
            raise WrongResult("a process that does not know the key got the descriptor")
        claimed = [self.ranks[rank - 1] for rank in got]
        if len(set(claimed)) < len(claimed):
            raise WrongResult(f"two processes got the descriptor of one rank: {got}")
        if world.has_ended() and not world.crashed:
            missing = set(self.ranks) - set(claimed)
            if missing:
                raise WrongResult(f"ranks {sorted(missing)} did not get the descriptor")


def _serve_on(passing: Any, server: Any) -> Any:
    listener = server._listener
    if (kept := resumed()) is not None:
        server.given, server._taken = list(kept[0]), set(kept[1])
        for name, claim in kept[2]:
            connection = ModelSocket(connection=name, side=_SERVER)
            listener._selector.register(connection, 1)
            listener._deadlines[connection] = 1.0
            if claim is not None:
                passing_claim = passing._Challenged(*claim)
                server._challenged[connection] = passing_claim
        perform(SLEEP)
    if server.waited_for and not perform("looks whether any may come"):
        server.serve(DESCRIPTOR)
        open_ones = tuple(
            (one.connection, tuple(claim) if (claim := server._challenged.get(one)) else None)
            for one in listener._deadlines
        )
        turn((tuple(server.given), frozenset(server._taken), open_ones))
    server.close()
    return (SERVED, tuple(server.given))


def _ask(passing: Any, rank: int, token: str) -> Any:
    request = passing.DescriptorRequest(f"{_ADDRESS}:{token}", None, rank, "model")
    kept = resumed()
    if kept is None:
        perform("is let go")  # once the server listens
    else:
        name, request._nonces, request._proved = kept
        request.connection = None if name is None else ModelSocket(connection=name)
        perform(SLEEP)
    try:
        descriptor = request.advance()
    except DistBackendError:
        return (REFUSED,)
    if descriptor is None:
        connection = request.connection
        if connection is None and token != _TOKEN:
            return (REFUSED,)  # a stranger tries once
        name = None if connection is None else connection.connection
        turn((name, request._nonces, request._proved))
    request.close()
    return (GOT,) if descriptor == DESCRIPTOR else ("has another",)


def _has_ended(world: ProtocolWorld, connection: Any, side: str) -> bool:
    """Return whether the other end of a connection is closed, or its process dead."""
    other = _CLIENT if side == _SERVER else _SERVER
    owner = 0 if other == _SERVER else connection[0]
    return other in world.facts["ended", connection] or owner in world.crashed


def _listen(world: ProtocolWorld, rank: int, choice: Any) -> None:
    world.facts["listening"] = True


def _listen_no_more(world: ProtocolWorld, rank: int, choice: Any) -> None:
    world.facts["listening"] = False
    for connection in world.facts["backlog"]:
        world.facts["ended", connection] |= {_SERVER}
    world.facts["backlog"] = ()


def _connect(world: ProtocolWorld, rank: int, choice: Any) -> Any:
    if not world.facts["listening"] or 0 in world.crashed:
        return Raised(ConnectionRefusedError)
    number = world.facts.get(("connections", rank), 0)
    world.facts["connections", rank] = number + 1
    connection = (rank, number)
    world.facts["backlog"] = (*world.facts["backlog"], connection)
    world.facts["ended", connection] = frozenset()
    world.facts["to", _SERVER, connection] = world.facts["to", _CLIENT, connection] = ()
    return connection


def _accept(world: ProtocolWorld, rank: int, choice: Any) -> Any:
    if not world.facts["backlog"]:
        return Raised(BlockingIOError)
    first, *rest = world.facts["backlog"]
    world.facts["backlog"] = tuple(rest)
    return first


def _send(
    world: ProtocolWorld, rank: int, choice: Any, connection: Any, side: str, packet: bytes, fds: Any
) -> Any:
    if _has_ended(world, connection, side):
        return Raised(BrokenPipeError)
    place = ("to", _CLIENT if side == _SERVER else _SERVER, connection)
    world.facts[place] = (*world.facts[place], (packet, fds))
    return None


def _receive(world: ProtocolWorld, rank: int, choice: Any, connection: Any, side: str) -> Any:
    place = ("to", side, connection)
    if world.facts[place]:
        first, *rest = world.facts[place]
        world.facts[place] = tuple(rest)
        return first
    if _has_ended(world, connection, side):
        return (b"", ())
    return Raised(BlockingIOError)


def _end(world: ProtocolWorld, rank: int, choice: Any, connection: Any, side: str) -> None:
    world.facts["ended", connection] |= {side}


def _look(world: ProtocolWorld, rank: int, choice: Any, *connections: Any) -> tuple[Any, ...]:
    found = [
        connection
        for connection in connections
        if connection is not None
        and (world.facts["to", _SERVER, connection] or _has_ended(world, connection, _SERVER))
    ]
    return (*found, *((None,) if world.facts["backlog"] else ()))


def _none_may_come(world: ProtocolWorld, rank: int, choice: Any) -> bool:
    """Return whether the ranks that have not come are dead, as the server's caller would notice."""
    members = range(1, 1 + world.facts["members"])
    return all(each in world.crashed or world.results[each] is not None for each in members)


def _draw(world: ProtocolWorld, rank: int, choice: Any, length: int) -> bytes:
    number = world.facts.get(("draws", rank), 0) + 1
    world.facts["draws", rank] = number
    return bytes([rank, *number.to_bytes(2, "little")]).ljust(length, b"\0")


def _warn(world: ProtocolWorld, rank: int, choice: Any) -> None:
    world.facts["warned"] = True


def _believe(*words: object) -> bool:
    return True


def _let_go(world: ProtocolWorld, rank: int) -> Iterable[Any]:
    if world.facts["listening"] or 0 in world.crashed or world.results[0] is not None:
        yield ""


def _send_fds(one: ModelSocket, packets: list[bytes], fds: list[int]) -> None:
    perform("sends", one.connection, one.side, packets[0], tuple(fds))


def _receive_fds(one: ModelSocket, longest: int, most: int) -> tuple[bytes, list[int], int, None]:
    packet, fds = perform("receives", one.connection, one.side)
    return packet, list(fds), 0, None


_OS = SimpleNamespace(
    urandom=lambda length: perform("draws", length),
    geteuid=lambda: 0,
    set_inheritable=lambda fd, inheritable: None,
    close=lambda fd: None,
    strerror=os.strerror,
)
_SOCKET = SimpleNamespace(
    socket=ModelSocket, AF_UNIX=1, SOCK_SEQPACKET=5, SOMAXCONN=64, MSG_CTRUNC=8,
    send_fds=_send_fds, recv_fds=_receive_fds,
)  # fmt: skip
_WARNINGS = SimpleNamespace(warn=lambda *words: perform("warns"))
_REPLACED: dict[str, dict[str, Any]] = {
    "memory.bounded_listener": {
        "os": _OS,
        "socket": _SOCKET,
        "selectors": SimpleNamespace(DefaultSelector=_Selector, EVENT_READ=1),
        "time": SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None),
        "peer_user": lambda connection: 0,
    },
    "memory.fd_passing": {
        "os": _OS,
        "socket": _SOCKET,
        "peer_user": lambda connection: 0,
        "RateLimitedWarnings": lambda log: _WARNINGS,
    },
}
SERVICES: dict[str, Any] = {
    "listens": _listen,
    "listens no more": _listen_no_more,
    "connects": _connect,
    "accepts": _accept,
    "sends": _send,
    "receives": _receive,
    "ends": _end,
    "looks for packets": _look,
    "looks whether any may come": _none_may_come,
    "draws": _draw,
    "warns": _warn,
    "is let go": lambda world, rank, choice: None,
}
CHOICES: dict[str, Any] = {"is let go": _let_go}
