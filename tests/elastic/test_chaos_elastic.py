"""tools/chaos_elastic.py at a small scale, and that it finds what it looks for."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools import chaos_elastic
from tools.chaos_elastic import Job, Kill, RankProcess, check_steps, measure

from warm_programs import WarmProgram, WarmSubprocess


def test_ranks_that_are_killed_leave_no_trace_in_what_is_learnt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nothing_left
) -> None:
    monkeypatch.setattr(chaos_elastic, "subprocess", WarmSubprocess())
    monkeypatch.setattr(chaos_elastic, "dying_with_this", lambda _: None)  # a forked program calls nothing
    options = ["--kills", "3", "--every", "1.5", "--nproc", "3", "--step-ms", "40", "--seed", "2"]
    code = chaos_elastic.main(options)
    out, err = capsys.readouterr()
    assert code == 0, f"{out}\n{err}"
    assert re.match("[1-3] kills of processes that serve the store\n3 kills", out), "at least the primary"
    assert "every step was done, none twice, and all states are those of an undisturbed training" in out
    nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_that_ends_it_ends_its_job(signum: int, tmp_path: Path, nothing_left) -> None:
    command = [sys.executable, chaos_elastic.__file__, "--kills", "9", "--every", "9", "--nproc", "2"]
    with WarmProgram(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        while not list(tmp_path.glob("*/disturbed/log-*")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signum)
        process.wait()
    nothing_left()
    assert signum == signal.SIGKILL or not list(tmp_path.glob("torchestra-chaos-*"))


class Training:
    """A job whose ranks do a step at each look, until they stop or it ends; each look moves the clock."""

    def __init__(self, folder: Path, *, seconds: float, steps: int, ends: bool) -> None:
        self.now, self.process = 0.0, self
        self._log, self._seconds, self._steps, self._ends = folder / "log-0-100", seconds, steps, ends

    def poll(self) -> int | None:
        self.now += self._seconds
        if not self._steps:
            return 0 if self._ends else None
        self._steps -= 1
        with open(self._log, "a") as log:
            log.write("1 00000001 10.0\n")
        return None


@pytest.mark.parametrize(
    ("seconds", "ends", "code"), [(100.0, True, 0), (100.0, False, None), (200.0, True, 0)]
)
def test_the_end_of_a_job_is_waited_for_as_long_as_it_makes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, ends: bool, code: int | None
) -> None:
    training = Training(tmp_path, seconds=seconds, steps=1000, ends=ends)
    job = Job.__new__(Job)
    job.folder, job.process = tmp_path, training  # type: ignore[assignment]
    clock = SimpleNamespace(monotonic=lambda: training.now, sleep=lambda _: None)
    monkeypatch.setattr(chaos_elastic, "time", clock)
    assert job.await_end() == code


@pytest.fixture
def processes() -> list[RankProcess]:
    """Two ranks, of which one dies after step 5 and its replacement begins with step 8; 0.1 s a step."""
    steps = [(step, f"{step:08x}", 10.0 + step / 10) for step in range(12)]
    return [
        RankProcess(0, "100.1", steps),
        RankProcess(1, "101.1", steps[:6]),
        RankProcess(1, "102.7", steps[8:]),
    ]


def test_a_log_without_a_flaw_has_no_problem(processes: list[RankProcess]) -> None:
    assert check_steps(processes, processes[:1], 12) == []


def test_steps_that_are_lost_or_done_twice_or_differ_are_found(processes: list[RankProcess]) -> None:
    undisturbed = copy.deepcopy(processes[:1])
    whole = processes[0].steps
    for steps, problem in {
        (*whole[:7], *whole[8:]): "1 steps were done by nobody, such as 7",
        (*whole[:8], *whole[7:]): "rank 0 (pid 100.1) has done a step twice: [7]",
        (*whole[:7], (7, "other", 10.7), *whole[8:]): "rank 0 (pid 100.1) has other parameters after step 7",
    }.items():
        processes[0].steps = list(steps)
        assert check_steps(processes, undisturbed, 12) == [problem]


def test_pauses_and_returns_are_measured(processes: list[RankProcess]) -> None:
    processes[0].steps = [
        (step, text, when + (0.3 if step >= 6 else 0.0)) for step, text, when in processes[0].steps
    ]
    processes[2].steps = [(step, text, when + 0.3) for step, text, when in processes[2].steps]
    times = measure(processes, [Kill(10.55, 1, "101.1", "trains")])
    assert times.step == pytest.approx(0.1)
    assert times.deaths == [pytest.approx(0.4)], "of rank 0, between steps 5 and 6"
    assert times.returns == [pytest.approx(0.55)]
    assert times.joins == [pytest.approx(0.1)]
