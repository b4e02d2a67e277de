"""tools/chaos: some rounds of it, and that its invariants are violated by what they are for."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tools.chaos import plan, rounds
from tools.chaos.faults import FAULTS
from tools.chaos.invariants import Verdict, judge
from tools.chaos.report import Report
from tools.chaos.worlds import Ranks

from warm_programs import run_warm

ROOT = Path(__file__).parents[2]


def test_some_rounds_on_one_host() -> None:
    """Play what needs no root; without the training, which takes a second world to compare it with."""
    options = ["--faults", "kill,neighbour", "--workloads", "collectives,messages", "--one-host"]
    options += ["--load", "4"]  # other tests run meanwhile, and what they need is not in the average yet
    command = [sys.executable, "-m", "tools.chaos", "--rounds", "2", "--seed", "3", *options]
    played = run_warm(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "2 rounds; every rank was right, was killed, or was told in time" in played.stdout
    assert "limits were multiplied by 4.0 to 4.0, for the load of the machine" in played.stdout


def test_a_round_is_the_same_for_the_same_seed() -> None:
    chosen = [name for name in FAULTS if name != "link"]
    absent = [plan.NAMESPACES, plan.MPI]
    drawn = [[plan.draw(number, seed, chosen, absent, 1.0) for number in range(20)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [rounds.load(each.dump()) for each in drawn[0]] == drawn[0]


ROUND = rounds.Round(
    number=0,
    seed="1:0",
    world=rounds.World("processes", (3,)),
    workload="training",
    fault="kill",
    variant="",
    victim=2,
    after_s=0.1,
    length_s=0.1,
    work_s=1.5,
    timeout_s=3.0,
    heartbeat_s=2.0,
)
ERROR = {
    "what": "error",
    "doing": "all_reduce",
    "type": "RankFailedError",
    "ours": True,
    "text": "all_reduce: rank 2 has died",
    "ranks": [2],
    "digests": ["a"],
}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """A round in which rank 2 was killed, and the others were told."""
    made = Ranks(ROUND, FAULTS["kill"](ROUND), tmp_path, None)
    made.pids, made.codes = [11, 12, 13], {11: 0, 12: 0, 13: -signal.SIGKILL}
    for rank in range(3):
        tell(made, rank, {"what": "begun", "pid": 0}, {"what": "working"})
    tell(made, 0, {**ERROR, "at": time.time()}, {"what": "over", "left": []})
    return made


def tell(ranks: Ranks, rank: int, *lines: dict[str, Any]) -> None:
    with open(ranks.folder / f"told-{rank}", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def judged(ranks: Ranks, *lines: dict[str, Any]) -> Verdict:
    """Return the verdict if rank 1 has told this."""
    tell(ranks, 1, *lines)
    return judge(ROUND, ranks, {"began": time.time()}, ["a", "b"], 1.0)


def test_survivors_that_are_told_are_what_a_kill_must_lead_to(ranks: Ranks) -> None:
    verdict = judged(ranks, {**ERROR, "at": time.time()}, {"what": "over", "left": []})
    assert (verdict.outcomes, verdict.wrong) == (["told", "told", "killed"], [])


@pytest.mark.parametrize(
    ("error", "left", "wrong"),
    [
        ({"ours": False, "type": "KeyError"}, [], "the error is not torchestra's"),
        ({"text": "all_reduce: rank 1 has died"}, [], "names ranks [1] and none of [0, 2]"),
        ({"ranks": [1]}, [], "the error's ranks are [1]"),
        ({"text": "rank 2 has died"}, [], "names no operation"),
        ({"at": float("inf")}, [], "after the fault, later than"),
        ({"digests": ["b"]}, [], "not those of an undisturbed training"),
        ({"what": "right"}, [], "another has right results to the end"),
        ({}, ["thread torchestra-queue"], "it still has thread torchestra-queue"),
    ],
)
def test_what_must_not_be_is_found(ranks: Ranks, error: dict[str, Any], left: list[str], wrong: str) -> None:
    verdict = judged(ranks, {**ERROR, "at": time.time(), **error}, {"what": "over", "left": left})
    assert [each for each in verdict.wrong if wrong in each], verdict.wrong


def test_a_rank_that_ends_without_a_word_is_found(ranks: Ranks) -> None:
    ranks.codes[12] = -signal.SIGBUS
    assert [each for each in judged(ranks).wrong if "exit code -7" in each]


def test_what_libzmq_does_without_memory_is_told_from_an_abort_of_ours(ranks: Ranks) -> None:
    short = dataclasses.replace(ROUND, fault="memory", variant="RLIMIT_DATA")
    ranks.codes[13] = -signal.SIGABRT
    tell(ranks, 1, {**ERROR, "at": time.time()}, {"what": "over", "left": []})
    for said, outcome in (
        ("free(): invalid pointer", "ended"),
        ("FATAL ERROR: OUT OF MEMORY (a.cpp:1)", "killed"),
    ):
        (ranks.folder / "stderr-2").write_text(said)
        assert judge(short, ranks, {"began": time.time()}, ["a", "b"], 1.0).outcomes[2] == outcome


@pytest.mark.parametrize(("named", "outcome"), [(2, "told"), (0, "failed")])
def test_what_a_worker_without_memory_raises_is_raised_at_its_caller(
    ranks: Ranks, named: int, outcome: str
) -> None:
    short = dataclasses.replace(ROUND, workload="rpc", fault="memory", variant="RLIMIT_DATA")
    text = f"On worker 'w' (rank {named}):\nDefaultCPUAllocator: can't allocate memory"
    theirs = {"ours": False, "type": "RuntimeError", "text": text, "at": time.time()}
    tell(ranks, 1, {**ERROR, **theirs}, {"what": "over", "left": []})
    assert judge(short, ranks, {"began": time.time()}, ["a", "b"], 1.0).outcomes[1] == outcome


@pytest.mark.parametrize(("culprit", "outcome"), [(2, []), (1, ["rank 1: the error's ranks are [1]"])])
def test_a_message_may_wait_for_a_peer_that_waits_for_the_culprit(
    ranks: Ranks, culprit: int, outcome: list[str]
) -> None:
    text = f"send to rank 1 timed out.\ndiagnosis: killed process: rank {culprit} has died\n  rank 2 is gone"
    late = {"doing": "send", "type": "CollectiveTimeoutError", "text": text, "ranks": [1], "at": time.time()}
    verdict = judged(ranks, {**ERROR, **late}, {"what": "over", "left": []})
    assert [each.partition(" and ")[0] for each in verdict.wrong] == outcome


def test_a_report_tells_of_rounds_that_ended_before_their_fault() -> None:
    """They show nothing about it. Names are whole in 80 columns, too."""
    report, screen = Report(), io.StringIO()
    stopped = dataclasses.replace(ROUND, fault="memory", variant="RLIMIT_DATA")
    report.add(stopped, Verdict(["right"] * 3, met=False), 1.0, 2.0)
    report.add(stopped, Verdict(["told"] * 3), 1.0, 6.5)
    report.show(Console(width=80, file=screen))
    shown = screen.getvalue()
    assert "memory, RLIMIT_DATA" in shown
    assert "2, 1" in shown
    assert "limits were multiplied by 2.0 to 6.5" in shown


def test_what_is_left_in_the_temporary_folder_is_found(ranks: Ranks) -> None:
    (ranks.folder / "tmp" / "torchestra-left").touch()
    verdict = judged(ranks, {**ERROR, "at": time.time()}, {"what": "over", "left": []})
    assert verdict.wrong == ["temporary files are left: ['torchestra-left']"]
