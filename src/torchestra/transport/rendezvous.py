"""Connect the ranks of several hosts, which find each other over the store that they share.

Each rank writes its endpoint record there (endpoint.py), and needs those of all others. If each rank
asked for each record, that would be O(ranks²) requests. So the first rank joins all records, and the others
read the result::

    endpoint/R    the endpoint record of rank R
    endpoints     all of them; the reader checks the proof of each
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence

from torchestra.errors import DistNetworkError, StoreTimeoutError
from torchestra.store import PrefixStore
from torchestra.transport.endpoint import read_endpoint
from torchestra.transport.transport import Transport

_POLL_SECONDS = 0.2
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
    """Connect to ranks on other hosts; return when all are connected. Must be called by each of ``ranks``.

    Args:
        transport: this rank's transport, which the caller closes.
        store: one that only these ranks, and only for this purpose, use.
        ranks: all that meet, in the same order for all.
        others: the ranks to connect to, with their names for messages.

    Raises:
        DistNetworkError: the connection to one of them cannot be made, one has another secret, or the
            transport was closed meanwhile.
        StoreTimeoutError: the others did not come in time.
    """
    deadline = time.monotonic() + timeout_s

    def store_key(peer: int) -> str:
        return store.full_key(f"endpoint/{peer}")

    store.set(f"endpoint/{rank}", transport.endpoint.encode(secret, store_key(rank)))
    if rank == ranks[0]:
        records = _values(store, [f"endpoint/{peer}" for peer in ranks], deadline, transport)
        store.set("endpoints", b"".join(_LENGTH.pack(len(text)) + text for text in records))
    else:
        records = _split(_values(store, ["endpoints"], deadline, transport)[0])
    texts = dict(zip(ranks, records, strict=False))
    endpoints = {
        peer: read_endpoint(texts.get(peer, b""), secret, store_key(peer), name)
        for peer, name in others.items()
    }
    transport.join(endpoints, others, max(0.0, deadline - time.monotonic()))


def _split(packed: bytes) -> list[bytes]:
    """Return the records in a text that anybody may have written."""
    records, start = [], 0
    while start + _LENGTH.size <= len(packed):
        end = start + _LENGTH.size + _LENGTH.unpack_from(packed, start)[0]
        records.append(packed[start + _LENGTH.size : end])
        start = end
    return records


def _values(store: PrefixStore, keys: list[str], deadline: float, transport: Transport) -> list[bytes]:
    while True:
        remaining = deadline - time.monotonic()
        try:
            return store.await_values(keys, max(0.001, min(_POLL_SECONDS, remaining)))
        except StoreTimeoutError:
            if transport.is_closed:
                raise DistNetworkError("this end was closed") from None
            if remaining <= _POLL_SECONDS:
                raise
