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

from verification.proving import (
    ALL_CASES,
    ALL_MUTATIONS,
    ALL_REDUNDANT,
    Start,
    case_named,
    find_numbered,
    prove,
    prove_named,
)
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
        start = Start(case_named(options.case))
        return _show(console, options.case, start, prove(start, options.deep))
    if options.mutation is not None:
        mutation = ALL_MUTATIONS[options.mutation]
        console.print(f"{mutation.subject}: {mutation.old!r} becomes {mutation.new!r}")
        start = Start(case_named(mutation.case), mutation)
        return _show(console, mutation.case, start, find_numbered(options.mutation))
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        names = [case.name for case in ALL_CASES]
        # All at once, so that no processor waits, and first those that take long: cases, and of the mutations
        # those that nothing is found of, the last ones.
        proving = [pool.submit(prove_named, name, options.deep) for name in names]
        finding = [pool.submit(find_numbered, number) for number in reversed(range(len(ALL_MUTATIONS)))]
        holds = _cases(console, names, [each.result() for each in proving])
        found = _mutations(console, [each.result() for each in reversed(finding)])
    return 0 if holds and found else 1


def _show(console: Console, name: str, start: Start, outcome: Outcome) -> int:
    console.print(f"{name}: {outcome.states:,} states, {outcome.steps:,} steps, {outcome.seconds:.1f} s")
    if outcome.violation is None:
        console.print("complete, and nothing found" if outcome.complete else "nothing found; not complete")
        return 0
    show_path(outcome, start.size, start.name_of, console)
    return 1


def _cases(console: Console, names: list[str], outcomes: list[Outcome]) -> bool:
    table = Table("case", "states", "steps", "seconds", "searched", "result")
    for name, outcome in zip(names, outcomes, strict=True):
        rules = case_named(name).rules
        bounds = {"pre-emptions": rules.preemptions, "stale reads": getattr(rules, "stale", None)}
        bound = "".join(f", {most} {what}" for what, most in bounds.items() if most is not None)
        table.add_row(
            name,
            f"{outcome.states:,}",
            f"{outcome.steps:,}",
            f"{outcome.seconds:.1f}",
            ("all" if outcome.complete else "a part, and random paths") + bound,
            str(outcome.violation or "holds"),
        )
    console.print(table)
    states, steps = (sum(getattr(each, what) for each in outcomes) for what in ("states", "steps"))
    complete = sum(outcome.complete for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    console.print(
        f"{len(outcomes)} cases, {complete} of them whole: {states:,} states, {steps:,} steps, "
        f"{seconds:.0f} s of a processor"
    )
    return all(outcome.violation is None for outcome in outcomes)


def _mutations(console: Console, outcomes: list[Outcome]) -> bool:
    table = Table("", "mutation of", "case", "seconds", "result")
    wrong = []
    for number, (mutation, outcome) in enumerate(zip(ALL_MUTATIONS, outcomes, strict=True)):
        harmless = number >= len(ALL_MUTATIONS) - len(ALL_REDUNDANT)
        if harmless != (outcome.violation is None):
            wrong.append(number)
        result = str(outcome.violation or ("redundant" if harmless else "NOT FOUND"))
        table.add_row(str(number), mutation.subject, mutation.case, f"{outcome.seconds:.1f}", result)
    console.print(table)
    expected = len(outcomes) - len(wrong)
    seconds = sum(outcome.seconds for outcome in outcomes)
    console.print(
        f"{expected} of {len(outcomes)} mutations as expected, {len(ALL_REDUNDANT)} of which change nothing; "
        f"{seconds:.0f} s of a processor"
    )
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
