"""The waits of messages within a host."""

from __future__ import annotations

from torchestra.engine.membership.rank_context import RankContext
from torchestra.system.deadline import Deadline


class MessageWaiter:
    """Tell the mailbox how long messages may wait."""

    __slots__ = ("_context", "timeout_s")

    def __init__(self, context: RankContext, timeout_s: float) -> None:
        self._context = context
        self.timeout_s = timeout_s

    def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> int | None:
        """Return and raise what :meth:`RankContext.check` does; a time-out leaves the group usable."""
        return self._context.check(doing, blocked, deadline, suspect, alone=True)

    def abort(self, reason: str) -> None:
        """Abort the group, as a message was left halfway."""
        self._context.abort(reason)
