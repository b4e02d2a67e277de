"""How the workers of several hosts find and let in each other, over the store they share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

from torchestra.engine.channels import Message
from torchestra.errors import InvalidArgumentError
from torchestra.rpc.options import RpcBackendOptions
from torchestra.rpc.wire.cards import read_card
from torchestra.rpc.wire.connections import Wire
from torchestra.store import PrefixStore, Store, TCPStore
from torchestra.store.secret import SECRET_ADVICE

ADDRESS_VARIABLE = "TORCHESTRA_RPC_ADDRESS"
PORTS_VARIABLE = "TORCHESTRA_RPC_PORTS"
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # for documentation (RFC 5737): on no network, so beyond every local one
_ANY_PORT = 9


def connect(
    store: Store,
    rank: int,
    far: Sequence[int],
    names: Sequence[str],
    seconds: float,
    options: RpcBackendOptions,
    arrived: Callable[[Message], None],
) -> Wire:
    """Connect to workers on other hosts; returns when all are. Must be called by every worker.

    Args:
        store: a store that only the workers, and only for this purpose, use.
        rank: of this worker.
        far: the ranks of those on other hosts.
        names: of all workers, by rank.
        seconds: how long that may take.
        options: where to listen, and when to give a silent worker up.
        arrived: see :meth:`Wire.join`.

    Raises:
        InvalidArgumentError: there is no secret, or the environment says something impossible.
        RpcError: the connection to one of them cannot be made, or one has another secret.
        StoreTimeoutError: the others did not come in time.
    """
    secret = store.secret
    if secret is None:
        raise InvalidArgumentError(
            f"worker {names[rank]!r} and worker {names[far[0]]!r} are on different hosts and have no secret"
            f" by which to know each other; {SECRET_ADVICE}, or pass secret= to RpcBackendOptions"
        )
    meeting = _agreed(store)
    address, ports = options.address or own_address(store), options.ports or given_ports()
    wire = Wire(names[rank], address, ports, options.heartbeat_timeout)
    try:
        store.set(f"card/{rank}", wire.card.written(secret, rank, meeting))
        keys = [f"card/{peer}" for peer in far]
        store.wait(keys, timedelta(seconds=seconds))
        cards = {
            peer: read_card(text, secret, peer, meeting, names[peer])
            for peer, text in zip(far, store.multi_get(keys), strict=True)
        }
        wire.join(cards, names, seconds, arrived)
    except BaseException:
        wire.close()
        raise
    return wire


def _agreed(store: Store) -> str:
    """A random number that is this meeting's, so that cards of others are of no use here."""
    return store.compare_set("meeting", "", os.urandom(16).hex()).decode()


def own_address(store: Store) -> str:
    """An address of this host that others may reach it at.

    What the environment's TORCHESTRA_RPC_ADDRESS says; else of the interface that leads to the store's
    server; else of the one that leads to the world. Loopback where there is no other.
    """
    given = os.environ.get(ADDRESS_VARIABLE)
    if given:
        return given
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    master = store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "")
    for target in (master, _ELSEWHERE):
        address = _address_towards(target)
        if address is not None:
            return address
    return _LOOPBACK


def _address_towards(host: str) -> str | None:
    """The address that packets to a host would be from, unless that is the host itself."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            address = str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the name of a Unix socket may be too long for one of a host
        return None
    return None if address.startswith("127.") or address == "::1" else address.partition("%")[0]


def given_ports() -> tuple[int, int] | None:
    """What the environment's TORCHESTRA_RPC_PORTS says: ``29600`` or ``29600-29700``.

    Raises:
        InvalidArgumentError: it says something else.
    """
    text = os.environ.get(PORTS_VARIABLE)
    if not text:
        return None
    first, dash, last = text.partition("-")
    numbers = (first, last if dash else first)
    if all(number.strip().isdigit() for number in numbers):
        ports = int(numbers[0]), int(numbers[1])
        if 0 < ports[0] <= ports[1] < 65536:
            return ports
    raise InvalidArgumentError(f"{PORTS_VARIABLE} must be a port or two, as in 29600-29700; got {text!r}")
