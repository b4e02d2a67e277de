"""The request to the server of process ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["ItemRequest"]


@dataclass
class ItemRequest:
    """A test that the server shall run.

    Attributes:
        nodeid: which.
        size, timeout, init, may_die: as in the marker.
        directory: for the ranks' store and output.
        values: the pickled values of the fixtures that the world shares, by name.
        debug_rank: the rank whose failure a debugger opens, or None.
    """

    nodeid: str
    size: int
    timeout: float
    init: bool
    may_die: tuple[int, ...]
    directory: str
    values: dict[str, bytes]
    environment: dict[str, str] = field(repr=False)  # may have the job's secret
    debug: bool
    debug_rank: int | None

    def output_of(self, rank: int) -> str:
        """Return the file that a rank's output goes to."""
        return os.path.join(self.directory, f"rank-{rank}.out")
