"""The thread that answers for a rank when others ask where its program is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchestra.engine import layout as at
from torchestra.engine.kernels import control
from torchestra.engine.recorder.callsites import call_site

if TYPE_CHECKING:
    from torchestra.engine.membership.rank_context import Member

__all__ = ["Watcher"]


class Watcher(threading.Thread):
    """Answers peers that ask where this rank's program is: one sleeping thread per group and rank.

    It sleeps on the ASKED word and is woken only when a peer's wait has timed out.
    """

    def __init__(self, member: Member, thread: threading.Thread) -> None:
        super().__init__(name=f"torchestra-watcher-{member.name}-{member.rank}", daemon=True)
        self._member = member
        self._thread = thread

    def run(self) -> None:
        member = self._member
        arena = member.arena
        offset = arena.control(member.rank)
        block = arena.address + offset
        answered = 0
        while not member.closed:
            asked = control.await_question(member.context, block + at.ASKED, answered)
            if asked == answered or member.closed:
                continue
            text = f"is at {call_site(self._thread.ident)}"
            control.tell(block + at.ANSWER_LENGTH, arena.set_text(offset + at.ANSWER, at.ANSWER_BYTES, text))
            control.tell(block + at.ANSWERED, asked)
            answered = asked
