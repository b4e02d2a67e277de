"""A pytest test on ranks that are processes."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import pytest

from torchestra.errors import InvalidArgumentError
from torchestra.system.temporary_folder import temporary_folder
from torchestra.testing.fixtures import is_shared_by_the_world
from torchestra.testing.item_outcome import conclude
from torchestra.testing.item_runner import ItemRequest
from torchestra.testing.marker import RanksSpec
from torchestra.testing.outcomes import Outcome
from torchestra.testing.rank_pool import RankPool, RankWorld, Released
from torchestra.testing.stacks import late_outcome

_GRACE_S = 5.0  # for ranks released by the failure of another, even on a busy machine
_REPORT_S = 60.0  # for a rank to report where it raised, even on a busy machine
_POLL_INTERVAL_S = 0.5


def run_on_processes(item: pytest.Function, spec: RanksSpec, pool: RankPool) -> None:
    """Run the test on every rank; raise the exception that the outcomes imply."""
    with temporary_folder("torchestra-item-") as directory:
        request = ItemRequest(
            item.nodeid,
            spec.size,
            spec.world,
            spec.timeout,
            spec.init,
            spec.may_die,
            directory,
            _shared_values(item),
            {**os.environ, **pool.store_environment(spec)},
            bool(item.config.getoption("usepdb")),
            item.config.getoption("--pdb-rank"),
        )
        world = pool.start(request)
        try:
            late = _await(item, world, spec.limit)
        finally:
            world.kill(world.running)
        outcomes = [late.get(rank, world.outcomes[rank]) for rank in range(spec.size)]
        for rank in range(spec.size):
            text = _without_our_frames(world.output(rank))
            if text:
                item.add_report_section("call", f"output of rank {rank}", text)
    conclude(item, outcomes, "processes", spec.limit)


def _shared_values(item: pytest.Function) -> dict[str, bytes]:
    """Return the values of the fixtures with ``scope="world"``, pickled, by name."""
    values = {}
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if definitions and is_shared_by_the_world(definitions[-1].func) and name in item.funcargs:
            try:
                values[name] = pickle.dumps(item.funcargs[name])
            except Exception as error:
                raise InvalidArgumentError(
                    f'fixture {name!r} has scope="world", and ranks that are processes get copies of it,'
                    f" but it cannot be pickled: {error!r}"
                ) from error
    return values


def _await(item: pytest.Function, world: RankWorld, timeout_s: float) -> dict[int, Outcome]:
    """Wait until all ranks have ended; return by rank those that had not when their time was up.

    The limit applies to the moment when a rank raises: its report, slow on a busy machine, may come later.
    """
    capture: Any = item.config.pluginmanager.getplugin("capturemanager")
    deadline = time.monotonic() + timeout_s
    late: dict[int, Outcome] = {}
    suspended = False
    while world.running:
        limit = _limit(world, deadline)
        if world.debugging and not suspended and capture is not None:
            capture.suspend_global_capture(in_=True)
            suspended = True
        if world.debugging or time.monotonic() < limit:
            pause = _POLL_INTERVAL_S if world.debugging else min(_POLL_INTERVAL_S, limit - time.monotonic())
            world.wait(pause)
            continue
        stacks = world.stacks(world.in_the_test)
        for rank, frames in stacks.items():
            outcome = late_outcome(rank, frames)
            late[rank] = outcome if world.first_failed is None else _ended_with_the_others(outcome)
        world.kill(list(stacks) or world.running)
    if suspended:
        capture.resume_global_capture()
    return late


def _without_our_frames(output: str) -> str:
    """Return a rank's output; stacks of a crash in it are cut off where pytest calls the test."""
    lines, cutting = [], False
    for line in output.splitlines(keepends=True):
        frame = line.startswith('  File "')
        cutting = frame and (cutting or "/_pytest/" in line or "/pluggy/" in line)
        if not cutting:
            lines.append(line)
    return "".join(lines)


def _ended_with_the_others(outcome: Outcome) -> Outcome:
    """Return the outcome of a rank that was ended because another rank had failed."""
    message = f"ended {_GRACE_S:g} s after another rank had failed. {outcome.text}"
    return Outcome(outcome.rank, Released(message))


def _limit(world: RankWorld, deadline: float) -> float:
    """Return the time until which to wait for ranks in the test or, if there are none, for reports."""
    if world.first_failed is None:
        return deadline
    return min(deadline, world.first_failed + _GRACE_S) if world.in_the_test else deadline + _REPORT_S
