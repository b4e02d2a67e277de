"""Wait for a file to become readable, whatever its descriptor: ``select()`` knows those below 1,024."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import HasFileno


def is_readable(file: int | HasFileno, timeout_s: float | None) -> bool:
    """Return whether a file is readable or at its end within ``timeout_s`` seconds (None: wait)."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))
