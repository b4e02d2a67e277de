"""No wrong argument of any public function crashes, hangs, is taken, or is told in words that do not help.

enumeration.py makes the calls, in a process of its own, as one of them might bring it down.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from right_calls import UNCHECKED

from warm_programs import run_warm

pytestmark = pytest.mark.timeout(600)  # for the calls, which the first of the tests makes

HERE = Path(__file__).parent
EVERY = 2  # of the calls, which all together take half a minute
SECONDS = 500
MAX_TOLD = 40

# What is annotated with Any, or takes whatever is callable or can be pickled.
TAKES_ANYTHING = {
    *("DeviceMesh.mesh", "ProcessGroup.communicator", "RRef.value", "RRef.type_hint", "launch.args"),
    *("all_gather_object.obj", "gather_object.obj", "rpc.RpcBackendOptions.store"),
    *(
        "ProcessGroup.reconfigure.handles",
        "rpc.RpcBackendOptions.secret",
        "rpc.remote.to",
        "rpc.rpc_async.to",
        "rpc.rpc_sync.to",
    ),
    *("rpc.remote.func", "rpc.rpc_async.func", "rpc.rpc_sync.func"),
}


class Report(NamedTuple):
    """Hold the outcome of the enumeration.

    Attributes:
        calls: by number.
        problems: of calls.
        parameters: by name, of how many wrong values there are calls.
        ended: whether it came to its end.
    """

    calls: dict[int, str]
    problems: list[str]
    parameters: dict[str, int]
    ended: str


@cache
def report() -> Report:
    command = [sys.executable, str(HERE / "enumeration.py"), "0", str(EVERY)]
    with tempfile.TemporaryDirectory(prefix="torchestra-test-") as directory:
        environment = {**os.environ, "TMPDIR": directory}
        run = run_warm(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    told: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    calls = {each["number"]: each["call"] for each in told if "call" in each}
    problems = [
        f"{calls.get(each.get('number', -1), each.get('right'))} on rank {each['rank']}: {each['problem']}"
        for each in told
        if "problem" in each
    ]
    parameters: dict[str, int] = next((each["parameters"] for each in told if "parameters" in each), {})
    done = bool(told) and "done" in told[-1]
    last = calls[max(calls)] if calls else "the right calls"
    ended = "" if done else f"exit code {run.returncode} in {last}: {run.stderr[-3000:]}"
    return Report(calls, problems, parameters, ended)


def test_no_wrong_argument_brings_the_ranks_down_or_lets_them_hang() -> None:
    assert report().ended == ""


def test_every_wrong_argument_is_refused_in_one_line_that_names_it_and_the_group_goes_on() -> None:
    assert report().problems[:MAX_TOLD] == []


def test_every_parameter_of_every_public_function_is_given_wrong_values() -> None:
    found = report()
    assert len(found.calls) > 10_000
    few = {name for name, values in found.parameters.items() if values < 20}
    assert few == TAKES_ANYTHING | set(UNCHECKED)
    assert {name.partition(".")[0] for name in found.parameters} > {"all_reduce", "ProcessGroup", "TCPStore"}
