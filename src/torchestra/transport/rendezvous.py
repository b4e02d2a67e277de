"""How the ranks of several hosts find and let in each other, over the store they share.

Each puts its endpoint record there (endpoint.py). All want all others' endpoints: that would be as many
requests, for all ranks together, as the square of their number in a store that answers for one key at a time.
So the first of them puts all endpoints together as they are, and the others read that::

    endpoint/R       the endpoint record of rank R
    endpoints     all of them; each is believed, or not, for what it is
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence

from torchestra.errors import DistNetworkError, StoreTimeoutError
from torchestra.store import PrefixStore
from torchestra.transport.endpoint import read_endpoint
from torchestra.transport.transport import Transport

__all__ = ["meet"]

_LOOK_SECONDS = 0.2
_LENGTH = struct.Struct("<H")


def meet(
    transport: Transport,
    store: PrefixStore,
    secret: bytes,
    rank: int,
    ranks: Sequence[int],
    others: Mapping[int, str],
    timeout_s: float,
) -> None:
    """Connect to ranks on other hosts; returns when all are. Must be called by each of ``ranks``.

    Args:
        transport: this rank's end; to be closed by the caller.
        store: one that only these ranks, and only for this purpose, use.
        secret: the job's.
        rank: of this one.
        ranks: all that meet, in the same order for all.
        others: which of them shall be connected to, with what to call them in messages.
        timeout_s: how long that may take.

    Raises:
        DistNetworkError: the connection to one of them cannot be made, one has another secret, or the
            transport
            was closed meanwhile.
        StoreTimeoutError: the others did not come in time.
    """
    deadline = time.monotonic() + timeout_s

    def place(peer: int) -> str:
        return store.full_key(f"endpoint/{peer}")

    store.set(f"endpoint/{rank}", transport.endpoint.written(secret, place(rank)))
    if rank == ranks[0]:
        found = _values(store, [f"endpoint/{peer}" for peer in ranks], deadline, transport)
        store.set("endpoints", b"".join(_LENGTH.pack(len(text)) + text for text in found))
    else:
        found = _split(_values(store, ["endpoints"], deadline, transport)[0])
    texts = dict(zip(ranks, found, strict=False))
    endpoints = {
        peer: read_endpoint(texts.get(peer, b""), secret, place(peer), called)
        for peer, called in others.items()
    }
    transport.join(endpoints, others, max(0.0, deadline - time.monotonic()))


def _split(packed: bytes) -> list[bytes]:
    """The endpoints in what may be anything."""
    found, start = [], 0
    while start + _LENGTH.size <= len(packed):
        end = start + _LENGTH.size + _LENGTH.unpack_from(packed, start)[0]
        found.append(packed[start + _LENGTH.size : end])
        start = end
    return found


def _values(store: PrefixStore, keys: list[str], deadline: float, transport: Transport) -> list[bytes]:
    while True:
        remaining = deadline - time.monotonic()
        try:
            return store.await_values(keys, max(0.001, min(_LOOK_SECONDS, remaining)))
        except StoreTimeoutError:
            if transport.is_closed:
                raise DistNetworkError("this end was closed") from None
            if remaining <= _LOOK_SECONDS:
                raise
