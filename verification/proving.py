"""Search a case as far as time permits, and a mutation's case until it is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from verification.cases import CASES, Case
from verification.mutations import MUTATIONS, REDUNDANT, Mutation
from verification.program import unchanged
from verification.protocols.agreement import ArenaAgreement
from verification.protocols.cases import PROTOCOL_MUTATIONS, PROTOCOL_REDUNDANT, PROTOCOLS
from verification.protocols.hosts import HostAgreement
from verification.protocols.passing import Passing
from verification.protocols.product import Mutation as ProtocolMutation
from verification.protocols.progress import Progress
from verification.protocols.registers import RegisterReads
from verification.ranks import Ranks
from verification.report import names_of
from verification.search import Make, Outcome, search, walk

_STATES, _SECONDS = 150_000, 40.0
_BOUNDED_STATES = 20_000
_FEW_STATES, _FIRST_WALK_SECONDS, _WALK_SECONDS = 3_000, 1.0, 10.0
_PROTOCOL_SECONDS, _PROTOCOL_WALK_SECONDS = 10.0, 2.0

AnyCase = Case | ArenaAgreement | HostAgreement | Passing | Progress | RegisterReads
ALL_CASES: list[AnyCase] = [*CASES, *PROTOCOLS]
ALL_REDUNDANT: list[Mutation | ProtocolMutation] = [*REDUNDANT, *PROTOCOL_REDUNDANT]
ALL_MUTATIONS: list[Mutation | ProtocolMutation] = [*MUTATIONS, *PROTOCOL_MUTATIONS, *ALL_REDUNDANT]
"""The redundant ones last."""


def case_named(name: str) -> AnyCase:
    """Return the case with a name."""
    return next(case for case in ALL_CASES if case.name == name)


class Start:
    """A case that is ready to be searched.

    Args:
        mutation: breaks it.

    Attributes:
        make: makes the first state.
        size: how many ranks there are.
        name_of: names a word, for reports.
        seconds, walk_seconds: for how long to search, and to take random paths.
    """

    make: Make
    size: int
    seconds, walk_seconds = _SECONDS, _WALK_SECONDS
    name_of: Callable[[int], str]

    def __init__(self, case: AnyCase, mutation: Mutation | ProtocolMutation | None = None) -> None:
        self.size = case.size + getattr(case, "joiners", 0)
        if isinstance(case, Case):
            self._ranks = ranks_of(case)  # the arena lives as long as this
            edit = mutation.edit() if isinstance(mutation, Mutation) else unchanged
            self.make, self.name_of = case.make(case.kernels(edit), self._ranks), names_of(self._ranks)
        else:
            assert not isinstance(mutation, Mutation)
            self.make, self.name_of = case.make(mutation), case.name_of
            self.seconds, self.walk_seconds = _PROTOCOL_SECONDS, _PROTOCOL_WALK_SECONDS


def prove(start: Start, deep: bool) -> Outcome:
    """Search one case: all states if ``deep``, else up to a number of states and seconds."""
    outcome = search(start.make) if deep else search(start.make, _STATES, start.seconds)
    if outcome.complete or outcome.violation:
        return outcome
    walked = walk(start.make, start.walk_seconds)
    outcome.violation, outcome.path = walked.violation, walked.path
    outcome.steps += walked.steps
    return outcome


def find(mutation: Mutation | ProtocolMutation) -> Outcome:
    """Search a mutation's case for a violation.

    Of a protocol first with few pre-emptions and stale reads: what is wrong mostly shows with none or one
    (Musuvathi and Qadeer, *Iterative Context Bounding for Systematic Testing of Multithreaded Programs*,
    PLDI 2007).
    """
    case = case_named(mutation.case)
    if not isinstance(case, Case):
        for most, stale in ((0, 0), (1, 0), (0, 1), (1, 1)):
            bounded = replace(case, rules=replace(case.rules, preemptions=most, stale=stale))
            outcome = search(Start(bounded, mutation).make, _BOUNDED_STATES, _SECONDS)
            if outcome.violation is not None:
                return outcome
    start = Start(case_named(mutation.case), mutation)
    if isinstance(case, Case):  # some random paths are quicker than a few states where states are large
        outcome = walk(start.make, _FIRST_WALK_SECONDS)
        if outcome.violation is not None:
            return outcome
    outcome = search(start.make, _FEW_STATES)
    if outcome.violation is None and not outcome.complete:
        outcome = walk(start.make, start.walk_seconds)
    return outcome if outcome.violation else search(start.make, _STATES, _SECONDS)


def ranks_of(case: Case) -> Ranks:
    """Return ranks in an arena of their own."""
    return Ranks(case.size, case.sizes)


def prove_named(name: str, deep: bool) -> Outcome:
    """Search the case with a name, for a worker process; tell the seconds of all searches and paths."""
    began = time.process_time()
    outcome = prove(Start(case_named(name)), deep)
    outcome.seconds = time.process_time() - began
    return outcome


def find_numbered(number: int) -> Outcome:
    """Search the case of a mutation by its number, likewise."""
    began = time.process_time()
    outcome = find(ALL_MUTATIONS[number])
    outcome.seconds = time.process_time() - began
    return outcome
