"""Search all cases, and check that every mutation is found: `make prove`.

The exit code is 1 if a property does not hold, or a mutation is not found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.table import Table

from verification.cases import CASES, Case, case_named
from verification.mutations import MUTATIONS, REDUNDANT
from verification.proving import find, find_numbered, prove, prove_named, ranks_of
from verification.ranks import Ranks
from verification.report import show_path
from verification.search import Outcome


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m verification", description=__doc__)
    parser.add_argument("--case", help="this case alone, with the events of what it finds")
    parser.add_argument("--mutation", type=int, help="this mutation alone, with the events that show it")
    parser.add_argument("--deep", action="store_true", help="all states of all cases, however long it takes")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    if options.case is not None:
        case = case_named(options.case)
        ranks = ranks_of(case)
        return _show(console, case, ranks, prove(case, ranks, options.deep))
    if options.mutation is not None:
        mutation = MUTATIONS[options.mutation]
        console.print(f"{mutation.kernel}: {mutation.old!r} becomes {mutation.new!r}")
        case = case_named(mutation.case)
        ranks = ranks_of(case)
        return _show(console, case, ranks, find(mutation, ranks))
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        names = [case.name for case in CASES]
        holds = _cases(console, names, list(pool.map(prove_named, names, [options.deep] * len(names))))
        found = _mutations(console, list(pool.map(find_numbered, range(len(MUTATIONS + REDUNDANT)))))
    return 0 if holds and found else 1


def _show(console: Console, case: Case, ranks: Ranks, outcome: Outcome) -> int:
    console.print(f"{case.name}: {outcome.states:,} states, {outcome.steps:,} steps, {outcome.seconds:.1f} s")
    if outcome.violation is None:
        console.print("complete, and nothing found" if outcome.complete else "nothing found; not complete")
        return 0
    show_path(outcome, ranks, console)
    return 1


def _cases(console: Console, names: list[str], outcomes: list[Outcome]) -> bool:
    table = Table("case", "states", "steps", "seconds", "searched", "result")
    for name, outcome in zip(names, outcomes, strict=True):
        rules = case_named(name).rules
        bound = "" if rules.preemptions is None else f", {rules.preemptions} pre-emptions"
        table.add_row(
            name,
            f"{outcome.states:,}",
            f"{outcome.steps:,}",
            f"{outcome.seconds:.1f}",
            ("all" if outcome.complete else "a part, and random paths") + bound,
            str(outcome.violation or "holds"),
        )
    console.print(table)
    return all(outcome.violation is None for outcome in outcomes)


def _mutations(console: Console, outcomes: list[Outcome]) -> bool:
    table = Table("", "mutation of", "case", "result")
    wrong = []
    for number, (mutation, outcome) in enumerate(zip(MUTATIONS + REDUNDANT, outcomes, strict=True)):
        harmless = number >= len(MUTATIONS)
        if harmless != (outcome.violation is None):
            wrong.append(number)
        result = str(outcome.violation or ("redundant" if harmless else "NOT FOUND"))
        table.add_row(str(number), mutation.kernel, mutation.case, result)
    console.print(table)
    expected = len(outcomes) - len(wrong)
    console.print(f"{expected} of {len(outcomes)} mutations as expected; {len(REDUNDANT)} change nothing")
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
