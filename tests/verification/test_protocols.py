"""Test the search of protocols in Python: small cases hold, and what is broken is found.

`make prove` searches all cases and mutations.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from verification.protocols.cases import PROTOCOL_MUTATIONS, PROTOCOL_REDUNDANT
from verification.protocols.product import Mutation
from verification.proving import Start, case_named, find
from verification.report import show_path
from verification.search import search


def mutation_of(text: str) -> Mutation:
    """Return the mutation of a text of the product."""
    (found,) = (mutation for mutation in PROTOCOL_MUTATIONS if text in mutation.old)
    return found


@pytest.mark.parametrize("name", ["registers", "shrink of hosts", "grow", "descriptors, a process crashes"])
def test_a_protocol_holds_in_all_orders_of_events(name: str) -> None:
    outcome = search(Start(case_named(name)).make)
    assert outcome.violation is None, outcome.violation
    assert outcome.complete
    assert outcome.ends


@pytest.mark.parametrize("name", ["shrink, a rank crashes", "queue"])
def test_a_protocol_holds_in_many_orders_of_events(name: str) -> None:
    outcome = search(Start(case_named(name)).make, 1_000)
    assert outcome.violation is None, outcome.violation


@pytest.mark.parametrize(
    "text", ["missing = set(range(", "word, word) == word", "- self._entered", "self._taken.add"]
)
def test_what_is_broken_is_found(text: str) -> None:
    assert find(mutation_of(text)).violation is not None


def test_the_texts_of_mutations_occur() -> None:
    for mutation in PROTOCOL_MUTATIONS + PROTOCOL_REDUNDANT:
        Start(case_named(mutation.case), mutation)


def test_a_counterexample_is_a_table_of_steps_by_rank_with_lines_of_the_product() -> None:
    mutation = mutation_of("self._taken.add")
    start = Start(case_named(mutation.case), mutation)
    outcome = search(start.make)
    text = io.StringIO()
    show_path(outcome, start.size, start.name_of, Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert "rank 0" in lines[1]
    assert "rank 1" in lines[1]
    assert any("connects" in line and "fd_passing._connect:" in line for line in lines)
    assert "two processes got the descriptor of one rank" in lines[-1]
