"""A pytest test on ranks that are processes."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from typing import Any

import pytest

from torchestra.errors import InvalidArgumentError
from torchestra.testing.fixtures import is_shared_by_the_world
from torchestra.testing.item_outcome import conclude
from torchestra.testing.item_runner import ItemRequest
from torchestra.testing.marker import RanksSpec
from torchestra.testing.outcomes import Outcome
from torchestra.testing.rank_pool import RankPool, RankWorld

_GRACE_S = 2.0  # for ranks that have been released by another's failure
_POLL_INTERVAL_S = 0.5


def run_on_processes(item: pytest.Function, spec: RanksSpec, pool: RankPool) -> None:
    """Run the test on every rank; raise what the outcomes mean."""
    with tempfile.TemporaryDirectory(prefix="torchestra-test-", ignore_cleanup_errors=True) as directory:
        request = ItemRequest(
            item.nodeid,
            spec.size,
            spec.timeout,
            spec.init,
            spec.may_die,
            directory,
            _shared_values(item),
            dict(os.environ),
            bool(item.config.getoption("usepdb")),
            item.config.getoption("--pdb-rank"),
        )
        world = pool.start(request)
        try:
            late = _await(item, world, spec.limit)
        finally:
            world.kill()
        stack = "Where it was then stands at the end of its output, below."
        outcomes = [
            Outcome(rank, text=stack, late=True) if rank in late else world.outcomes[rank]
            for rank in range(spec.size)
        ]
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


def _await(item: pytest.Function, world: RankWorld, timeout_s: float) -> set[int]:
    """Wait until all ranks have ended; return those that had not when their time was over."""
    capture: Any = item.config.pluginmanager.getplugin("capturemanager")
    deadline = time.monotonic() + timeout_s
    suspended = False
    while world.running:
        limit = deadline
        if world.first_failed is not None:
            limit = min(limit, world.first_failed + _GRACE_S)
        if not world.debugging and time.monotonic() >= limit:
            late = set(world.running) if world.first_failed is None else set()
            if late:
                world.dump()
            return late
        world.wait(_POLL_INTERVAL_S if world.debugging else min(_POLL_INTERVAL_S, limit - time.monotonic()))
        if world.debugging and not suspended and capture is not None:
            capture.suspend_global_capture(in_=True)
            suspended = True
    if suspended:
        capture.resume_global_capture()
    return set()


def _without_our_frames(output: str) -> str:
    """Return a rank's output, its stacks cut off where they leave the test for pytest."""
    lines, cutting = [], False
    for line in output.splitlines(keepends=True):
        frame = line.startswith('  File "')
        cutting = frame and (cutting or "/_pytest/" in line or "/pluggy/" in line)
        if not cutting:
            lines.append(line)
    return "".join(lines)
