"""The connections of a worker to those on other hosts, as its options say."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torchestra.errors import DistNetworkError, InvalidArgumentError, RpcError
from torchestra.rpc.options import RpcBackendOptions
from torchestra.store import PrefixStore, Store
from torchestra.store.secret import SECRET_ADVICE
from torchestra.transport.addresses import own_address
from torchestra.transport.message import Message
from torchestra.transport.rendezvous import meet
from torchestra.transport.transport import Transport

ADDRESS_VARIABLE = "TORCHESTRA_RPC_ADDRESS"
PORTS_VARIABLE = "TORCHESTRA_RPC_PORTS"
ADVICE = f"See {ADDRESS_VARIABLE} and {PORTS_VARIABLE} in docs/rpc.md"


def connect(
    store: Store,
    rank: int,
    far: Sequence[int],
    names: Sequence[str],
    timeout_s: float,
    options: RpcBackendOptions,
    arrived: Callable[[Message], None],
) -> Transport:
    """Connect to workers on other hosts; return when all are connected. Must be called by every worker.

    Args:
        store: a store that only the workers, and only for this purpose, use.
        far: the ranks of the workers on other hosts.
        names: the names of all workers, by rank.
        options: where to listen, and when to give a silent worker up.

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
    address = options.address or listening_address(store)
    ports = options.ports or given_ports()
    others = {peer: f"worker {names[peer]!r} (rank {peer})" for peer in far}
    try:
        transport = Transport(
            f"worker {names[rank]!r}", address, ports, options.heartbeat_timeout, arrived, advice=ADVICE
        )
        try:
            meet(transport, PrefixStore("wire", store), secret, rank, range(len(names)), others, timeout_s)
        except BaseException:
            transport.close()
            raise
    except DistNetworkError as error:
        raise RpcError(str(error)) from error
    return transport


def listening_address(store: Store) -> str:
    """Return the environment's TORCHESTRA_RPC_ADDRESS, or else :func:`own_address`."""
    return os.environ.get(ADDRESS_VARIABLE) or own_address(store)


def given_ports() -> tuple[int, int] | None:
    """Read the environment's TORCHESTRA_RPC_PORTS: ``29600`` or ``29600-29700``.

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
