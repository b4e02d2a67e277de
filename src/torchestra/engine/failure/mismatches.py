"""What messages say of ranks that called the same operation and would yet have worked past each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchestra.engine import layout as at

if TYPE_CHECKING:
    from torchestra.engine.membership.rank_context import RankContext

__all__ = ["differing_thresholds"]


def differing_thresholds(context: RankContext) -> str:
    """This rank's thresholds, if another rank came to the current operation with others; or nothing."""
    parity = (context.word(at.SEQUENCE) & 1) * 8
    found = {
        context.arena.word(context.arena.control(rank) + at.META + parity) >> at.DIGEST_BIT
        for rank in range(context.size)
    }
    if len(found) == 1:
        return ""
    return (
        f" with thresholds of its own (direct={context.word(at.DIRECT)}, chunk={context.word(at.CHUNK)},"
        f" share={context.word(at.SHARE)} bytes; all ranks must have the same)"
    )
