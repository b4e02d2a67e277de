"""Write into the arena why a rank aborts the group, and read it."""

from __future__ import annotations

import json
from typing import Any

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena

_MIN_TEXT = 100
_CUT = " ..."


def abort_text(why: str, failed: tuple[int, ...], report: str, mismatch: bool = False) -> str:
    """Return the text for the arena, cut to the room there: the lines first, then the reason."""
    whole = why, report
    while True:
        text = json.dumps(
            {"failed": failed, "mismatch": mismatch, "why": why, "report": report}, ensure_ascii=False
        )
        if len(text.encode(errors="replace")) <= at.HEADER_ABORT_TEXT_BYTES:
            return text
        if len(report) > _MIN_TEXT:
            report = _cut(report, whole[1])
        else:
            why = _cut(why, whole[0])


def write_abort_text(
    arena: Arena, why: str, failed: tuple[int, ...], report: str, mismatch: bool = False
) -> bool:
    """Write the text, once a rank has claimed to; return False if another rank writes it, or has.

    Any rank may write it, not only the one that has claimed to, which may take long to find out where all
    stand, or die.
    """
    claim = arena.address + at.HEADER_ABORT_CLAIM
    if shared_words.compare_exchange(claim, at.ABORT_EXPLAINED, at.ABORT_WRITTEN) != at.ABORT_EXPLAINED:
        return False
    text = abort_text(why, failed, report, mismatch)
    length = arena.set_text(at.HEADER_ABORT_TEXT, at.HEADER_ABORT_TEXT_BYTES, text)
    shared_words.store_ordered(arena.address + at.HEADER_ABORT_LENGTH, length)
    return True


def read_abort_text(arena: Arena) -> dict[str, Any]:
    """Return the text by the rank that aborted the group: ``why``, ``failed``, ``report``, ``mismatch``."""
    length = shared_words.load_acquire(arena.address + at.HEADER_ABORT_LENGTH)
    if length == 0:
        why = "a rank died, or was interrupted, before it had said why"
        return {"why": why, "failed": (), "report": "", "mismatch": False}
    text: dict[str, Any] = json.loads(arena.text(at.HEADER_ABORT_TEXT, length))
    return text


def _cut(text: str, whole: str) -> str:
    """Cut another tenth off a text that may have been cut before."""
    return f"{whole[: (len(text) - (len(_CUT) if text != whole else 0)) * 9 // 10]}{_CUT}"
