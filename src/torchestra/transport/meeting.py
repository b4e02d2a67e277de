"""How the ranks of several hosts find and let in each other, over the store they share."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torchestra.errors import DistNetworkError, StoreTimeoutError
from torchestra.store import PrefixStore
from torchestra.transport.cards import read_card
from torchestra.transport.connections import Wire

__all__ = ["meet"]

_LOOK_SECONDS = 0.2


def meet(
    wire: Wire,
    store: PrefixStore,
    secret: bytes,
    rank: int,
    others: Mapping[int, str],
    seconds: float,
) -> None:
    """Connect to ranks on other hosts; returns when all are. Must be called by each of them.

    Args:
        wire: this rank's end; to be closed by the caller.
        store: one that only these ranks, and only for this purpose, use.
        secret: the job's.
        rank: of this one.
        others: who shall be connected to, by rank, with what to call them in messages.
        seconds: how long that may take.

    Raises:
        DistNetworkError: the connection to one of them cannot be made, one has another secret, or the wire
            was closed meanwhile.
        StoreTimeoutError: the others did not come in time.
    """
    deadline = time.monotonic() + seconds

    def place(peer: int) -> str:
        return store.full_key(f"card/{peer}")

    store.set(f"card/{rank}", wire.card.written(secret, place(rank)))
    keys = [f"card/{peer}" for peer in others]
    _await(store, keys, deadline, wire)
    cards = {
        peer: read_card(text, secret, place(peer), called)
        for (peer, called), text in zip(others.items(), store.multi_get(keys), strict=True)
    }
    wire.join(cards, others, max(0.0, deadline - time.monotonic()))


def _await(store: PrefixStore, keys: list[str], deadline: float, wire: Wire) -> None:
    while True:
        remaining = deadline - time.monotonic()
        try:
            return store.wait(keys, max(0.001, min(_LOOK_SECONDS, remaining)))
        except StoreTimeoutError:
            if wire.is_closed:
                raise DistNetworkError("this end was closed") from None
            if remaining <= _LOOK_SECONDS:
                raise
