"""Simulate replicas of a store, groups on several hosts, their messages, and RPC workers: `make simulate`.

    python -m verification.simulation --seeds 10000                      # so many, of all subjects together
    python -m verification.simulation --subject groups --first 89 --seeds 1    # that seed again, exactly
    python -m verification.simulation --ranks 1000                       # one large group

A failing seed ends the run: printed are the promise that it breaks, the fewest of its faults that suffice,
what happened, and the command that repeats it. The exit code is 1 then.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from verification.simulation import large
from verification.simulation.subjects import SUBJECTS, Failure, check, stay_on_a_core

_SHOWN_EVENTS = 60
_SEEDS_AT_ONCE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m verification.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1800, help="how many worlds, divided among the subjects")
    parser.add_argument("--first", type=int, default=0, help="the first of each subject's")
    parser.add_argument("--subject", choices=SUBJECTS, help="this one alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that run seeds at once")
    parser.add_argument("--ranks", type=int, help="one group of so many ranks, eight to a machine, instead")
    options = parser.parse_args(arguments)
    if options.ranks is not None:
        failure, took = large.check(options.ranks, options.first)
        print(took, flush=True)
        if failure is not None:
            _show(f"{options.ranks} ranks", failure, f"--ranks {options.ranks} --first {failure.seed}")
        return int(failure is not None)
    subjects = list(SUBJECTS) if options.subject is None else [options.subject]
    counts = [len(range(index, options.seeds, len(subjects))) for index in range(len(subjects))]
    # Nothing here has a thread yet, and each worker would import torch for seconds.
    context = multiprocessing.get_context("fork")
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    given = context.SimpleQueue()
    for core in itertools.islice(cores, options.processes):
        given.put(core)
    with ProcessPoolExecutor(
        min(options.processes, options.seeds),
        mp_context=context,
        initializer=stay_on_a_core,
        initargs=(given,),
    ) as pool:
        began = time.monotonic()
        for subject, count in zip(subjects, counts, strict=True):
            if not _simulate(pool, subject, range(options.first, options.first + count)):
                return 1
    _tell("all", options.seeds, began)
    return 0


def _simulate(pool: ProcessPoolExecutor, subject: str, seeds: range) -> bool:
    """Run seeds of a subject; return whether none of them breaks a promise."""
    began = time.monotonic()
    several = max(1, min(_SEEDS_AT_ONCE, len(seeds) // 8))
    parts = [seeds[start : start + several] for start in range(0, len(seeds), several)]
    for failure in pool.map(partial(check, subject), parts):
        if failure is not None:
            _show(subject, failure, f"--subject {subject} --first {failure.seed} --seeds 1")
            pool.shutdown(wait=False, cancel_futures=True)
            return False
    _tell(subject, len(seeds), began)
    return True


def _tell(subject: str, seeds: int, began: float) -> None:
    took = time.monotonic() - began
    print(f"{subject}: {seeds} seeds, {seeds / took * 3600:,.0f} an hour", flush=True)


def _show(subject: str, failure: Failure, options: str) -> None:
    again = f"python -m verification.simulation {options}"
    lines = [f"{subject}: seed {failure.seed} FAILED: {failure.what}", failure.plan]
    lines += failure.events[-_SHOWN_EVENTS:]
    print("\n".join([*filter(None, lines), f"again: {again}"]), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
