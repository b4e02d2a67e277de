"""What messages say of ranks that called the same operation and would yet have worked past each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchestra.engine import layout as at

if TYPE_CHECKING:
    from torchestra.engine.membership.rank_context import Member

__all__ = ["differing_thresholds"]


def differing_thresholds(member: Member) -> str:
    """This rank's thresholds, if another rank came to the current operation with others; or nothing."""
    parity = (member.word(at.SEQUENCE) & 1) * 8
    found = {
        member.arena.word(member.arena.control(rank) + at.META + parity) >> at.DIGEST_BIT
        for rank in range(member.size)
    }
    if len(found) == 1:
        return ""
    return (
        f" with thresholds of its own (direct={member.word(at.DIRECT)}, chunk={member.word(at.CHUNK)},"
        f" share={member.word(at.SHARE)} bytes; all ranks must have the same)"
    )
