"""Test the checker of the kernels: it knows weak memory, finds what is broken, and nothing in the kernels.

`make prove` searches all cases and mutations; here are some small ones.
"""

from __future__ import annotations

import importlib

import pytest

from torchestra.engine.native.atomics import (
    fetch_add,
    full_fence,
    load,
    load_acquire,
    load_ordered,
    store,
    store_ordered,
    store_release,
)
from verification.cases import Case, library
from verification.coverage import unsearched
from verification.drivers import driver, expect
from verification.mutations import MUTATIONS, REDUNDANT, Mutation
from verification.program import WEAKER
from verification.proving import Start, case_named, find
from verification.ranks import Ranks
from verification.search import Outcome, search, walk
from verification.violations import DataRace, Deadlock, WrongResult

load_relaxed, store_relaxed = WEAKER["load_relaxed"], WEAKER["store_relaxed"]


def outcome_of(program: object, size: int = 2) -> Outcome:
    """Search ranks that run a program of (words, rank)."""
    case = Case("litmus", size, program, lambda ranks, rank: (ranks.shared_words(8), rank))  # type: ignore[arg-type]
    return search(case.make(library(), Ranks(size)))


@driver
def message_passing(words, rank):
    if rank == 0:
        store(words, 1)
        store_release(words + 8, 1)
    elif load_acquire(words + 8) == 1:
        expect(load(words), 1)
    return 0


@driver
def relaxed_message_passing(words, rank):
    if rank == 0:
        store(words, 1)
        store_relaxed(words + 8, 1)
    elif load_acquire(words + 8) == 1:
        expect(load(words), 1)
    return 0


@driver
def store_buffering(words, rank):
    """Both see the old value, which only sequentially consistent accesses forbid."""
    store_release(words + 8 * rank, 1)
    seen = load_acquire(words + 8 * (1 - rank))
    fetch_add(words + 16, seen)
    fetch_add(words + 24, 1)
    if load_ordered(words + 24) == 2:
        expect(load_ordered(words + 16) > 0, 1)
    return 0


@driver
def ordered_store_buffering(words, rank):
    store_ordered(words + 8 * rank, 1)
    seen = load_ordered(words + 8 * (1 - rank))
    fetch_add(words + 16, seen)
    fetch_add(words + 24, 1)
    if load_ordered(words + 24) == 2:
        expect(load_ordered(words + 16) > 0, 1)
    return 0


@driver
def fenced_store_buffering(words, rank):
    store_release(words + 8 * rank, 1)
    full_fence()
    seen = load_acquire(words + 8 * (1 - rank))
    fetch_add(words + 16, seen)
    fetch_add(words + 24, 1)
    if load_ordered(words + 24) == 2:
        expect(load_ordered(words + 16) > 0, 1)
    return 0


@driver
def independent_reads(words, rank):
    """Ranks 2 and 3 may see two writes in different orders, unless all is sequentially consistent."""
    if rank < 2:
        store_release(words + 8 * rank, 1)
    elif rank == 2:
        if load_acquire(words) == 1:
            fetch_add(words + 16, load_acquire(words + 8) == 0)
    elif load_acquire(words + 8) == 1:
        fetch_add(words + 16, load_acquire(words) == 0)
    if rank >= 2:
        expect(load_ordered(words + 16) < 2, 1)
    return 0


def test_message_passing_needs_release_and_acquire() -> None:
    assert outcome_of(message_passing).complete
    assert isinstance(outcome_of(relaxed_message_passing).violation, DataRace)


def test_store_buffering_needs_sequential_consistency() -> None:
    assert isinstance(outcome_of(store_buffering).violation, WrongResult)
    assert outcome_of(ordered_store_buffering).complete
    assert outcome_of(fenced_store_buffering).complete


def test_independent_reads_of_independent_writes_may_differ() -> None:
    assert isinstance(outcome_of(independent_reads, 4).violation, WrongResult)


@pytest.mark.parametrize(
    "name",
    [
        "broadcast",
        "broadcast, counts differ",
        "reduce_scatter",
        "messages without a record",
        "doorbell",
        "record of a wait",
    ],
)
def test_a_case_holds(name: str) -> None:
    outcome = search(Start(case_named(name)).make, 20_000)
    assert outcome.violation is None, outcome.violation


def test_survivors_of_a_crash_can_end_from_every_state() -> None:
    outcome = search(Start(case_named("broadcast, a rank crashes")).make)
    assert outcome.complete
    assert outcome.ends > 10


def test_walks_find_a_lost_wake_up() -> None:
    mutation = next(each for each in MUTATIONS if each.kernel.endswith("end_posted"))
    outcome = walk(Start(case_named(mutation.case), mutation).make, 30)
    assert isinstance(outcome.violation, Deadlock)
    assert outcome.path


@pytest.mark.parametrize("mutation", MUTATIONS[::6], ids=lambda mutation: mutation.kernel)
def test_a_mutation_is_found(mutation: Mutation) -> None:
    outcome = find(mutation)
    assert outcome.violation is not None


def test_there_are_enough_mutations_and_their_texts_occur() -> None:
    assert len(MUTATIONS) >= 30
    for mutation in MUTATIONS + REDUNDANT:
        assert case_named(mutation.case)
        module, _, name = mutation.kernel.rpartition(".")
        kernel = getattr(importlib.import_module(f"torchestra.engine.{module}"), name)
        library(mutation.edit()).tree(kernel)


def test_every_kernel_is_searched_or_it_is_said_why_not() -> None:
    assert unsearched() == []
