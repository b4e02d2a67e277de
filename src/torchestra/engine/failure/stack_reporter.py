"""The thread that answers for a rank when others ask where its program is."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.callsites import call_site


class StackReporter(threading.Thread):
    """Answer peers that ask where this rank's program is: one sleeping thread per group and rank.

    It sleeps on the ASKED word and is woken only when a peer's wait has timed out.

    Args:
        arena, rank: whose words are asked.
        program: the thread to report on.
        is_closed: tells whether the rank has left the group, which ends this thread when it is next asked.
    """

    def __init__(
        self, arena: Arena, rank: int, name: str, program: threading.Thread, is_closed: Callable[[], bool]
    ) -> None:
        super().__init__(name=f"torchestra-stack-reporter-{name}-{rank}", daemon=True)
        self._arena, self._offset = arena, arena.control(rank)
        self._program, self._is_closed = program, is_closed

    def run(self) -> None:
        arena, offset = self._arena, self._offset
        block = arena.address + offset
        answered = 0
        while not self._is_closed():
            ticket = shared_words.sleep_while(block + at.ASKED, answered)
            if ticket == answered or self._is_closed():
                continue
            text = f"is at {call_site(self._program.ident)}"
            length = arena.set_text(offset + at.ANSWER, at.ANSWER_BYTES, text)
            shared_words.store_ordered(block + at.ANSWER_LENGTH, length)
            shared_words.store_ordered(block + at.ANSWERED, ticket)
            answered = ticket
