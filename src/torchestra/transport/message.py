"""What comes from another rank in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Message"]


class Message(NamedTuple):
    """A message that has come.

    Attributes:
        source: the rank that sent it.
        kind, tag: as they were sent; a kind is below 65,536.
        text: its first part.
        storages: the memory of the other parts.
    """

    source: int
    kind: int
    tag: int
    text: bytes | npt.NDArray[np.uint8]
    storages: Sequence[torch.UntypedStorage]
