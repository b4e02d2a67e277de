"""Messages as their receivers get them, and the functions that get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Message(NamedTuple):
    """A message that has come.

    Attributes:
        source: the rank that sent it.
        kind, tag: as they were sent; a kind is below 65,536.
        text: its first part; empty if there was no memory for it.
        storages: the memory of the other parts.
        lost: why parts of it are missing; then there are no storages.
    """

    source: int
    kind: int
    tag: int
    text: bytes | npt.NDArray[np.uint8]
    storages: Sequence[torch.UntypedStorage]
    lost: MemoryError | None = None

    @property
    def nbytes(self) -> int:
        """Return how many bytes have come, of all parts."""
        return len(self.text) + sum(storage.nbytes() for storage in self.storages)


@dataclass(frozen=True)
class Handlers:
    """The functions that a transport calls, see :class:`~torchestra.transport.transport.Transport`."""

    arrived: Callable[[Message], None]
    lost: Callable[[int, str], None]
    broken: Callable[[int, str], None] | None


class Sending(Protocol):
    """An object to tell that a message is queued, and so will be sent whatever interrupts come.

    Attributes:
        is_sent: set to True when the message is queued.
    """

    is_sent: bool


def new_storage(length: int) -> torch.UntypedStorage | None:
    """Return ``length`` bytes of memory for a part of a message, or None if there are none."""
    try:
        return torch.UntypedStorage(length)
    except (RuntimeError, MemoryError, OverflowError, TypeError):  # torch raises all of these
        return None


def no_room(source: int, what: str, length: int) -> MemoryError:
    """Return the error of a message with a part that there is no memory for."""
    return MemoryError(
        f"there is no memory here for the {length} bytes of {what} in a message of rank {source}"
    )
