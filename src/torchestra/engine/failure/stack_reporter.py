"""The thread that answers for a rank when others ask where its program is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.recorder.callsites import call_site

if TYPE_CHECKING:
    from torchestra.engine.membership.rank_context import RankContext

__all__ = ["StackReporter"]


class StackReporter(threading.Thread):
    """Answers peers that ask where this rank's program is: one sleeping thread per group and rank.

    It sleeps on the ASKED word and is woken only when a peer's wait has timed out.
    """

    def __init__(self, context: RankContext, thread: threading.Thread) -> None:
        super().__init__(name=f"torchestra-watcher-{context.name}-{context.rank}", daemon=True)
        self._context = context
        self._thread = thread

    def run(self) -> None:
        context = self._context
        arena = context.arena
        offset = arena.control(context.rank)
        block = arena.address + offset
        answered = 0
        while not context.closed:
            asked = shared_words.sleep_while(block + at.ASKED, answered)
            if asked == answered or context.closed:
                continue
            text = f"is at {call_site(self._thread.ident)}"
            shared_words.store_ordered(
                block + at.ANSWER_LENGTH, arena.set_text(offset + at.ANSWER, at.ANSWER_BYTES, text)
            )
            shared_words.store_ordered(block + at.ANSWERED, asked)
            answered = asked
