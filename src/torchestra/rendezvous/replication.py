"""The move of a world's store, when the ranks have met, to replicas that some of the ranks serve.

Ranks meet at the store of a master, and their store would end with it. If TORCHESTRA_STORE_REPLICAS asks for
n replicas (on all ranks alike), n ranks at equal distances serve them, which are on n hosts where the hosts
have equally many ranks, numbered host by host. Each writes its address into the store at which they have met;
when all addresses are there, all ranks go on with the replicated store, and need the first one no more. A
replica that has been silent for the heartbeat bound is replaced by a rank that serves none.
"""

from __future__ import annotations

import os

from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.errors import InvalidArgumentError
from torchestra.store import PrefixStore, ReplicatedStore, Store
from torchestra.store.replicated import ReplicaListener, Standby
from torchestra.transport.addresses import own_address

REPLICAS_VARIABLE = "TORCHESTRA_STORE_REPLICAS"

_PREFIX = "replicas"

standbys: list[Standby] = []  # until the process ends: other ranks may need them longer than this one


def replicas_wanted(store: Store, world_size: int) -> int | None:
    """Return how many replicas the environment asks for; None if for none, or the store is on some already.

    Raises:
        InvalidArgumentError: it is no number from 1 to ``world_size``.
    """
    wanted = os.environ.get(REPLICAS_VARIABLE)
    if not wanted or isinstance(store, ReplicatedStore):
        return None
    if not wanted.isdecimal() or not 1 <= int(wanted) <= world_size:
        raise InvalidArgumentError(
            f"environment variable {REPLICAS_VARIABLE} must be a number of ranks from 1 to {world_size}, the"
            f" world size, got {wanted!r}"
        )
    return int(wanted)


def moved_to_replicas(store: Store, rank: int, world_size: int, count: int, timeout_s: float) -> Store:
    """Return a store, empty at first, on replicas that ``count`` ranks serve. Must be called by every rank.

    Args:
        store: which only the ranks of this world use.
        timeout_s: how long to wait for the others, and the new store's time-out.

    Raises:
        StoreTimeoutError: not all that are to serve came in time.
        DistNetworkError: a rank cannot reach a majority of the replicas.
    """
    servers = [index * world_size // count for index in range(count)]
    secret = store.secret
    listener = _listener(store)
    if rank in servers:
        PrefixStore(_PREFIX, store).set(_key(servers.index(rank)), listener.address)
    addresses = _addresses(store, count, timeout_s)
    if rank in servers:
        listener.serve(addresses)
    return _watched(ReplicatedStore(addresses, timeout_s, secret=secret), listener)


def replicas_to_join(store: Store, count: int, timeout_s: float) -> Store:
    """Return the store to which the ranks of a world have moved, for a process that is none of them.

    Args:
        store: which :func:`moved_to_replicas` got.
        count: of its replicas.
        timeout_s: how long to wait for the ranks, and the new store's time-out.

    Raises:
        StoreTimeoutError: the ranks have not served it in time: they were not asked to, say.
        DistNetworkError: a majority of the replicas cannot be reached.
    """
    addresses = _addresses(store, count, timeout_s)
    return _watched(ReplicatedStore(addresses, timeout_s, secret=store.secret), _listener(store))


def _key(index: int) -> str:
    return f"address/{index}"


def _addresses(store: Store, count: int, timeout_s: float) -> list[str]:
    keys = [_key(index) for index in range(count)]
    return [text.decode() for text in PrefixStore(_PREFIX, store).await_values(keys, timeout_s)]


def _listener(store: Store) -> ReplicaListener:
    host = "127.0.0.1" if store.secret is None else own_address(store)
    return ReplicaListener(host, heartbeat_bound(), store.secret, secured=store.secret is not None)


def _watched(moved: ReplicatedStore, listener: ReplicaListener) -> Store:
    standbys.append(Standby(listener, moved.clone()))
    return moved
