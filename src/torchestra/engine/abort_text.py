"""What a rank that aborts a group writes into the arena for the others."""

from __future__ import annotations

import json

from torchestra.engine import layout as at

__all__ = ["abort_text"]

_LEAST_TEXT = 100
_CUT = " ..."


def abort_text(why: str, failed: tuple[int, ...], standing: str) -> str:
    """What to write into the arena, cut to what it has room for: the lines first, then the reason."""
    whole = why, standing
    while True:
        told = json.dumps({"failed": failed, "why": why, "standing": standing}, ensure_ascii=False)
        if len(told.encode(errors="replace")) <= at.HEADER_ABORT_TEXT_BYTES:
            return told
        if len(standing) > _LEAST_TEXT:
            standing = _cut(standing, whole[1])
        else:
            why = _cut(why, whole[0])


def _cut(text: str, whole: str) -> str:
    """A tenth less of a text that may have been cut before."""
    return f"{whole[: (len(text) - (len(_CUT) if text != whole else 0)) * 9 // 10]}{_CUT}"
