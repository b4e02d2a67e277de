"""Diagnoses of hangs, for readers outside of a job: those that its ranks wrote, and of one that hangs now.

From outside nobody is asked: a live job's diagnosis rests on its flight records, on the lines that its ranks
publish every second, and on what the system tells. It knows no locks, and no exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchestra.engine.diagnosis.facts import GroupWait, Program, RankFacts
from torchestra.engine.diagnosis.last_seen import read_last_seen
from torchestra.engine.diagnosis.program import program_identity
from torchestra.engine.diagnosis.rules import diagnose
from torchestra.engine.failure.collecting import facts_of_record, sample
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.monitor.jobs import Group

_HUNG_SECONDS = 1.0
_ENTRIES = 16


def diagnoses_in(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the diagnoses that ranks wrote when they aborted their groups, in a trace of flight records.

    Returns:
        Each group's name and its diagnosis, in one line; of groups that were aborted with one.
    """
    names = {
        event["pid"]: event.get("args", {}).get("group", "?")
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    found = []
    for event in trace["traceEvents"]:
        if event["ph"] == "i" and "why" in event.get("args", {}):
            line = diagnosis_of(str(event["args"]["why"]))
            if line is not None:
                found.append((str(names.get(event["pid"], "?")), line))
    return found


def diagnosis_sentences(diagnoses: Sequence[tuple[str, str]]) -> list[str]:
    """Return groups' names and diagnoses, as from :func:`diagnose_groups`, each as one sentence."""
    return [f"group {group!r}: {line}" for group, line in diagnoses]


def diagnosis_of(why: str) -> str | None:
    """Return the line of an error of a group that is the diagnosis, or None if it has none."""
    return next((line for line in why.splitlines() if line.startswith("diagnosis")), None)


def diagnose_groups(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return why ranks of a running job wait, of each group in which they have waited for a second or more.

    Takes a fifth of a second for each.

    Args:
        groups: all of the job, for a rank may wait in another one.

    Returns:
        The groups' names and their diagnoses, each in one line.
    """
    records = [read_flight_record(group.arena, _ENTRIES) for group in groups]
    waits, ranks = _waits(groups, records), _global_ranks(groups, records)
    found = []
    for group, record in zip(groups, records, strict=True):
        if record.aborted is not None:
            written = diagnosis_of(record.aborted)
            found += [(record.group, written)] if written is not None else []
            continue
        facts = [_facts(group, record, rank, waits, ranks) for rank in range(len(record.ranks))]
        waiting = [each for each in facts if _seconds(each) >= _HUNG_SECONDS]
        if waiting:
            longest = max(waiting, key=_seconds)
            late = [rank for rank, each in enumerate(facts) if each.running is None]
            system = sample(group.arena, late or range(len(facts)))
            facts = [replace(each, system=system.get(rank)) for rank, each in enumerate(facts)]
            found.append((record.group, str(diagnose(facts, longest.rank))))
    return found


def _facts(
    group: Group,
    record: FlightRecord,
    rank: int,
    waits: dict[str, list[GroupWait]],
    global_ranks: dict[str, int],
) -> RankFacts:
    facts = facts_of_record(
        record.ranks[rank],
        record.taken,
        crosses=bool(record.hosts),
        dead=record.ranks[rank].presence == "present" and not group.is_alive(rank),
    )
    process, seen = program_identity(group.arena, rank), read_last_seen(group.arena, rank)
    elsewhere = tuple(wait for wait in waits.get(process, ()) if wait.group != record.group)
    location = f"is last seen {seen}" if seen else "is at an unknown line"
    return replace(
        facts,
        process=process,
        global_rank=-1 if global_ranks.get(process) == facts.rank else global_ranks.get(process, -1),
        end_reason="its process is gone",
        last_seen=seen,
        program=Program(location, inside="an operation" if elsewhere else "", groups=elsewhere),
    )


def _global_ranks(groups: Sequence[Group], records: Sequence[FlightRecord]) -> dict[str, int]:
    """Return by program its rank in the largest group."""
    group, record = max(zip(groups, records, strict=True), key=lambda each: each[1].size)
    return {program_identity(group.arena, index): each.rank for index, each in enumerate(record.ranks)}


def _waits(groups: Sequence[Group], records: Sequence[FlightRecord]) -> dict[str, list[GroupWait]]:
    """Return by program the groups in which it waits."""
    found: dict[str, list[GroupWait]] = {}
    for group, record in zip(groups, records, strict=True):
        for rank, each in enumerate(record.ranks):
            call = each.last_operation
            if call is not None and call.state == "running":
                missing = tuple(_late(group, record, call.number))
                wait = GroupWait(record.group, str(call), missing)
                found.setdefault(program_identity(group.arena, rank), []).append(wait)
    return found


def _late(group: Group, record: FlightRecord, number: int) -> Iterator[str]:
    for rank, each in enumerate(record.ranks):
        last = each.last_operation
        if last is None or last.number < number:
            yield program_identity(group.arena, rank)


def _seconds(facts: RankFacts) -> float:
    """Return for how long a rank has been in an operation or message."""
    calls = (facts.running, facts.message)
    return max((call.seconds for call in calls if call is not None), default=0.0)
