"""As ``torch.distributed.rendezvous``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from torchestra import rendezvous as own
from torchestra.store import Store
from torchestra.types import DEFAULT_TIMEOUT

__all__ = ["rendezvous"]


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: timedelta = DEFAULT_TIMEOUT
) -> Iterator[tuple[Store, int, int]]:
    """Meet the other ranks, once: yields the store, this rank's number, and how many there are."""
    met = own.rendezvous(url, rank=rank, world_size=world_size, timeout=timeout)
    yield met.store, met.rank, met.world_size
