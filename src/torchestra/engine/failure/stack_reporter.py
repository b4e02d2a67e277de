"""The thread that answers for a rank when others ask what its program does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import Program, from_json, to_json
from torchestra.engine.diagnosis.last_seen import publish_last_seen, write_last_seen
from torchestra.engine.diagnosis.program import ObservedRank, describe_programs, observe
from torchestra.engine.diagnosis.stack_dump import offer_stacks
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.callsites import call_site
from torchestra.system.limits import start_thread


class StackReporter(threading.Thread):
    """Answer peers that ask what this rank's program does: one sleeping thread per group and rank.

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
        self._arena, self._rank, self._offset = arena, rank, arena.control(rank)
        self._program, self._is_closed = program, is_closed

    def run(self) -> None:
        arena, offset = self._arena, self._offset
        block = arena.address + offset
        arena.store_word(offset + at.REPORTER_TID, self.native_id or 0)
        answered = 0
        while not self._is_closed():
            asked = shared_words.sleep_while(block + at.ASKED, answered)
            if asked == answered or self._is_closed():
                continue
            write_last_seen(arena, self._rank, self._program)  # at once: what follows takes longer
            text = answer_text(self._describe())
            length = arena.set_text(offset + at.ANSWER, at.ANSWER_BYTES, text)
            shared_words.store_ordered(block + at.ANSWER_LENGTH, length)
            shared_words.store_ordered(block + at.ANSWERED, asked)
            answered = asked

    def _describe(self) -> Program:
        try:
            return describe_programs([self._program], self._arena)[0]
        except Exception as error:  # the program may be anything; the answer must come in any case
            where = f"is at {call_site(self._program.ident)}"
            return Program(f"{where} (no more is known: {type(error).__name__}: {error})")


def offer_facts(rank: ObservedRank, *, answers: bool) -> None:
    """Let others find out what a rank's program does, from now until the rank has left the group.

    Args:
        answers: it is a process with peers on this host, which will ask.
    """
    observe(rank)
    arena, block = rank.arena, rank.arena.control(rank.rank)
    arena.store_word(block + at.PROGRAM_TID, _system_number(rank.program))
    arena.store_word(block + at.PROGRAM_IDENT, rank.program.ident or 0)
    if answers:
        number, descriptor = offer_stacks()
        arena.store_word(block + at.STACK_DESCRIPTOR, descriptor)
        arena.store_word(block + at.STACK_SIGNAL, number)
        publish_last_seen(rank)
        start_thread(StackReporter(arena, rank.rank, rank.name, rank.program, lambda: rank.closed))


def _system_number(thread: threading.Thread) -> int:
    """Return the number of a thread of this process for the system.

    That of the main thread is the process's; Python (before 3.13) has the parent's in a forked child.
    """
    return os.getpid() if thread is threading.main_thread() else thread.native_id or 0


def answer_text(program: Program) -> str:
    """Write an answer, without its last frames and groups where there is no room for them."""
    while len(text := to_json(program).encode(errors="replace")) > at.ANSWER_BYTES:
        if len(program.frames) > 1:
            program = replace(program, frames=program.frames[:-1])
        elif program.groups:
            program = replace(program, groups=program.groups[:-1])
        else:
            program = Program(program.location[: at.ANSWER_BYTES // 8])
    return text.decode()


def read_answer(arena: Arena, rank: int) -> Program:
    """Return what a rank has answered."""
    block = arena.control(rank)
    length = shared_words.load_acquire(arena.address + block + at.ANSWER_LENGTH)
    try:
        return from_json(Program, arena.text(block + at.ANSWER, length))
    except (ValueError, TypeError):  # it answers somebody else just now
        return Program("did not say where it is")
