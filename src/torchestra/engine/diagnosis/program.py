"""What the program of a rank of this process does: its lines, a lock that it waits for, its other groups."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import GroupWait, Program, UserFrame, identity
from torchestra.engine.diagnosis.last_seen import RankProgram
from torchestra.engine.diagnosis.lock_waits import ThreadStack, find_lock_wait
from torchestra.engine.diagnosis.source_lines import loops_at
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.callsites import (
    call_site,
    exception_text,
    is_of_the_program,
    is_of_torchestra,
    raise_site,
)
from torchestra.engine.recorder.flight_record import Readable, read_rank, tick_scale
from torchestra.system.thread_frames import current_exceptions, current_frames, without_collections

_STILL_SECONDS = 0.01
_MAX_FRAMES = 8
_MAX_MISSING = 8
_ENTRIES = 2


class ObservedRank(RankProgram, Protocol):
    """A rank of this process, in a group on this host (membership/rank_context.py)."""

    name: str
    closed: bool
    group_ranks: Sequence[int]


_observed: weakref.WeakSet[ObservedRank] = weakref.WeakSet()
_lock = threading.Lock()


def observe(rank: ObservedRank) -> None:
    """Have :func:`describe_programs` look at a rank's group, too, as long as the rank is in it."""
    with _lock:
        _observed.add(rank)


def describe_programs(programs: Sequence[threading.Thread], group: Arena | None = None) -> list[Program]:
    """Return what threads of this process do that run a rank's program.

    Takes some hundredths of a second, for it looks twice.

    Args:
        programs: the threads; the calling one may be among them.
        group: the group of whoever asks, which is not among the other groups.
    """
    locations = [
        f"is at {call_site(program.ident or 0)}" for program in programs
    ]  # now, not when it looks again
    stacks = _stacks()
    try:
        with without_collections():
            return [
                _describe(program, location, stacks, group)
                for program, location in zip(programs, locations, strict=True)
            ]
    finally:
        stacks.clear()  # frames keep alive what their functions hold


def _describe(
    program: threading.Thread, location: str, stacks: dict[int, ThreadStack], group: Arena | None
) -> Program:
    thread = program.ident or 0
    if thread not in stacks or not program.is_alive():  # numbers of threads are used again
        return Program("has not come" if program.ident is None else "has ended")
    return Program(
        location=location,
        frames=_program_frames(stacks[thread].frame),
        inside=stacks[thread].inside,
        lock=find_lock_wait(stacks, thread),
        exception=_handled(thread),
        groups=_other_groups(program, group),
    )


def _stacks() -> dict[int, ThreadStack]:
    """Return all threads, and whether they stand still."""
    own = threading.get_ident()
    before = {thread: (frame, frame.f_lasti) for thread, frame in current_frames().items()}
    time.sleep(_STILL_SECONDS)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    with without_collections():
        for thread, frame in current_frames().items():
            still = thread != own and thread in before and before[thread] == (frame, frame.f_lasti)
            found[thread] = ThreadStack(names.get(thread, "?"), frame, still, _inside(frame))
    # Or this function's own frame, which is among them, keeps them alive, and itself.
    before.clear()
    del frame
    return found


def _inside(innermost: FrameType) -> str:
    """Return the function of torchestra that the innermost line of the program has called, or nothing."""
    called = ""
    frame: FrameType | None = innermost
    while frame is not None and not is_of_the_program(frame):
        if is_of_torchestra(frame):
            called = frame.f_code.co_name
        frame = frame.f_back
    return called if frame is not None else ""


def _program_frames(innermost: FrameType) -> tuple[UserFrame, ...]:
    found: list[UserFrame] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < _MAX_FRAMES:
        if is_of_the_program(frame):
            code = frame.f_code
            file, line, first = code.co_filename, frame.f_lineno or 0, code.co_firstlineno
            found.append(UserFrame(file, line, code.co_name, first, loops_at(file, line)))
        frame = frame.f_back
    return tuple(found)


def _handled(thread: int) -> str:
    """Return the exception that a thread handles, and the line of the program that raised it."""
    found = current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # Python 3.12 has the exception itself
    if error is None:
        return ""
    site = raise_site(error)
    return f"{exception_text(error)}{f', raised at {site}' if site else ''}"


def _other_groups(program: threading.Thread, group: Arena | None) -> tuple[GroupWait, ...]:
    """Return the operations that run in other groups of a rank, and who has not come to them."""
    with _lock:
        members = list(_observed)
    waits = []
    for member in members:
        if member.program is not program or member.closed or member.arena is group:
            continue
        arena = member.arena
        last = read_rank(arena, member.rank, tick_scale(arena), _ENTRIES).last_operation
        if last is None or last.state != "running":
            continue
        absent = [
            program_identity(arena, rank)
            for rank in range(arena.layout.size)
            if rank != member.rank and arena.progress(rank) < last.number << at.STEP_BITS
        ]
        if (
            arena.load_word(at.HEADER_GROUP_SIZE) == 0
        ):  # else the record's numbers are not those of the arena's steps
            waits.append(GroupWait(member.name, str(last), tuple(absent[:_MAX_MISSING])))
    return tuple(waits)


def program_identity(arena: Readable, rank: int) -> str:
    """Return what tells the program of a rank apart from all others on this host."""
    block = arena.layout.control + rank * at.CONTROL_BYTES
    words = (arena.load_word(block + offset) for offset in (at.PID_NAMESPACE, at.PROCESS, at.PROGRAM_TID))
    return identity(*words)
