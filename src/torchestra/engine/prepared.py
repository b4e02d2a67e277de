"""A kernel with its arguments, as persistent operations keep it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words

_ONE_PART = {
    "all_reduce": at.DIRECT,
    "broadcast": at.SHARE,
    "all_gather": at.SHARE,
    "share": at.SHARE,
    "reduce_scatter": at.PEER_CHUNK,
    "reduce_scatter_even": at.PEER_CHUNK,
    "all_to_all_even": at.PEER_CHUNK,
}
"""The kernels that have one meeting if no piece is longer than a word of the context says."""


class PreparedKernel:
    """A kernel and its arguments, for repeated calls.

    Args:
        engine: the LocalEngine whose kernel it is.

    Attributes:
        name: of the kernel.
        arguments: the plan's address first.
        tables: the values for the tables by peer; None if the kernel reads none.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        arguments: tuple[int, ...],
        tables: npt.NDArray[np.int64] | None,
    ) -> None:
        self._engine = engine
        self.name = name
        self.arguments = arguments
        self.tables = tables

    def __call__(self, timeout_s: float, site: str | None = None) -> None:
        """Call the kernel until it is done."""
        engine = self._engine
        if self.tables is not None:
            engine.context.set_tables(self.tables)
        # Looked up by name, as another function replaces it when the group cannot be used any more.
        engine.call(getattr(engine.kernels, self.name), self.arguments, timeout_s, site)

    def longest_piece(self) -> tuple[int, int]:
        """Return the bytes of the longest piece of any rank, and which word of the context is the threshold.

        If the other ranks' pieces are not known here, none is short enough.
        """
        threshold = _ONE_PART.get(self.name)
        if threshold is None:
            return 1 << 62, at.CHUNK
        if self.name == "share":
            assert self.tables is not None
            return int(self.tables[at.TABLES.index(at.TARGET_BYTES)].max()), threshold
        if self.name == "all_to_all_even":
            return self.arguments[1], threshold
        elements = self.arguments[3 if self.name == "reduce_scatter" else 1]
        return elements * shared_words.load_acquire(self.arguments[0] + at.PLAN_UNIT), threshold
