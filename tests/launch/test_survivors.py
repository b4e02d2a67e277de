"""``torchestra run --max-failures``: ranks may fail while the others go on, and these make the exit code."""

from __future__ import annotations

import signal

import pytest

from torchestra.launcher.command import count_argument
from torchestra.launcher.root_cause import FailedRank, root_cause
from torchestra.launcher.spec import Failure


@pytest.fixture
def survive(start, tmp_path):
    """Start ranks that do as ``statement`` says, and then wait until the test lets them go on."""
    note = tmp_path / "go on"

    def begin(nproc: int, most: int, statement: str):
        text = f"""
    import os, signal, sys, threading, time
    rank = int(os.environ["RANK"])
    def await_the_test():
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.005)
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)
    {statement}
    await_the_test()
    print("went on", flush=True)
    """
        return start(text, nproc, str(note), before=("--max-failures", str(most))), note.touch

    return begin


def test_a_killed_rank_does_not_end_the_others_and_is_reported(survive, nothing_left) -> None:
    job, go_on = survive(3, 1, "if rank == 0: kill()")
    told = job.process.stderr.readline()
    assert told.startswith("torchestra: rank 0 (pid ")
    assert told.endswith("failed: killed by SIGKILL (out of memory?); ranks 1, 2 go on\n")
    go_on()
    code, out, err = job.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 1] went on", "[rank 2] went on"]
    assert err == "torchestra: ranks 1, 2 ended well, without rank 0\n"
    nothing_left()


def test_an_exception_is_survived_too_and_its_traceback_is_shown(survive, nothing_left) -> None:
    job, go_on = survive(2, 5, "if rank == 1: {}['key']")
    told = job.said_until("failed: exit code 1; rank 0 goes on")
    assert "KeyError: 'key'\ntorchestra: rank 1 (pid " in told
    go_on()
    assert job.finish() == (0, "[rank 0] went on\n", "torchestra: rank 0 ended well, without rank 1\n")
    nothing_left()


def test_one_failure_too_many_ends_the_job_and_is_its_exit_code(survive, nothing_left) -> None:
    job, go_on = survive(
        3,
        1,
        "if rank == 0: kill()\n    if rank == 1: await_the_test(); sys.exit(5)\n    threading.Event().wait()",
    )
    assert job.process.stderr.readline().endswith("; ranks 1, 2 go on\n")
    go_on()
    code, out, err = job.finish()
    assert (code, out) == (5, "")
    assert "rank 1 (pid " in err
    assert err.endswith("failed: exit code 5; rank 2 ended with it\n")
    nothing_left()


def test_a_job_of_which_no_rank_ends_well_has_failed(survive, nothing_left) -> None:
    job, _ = survive(2, 9, "sys.exit(3)")
    code, out, err = job.finish()
    assert (code, out) == (3, "")
    assert "ended well" not in err
    nothing_left()


def test_of_several_failures_the_first_not_survived_is_the_cause() -> None:
    killed = FailedRank(2, -signal.SIGKILL, 1.0)
    followed = FailedRank(0, 1, 0.9, Failure(0.9, 1, "RankFailedError", "", consequence=True))
    raised = FailedRank(1, 1, 2.0)
    assert root_cause([followed, killed], survived=1) == followed, (
        "the program did not survive what it should"
    )
    assert root_cause([followed, raised, killed], survived=1) == raised
    assert root_cause([killed], survived=1) is None


def test_the_number_of_failures_must_be_one(capsys) -> None:
    assert count_argument("0") == 0
    for text in ("-1", "x", ""):
        with pytest.raises(Exception, match="must be a number, 0 or more"):
            count_argument(text)
