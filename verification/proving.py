"""Search a case as far as time permits, and a mutation's case until it is found."""

from __future__ import annotations

from verification.cases import Case, case_named, library
from verification.mutations import MUTATIONS, REDUNDANT, Mutation
from verification.ranks import Ranks
from verification.search import Outcome, search, walk

_STATES, _SECONDS = 150_000, 60.0
_FEW_STATES, _WALK_SECONDS = 3_000, 10.0


def prove(case: Case, ranks: Ranks, deep: bool) -> Outcome:
    """Search one case: all states if ``deep``, else up to a number of states and seconds."""
    make = case.make(library(), ranks)
    outcome = search(make) if deep else search(make, _STATES, _SECONDS)
    if outcome.complete or outcome.violation:
        return outcome
    walked = walk(make, _WALK_SECONDS)
    outcome.violation, outcome.path = walked.violation, walked.path
    outcome.steps += walked.steps
    return outcome


def find(mutation: Mutation, ranks: Ranks) -> Outcome:
    """Search a mutation's case for a violation."""
    make = case_named(mutation.case).make(library(mutation.edit()), ranks)
    outcome = search(make, _FEW_STATES)
    if outcome.violation is None and not outcome.complete:
        outcome = walk(make, _WALK_SECONDS)
    return outcome if outcome.violation else search(make, _STATES, _SECONDS)


def ranks_of(case: Case) -> Ranks:
    """Return ranks in an arena of their own."""
    return Ranks(case.size, case.sizes)


def prove_named(name: str, deep: bool) -> Outcome:
    """Search the case with a name, for a worker process."""
    case = case_named(name)
    return prove(case, ranks_of(case), deep)


def find_numbered(number: int) -> Outcome:
    """Search the case of a mutation by its number, redundant ones last; for a worker process."""
    mutation = (MUTATIONS + REDUNDANT)[number]
    return find(mutation, ranks_of(case_named(mutation.case)))
