"""What a rank must say so that its peers can read its tensors where they lie (kernels/single_copy.py)."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena
from torchestra.errors import DistBackendError
from torchestra.system.deadline import Deadline

_GRACE_SECONDS = 1.0  # a process that ends gives up its memory before the lock by which the others see it
_POLL_SECONDS = 0.002

_verdict: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
"""Whether it is faster in this process: found out by its first rank that could read so, for all groups."""


def publish_token(arena: Arena, rank: int, words: npt.NDArray[np.int64]) -> None:
    """Make a token in a rank's own memory, the words of its context, and tell the peers of it."""
    token = uuid.uuid4().int >> 66 | 1
    words[at.OWN_TOKEN // 8] = token
    words[at.VERDICT // 8] = _verdict.ctypes.data
    if arena.layout.size == 1:
        words[at.READER // 8] = at.REFUSED
    arena.store_word(arena.control(rank) + at.TOKEN_ADDRESS, words.ctypes.data + at.OWN_TOKEN)
    arena.store_word(arena.control(rank) + at.TOKEN, token)


def raise_unreadable(look: Callable[[int | None], int | None], where: str, peer: str) -> None:
    """Raise the error of an operation in which a peer's tensor could not be read.

    Args:
        look: raises if the peer has died or the group was aborted; as RankContext.check, it takes the rank
            that it returned last.
        where: the operation, its group, and the rank.
        peer: whose tensor it is.
    """
    suspect: int | None = None
    for _ in Deadline(_GRACE_SECONDS).polls(_POLL_SECONDS):
        suspect = look(suspect)
    raise DistBackendError(
        f"{where} cannot go on: the system does not let it read the tensor of"
        f" {peer}, whose process lives (process_vm_readv): has it been freed, or become inaccessible? If it"
        " must be so, set Choices.single_copy higher than any tensor"
    )
