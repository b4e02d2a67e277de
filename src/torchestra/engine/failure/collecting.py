"""Collect the facts about the ranks of a group on this host: from the arena, the ranks and the system.

Ranks that are processes are asked, and answer within half a second unless they are stopped or something holds
their interpreter's lock; meanwhile the system is asked about those that the others wait for. Everything has a
time limit, and nothing here waits for a lock that a rank may hold.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import (
    Call,
    PastMessage,
    PendingMessage,
    Presence,
    Process,
    Program,
    RankFacts,
    UserFrame,
)
from torchestra.engine.diagnosis.last_seen import read_last_seen
from torchestra.engine.diagnosis.process_samples import ProcessSamples, RankProcess
from torchestra.engine.diagnosis.program import describe_programs, program_identity
from torchestra.engine.diagnosis.stack_dump import StackFile, read_stack
from torchestra.engine.failure.liveness import Peers, pid_namespace
from torchestra.engine.failure.stack_reporter import read_answer
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.flight_entries import FlightEntry, RankRecord
from torchestra.engine.recorder.flight_record import Readable, read_rank, tick_scale
from torchestra.system.deadline import Deadline

_ANSWER_SECONDS = 0.5
_MAX_ANSWER_SECONDS = 2.0  # for ranks that are ready to run, and do not get a processor
_SAMPLE_SECONDS = 0.2
_LOOK_SECONDS = 0.002
_ENTRIES = 16  # of a rank, its last: enough to find the message that it hangs in
_MESSAGES = 8  # of these, whose tags are compared
_MAX_SAMPLED = 32
_MAX_STACKS = 4


class RankView(Protocol):
    """The rank that collects (membership/rank_context.py)."""

    arena: Arena
    rank: int
    host: str
    global_ranks: tuple[int, ...]
    peers: Peers | None
    program: threading.Thread


def collect_facts(view: RankView, ranks: Iterable[int], dead: Collection[int], site: str) -> list[RankFacts]:
    """Return the facts about some ranks of this host.

    Takes some hundredths of a second; a fifth if ranks are late, and three quarters if one does not answer;
    longer on a busy host.

    Args:
        ranks: by local rank.
        dead: those that are known to have died.
        site: the line of the program of the rank that collects.
    """
    arena, ranks = view.arena, list(ranks)
    scale = tick_scale(arena)
    records = {rank: read_rank(arena, rank, scale, _ENTRIES) for rank in ranks}
    here = [rank for rank in ranks if rank not in dead and records[rank].presence == "present"]
    system = sample(arena, _late(records, here))
    programs = _programs_of_threads(view, here)
    if view.rank in programs:
        programs[view.rank] = replace(programs[view.rank], location=f"is at {site}")
    answers, silent_ones = _ask(arena, [rank for rank in here if rank not in programs])
    for rank, process in silent_ones.items():
        system[rank] = replace(
            system.get(rank, process), reporter_sleeps=process.reporter_sleeps, in_futex=process.in_futex
        )
    programs.update(answers)
    silent = [rank for rank in here if rank not in programs]
    stacks = {
        rank: _stacks(arena, rank) for rank in silent[:_MAX_STACKS] if not _is_stopped(system.get(rank))
    }
    found = []
    for rank in ranks:
        end_reason = (
            ""
            if rank not in dead
            else "its process is gone"
            if view.peers is None
            else view.peers.end_reason(rank)
        )
        facts = facts_of_record(records[rank], scale.now, crosses=_crosses(arena), dead=rank in dead)
        found.append(
            replace(
                facts,
                host=view.host,
                global_rank=global_rank(facts.rank, view.global_ranks),
                process=program_identity(arena, rank),
                end_reason=end_reason,
                program=programs.get(rank),
                message=_awaited_message(records[rank], scale.now, programs.get(rank)),
                stack=stacks.get(rank, _NO_STACKS)[0],
                other_stacks=stacks.get(rank, _NO_STACKS)[1],
                last_seen=read_last_seen(arena, rank),
                system=system.get(rank),
            )
        )
    return found


def global_rank(rank: int, global_ranks: Sequence[int]) -> int:
    """Return the global number of a rank of a group, for facts; -1: it is the same."""
    return global_ranks[rank] if global_ranks and global_ranks[rank] != rank else -1


def places_of(view: RankView, ranks: Sequence[int], site: str) -> dict[int, str]:
    """Return where the programs of some ranks are now: ``is at file:line in function``.

    Ranks that do not answer within half a second are left out.

    Args:
        ranks: by local rank.
        site: as of collect_facts().
    """
    found = {view.rank: f"is at {site}"}
    others = [rank for rank in ranks if rank != view.rank]
    here = _programs_of_threads(view, others)
    answers, _ = _ask(view.arena, [rank for rank in others if rank not in here])
    found.update({rank: program.location for rank, program in {**here, **answers}.items()})
    return {rank: found[rank] for rank in ranks if rank in found}


def facts_of_record(record: RankRecord, now: float, *, crosses: bool, dead: bool) -> RankFacts:
    """Return the facts that the flight record has of a rank.

    Args:
        now: by the record's clock.
        crosses: the group has several hosts.
    """
    presence: Presence = "dead" if dead else "absent" if record.presence == "unknown" else record.presence
    last = record.last_operation
    call = None
    if last is not None and not (last.number == 1 and last.state == "done" and not crosses):
        done = record.operations if last.state == "done" else record.operations[:-1]
        before = tuple(dict.fromkeys(str(entry) for entry in done))
        since = now - (last.started if last.ended is None else last.ended)
        call = Call(last.number, str(last), last.state, since, before, record.waiting_for)
    failed = record.messages[-1] if record.messages and record.messages[-1].state == "failed" else None
    if failed is not None and last is not None and (failed.ended or 0.0) < last.started:
        failed = None  # it has called others since
    return RankFacts(
        rank=record.rank,
        presence=presence,
        doing=_doing(record, now, crosses),
        call=call,
        message=_awaited_message(record, now, None),
        failed_message=str(failed) if failed is not None else "",
        messages=tuple(_past(each, now) for each in record.messages[-_MESSAGES:] if each.state != "failed"),
    )


def _past(entry: FlightEntry, now: float) -> PastMessage:
    ended = None if entry.ended is None else now - entry.ended
    return PastMessage(entry.kind, entry.peer, entry.tag or 0, str(entry), now - entry.started, ended)


def _awaited_message(record: RankRecord, now: float, program: Program | None) -> PendingMessage | None:
    """Return the message that a rank waits for: in the call that began it, or in torchestra since."""
    entry = record.running_message
    if entry is None and program is not None and program.inside:
        last = record.last_operation
        running = [each for each in record.messages if each.state == "running"]
        if running and (last is None or last.state != "running"):
            entry = running[0]
    if entry is None:
        return None
    return PendingMessage(entry.kind, entry.peer, entry.tag or 0, str(entry), now - entry.started)


def _doing(record: RankRecord, now: float, crosses: bool) -> str:
    """Return the last operation of a rank, and the message that it blocks in."""
    last = record.last_operation
    if last is None or (last.number == 1 and last.state == "done" and not crosses):
        words = "has called nothing yet"  # the first operation of a group on one host is its own
    elif last.state == "running":
        words = f"is in operation {last.number}, {last}, for {now - last.started:.1f} s"
        awaited = record.waiting_for if record.waiting_for is not None else last.waited_for
        if awaited is not None:
            words += f", and waits for rank {awaited}"
        elif crosses and record.waiting_since is not None:
            words += ", and waits for other hosts"
    else:
        ended = now - (last.ended or now)
        how = "" if last.state == "done" else ", which failed"
        words = f"last called operation {last.number}, {last}{how}, {ended:.1f} s ago"
    if (message := record.running_message) is not None:
        words += f", and is in {message} for {now - message.started:.1f} s"
    return words


def _crosses(arena: Arena) -> bool:
    return arena.load_word(at.HEADER_GROUP_SIZE) > 0


def _programs_of_threads(view: RankView, ranks: Sequence[int]) -> dict[int, Program]:
    """Return what the programs do that are threads of this process: this rank's, and perhaps all."""
    threads = {view.rank: view.program}
    if view.peers is not None and view.peers.are_threads:
        for rank in ranks:
            threads[rank] = view.peers.thread(rank) or threading.Thread()
    asked = [rank for rank in ranks if rank in threads]
    return dict(zip(asked, describe_programs([threads[rank] for rank in asked], view.arena), strict=True))


def _late(records: dict[int, RankRecord], ranks: Sequence[int]) -> list[int]:
    """Return the ranks that others may wait for, in a collective or for a message."""
    last = {rank: records[rank].last_operation for rank in ranks}
    newest = max((each.number for each in last.values() if each is not None), default=0)
    return [
        rank
        for rank in ranks
        if (entry := last[rank]) is None or entry.state != "running" or entry.number < newest
    ]


def sample(arena: Readable, late: Sequence[int]) -> dict[int, Process]:
    """Ask the system about ranks that others wait for, before anything disturbs them.

    Takes a fifth of a second.
    """
    samples = _samples(arena, late)
    for _ in Deadline(_SAMPLE_SECONDS if late else 0.0).polls(_LOOK_SECONDS):
        samples.look()
    return {rank: replace(each, reporter_sleeps=False) for rank, each in samples.results().items()}


def _ask(arena: Arena, asked: list[int]) -> tuple[dict[int, Program], dict[int, Process]]:
    """Ask ranks that are processes what they do.

    Returns:
        By rank, the answers that came in time, and what the system told of the others meanwhile.
    """
    samples = _samples(arena, asked)
    numbers = {
        rank: shared_words.increment_and_wake(arena.address + arena.control(rank) + at.ASKED)
        for rank in asked
    }
    answers: dict[int, Program] = {}
    # A step counts as long as it should take: where the host is busy, the ranks that answer get longer, too.
    deadline = Deadline(_MAX_ANSWER_SECONDS, _LOOK_SECONDS)
    for _ in deadline.polls(_LOOK_SECONDS):
        for rank in asked:
            block = arena.control(rank)
            if rank not in answers and (
                shared_words.load_acquire(arena.address + block + at.ANSWERED) >= numbers[rank]
            ):
                answers[rank] = read_answer(arena, rank)
        samples.look()
        waiting = [rank for rank in asked if rank not in answers and not samples.is_stopped(rank)]
        if deadline.elapsed() >= _ANSWER_SECONDS:
            waiting = [rank for rank in waiting if samples.wants_processor(rank)]
        if not waiting:
            break
    told = samples.results()
    return answers, {rank: told[rank] for rank in asked if rank not in answers and rank in told}


def _samples(arena: Readable, ranks: Sequence[int]) -> ProcessSamples:
    processes = ((rank, _process(arena, rank)) for rank in ranks[:_MAX_SAMPLED])
    return ProcessSamples({rank: process for rank, process in processes if process is not None})


def _process(arena: Readable, rank: int) -> RankProcess | None:
    """Return the process of a rank, if it has the same number here."""
    block = arena.layout.control + rank * at.CONTROL_BYTES
    if arena.load_word(block + at.PID_NAMESPACE) != pid_namespace():
        return None
    return RankProcess(
        *(arena.load_word(block + each) for each in (at.PROCESS, at.PROGRAM_TID, at.REPORTER_TID))
    )


def _is_stopped(process: Process | None) -> bool:
    return process is not None and process.stopped


_Frames = tuple[UserFrame, ...]
_NO_STACKS: tuple[_Frames, _Frames] = (), ()


def _stacks(arena: Arena, rank: int) -> tuple[_Frames, _Frames]:
    """Return the lines of the program of a rank that does not answer, innermost first.

    And the innermost lines of its other threads.
    """
    process, block = _process(arena, rank), arena.control(rank)
    if process is None:
        return _NO_STACKS
    offered = StackFile(
        arena.load_word(block + at.STACK_SIGNAL), arena.load_word(block + at.STACK_DESCRIPTOR)
    )
    stacks = read_stack(process.pid, arena.load_word(block + at.PROGRAM_IDENT), offered)
    others = tuple(frames[0] for is_program, frames in stacks if not is_program)
    return next((frames for is_program, frames in stacks if is_program), ()), others
