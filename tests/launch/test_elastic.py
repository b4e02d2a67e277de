"""``torchestra run --elastic``: ranks that die are replaced, and when that ends the job.

The ranks here only report how far they are, as groups do, and see each other's files. What ranks do that
really let others in is tested in tests/elastic.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchestra.cli import main
from torchestra.launcher.command import _least_and_most
from torchestra.launcher.membership_file import read_membership
from torchestra.store.base import pauses

LONG = 60.0

PROGRAM = """
    import os, signal, sys, threading, time
    from torchestra.system.phases import report
    folder, rank, join = sys.argv[1], os.environ["RANK"], os.environ.get("TORCHESTRA_JOIN")
    member = os.environ.get("TORCHESTRA_MEMBER")
    def path(name):
        return os.path.join(folder, name)
    def await_file(name):
        while not os.path.exists(path(name)):
            time.sleep(0.002)
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    def meet(size):
        open(path("met" + rank), "w").close()
        for other in range(size):
            await_file(f"met{other}")
        report("joined")
"""


@pytest.fixture
def elastic(start, tmp_path):
    """Start ranks that do as ``statements`` say."""

    def begin(nproc: int, limits: str, statements: str, *options: str):
        return start(PROGRAM + statements, nproc, str(tmp_path), before=("--elastic", limits, *options))

    return begin


def await_members(job: Any, as_wanted: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Wait until the launcher says something of the job's members."""
    for _ in pauses(LONG):
        told = read_membership(job.process.pid)
        if told is not None and as_wanted(told["members"]):
            return
    raise AssertionError(told)


def without_numbers(text: str) -> list[str]:
    """The launcher's lines without times and process ids."""
    text = re.sub(r"pid \d+", "pid N", text)
    return re.sub(r"\d+\.\d{3} s", "T s", text).splitlines()


def test_a_rank_that_is_killed_is_replaced_and_each_phase_is_told(elastic, tmp_path, nothing_left) -> None:
    """Survivors go on meanwhile; the replacement has the number of the dead rank, and is told to join."""
    job = elastic(
        3,
        "2:4",
        """
    if not join:
        meet(3)
        if rank == "1":
            die()
        await_file("has started")
        report("shrunk")
        await_file("have shrunk")
        report("trains")
    else:
        assert (rank, member, os.environ["LOCAL_RANK"]) == ("1", "1", "1")
        assert sys.stdin.read() == ""
        await_file("train")
        report("joined")
        await_file("has joined")
        report("trains")
    await_file("trains")
    print("ended", rank)
    """,
        "--max-restarts",
        "7",
    )
    said = ""
    for phase in ("has started", "have shrunk", "train", "has joined", "trains"):
        said += job.said_until(f" {phase}")
        (tmp_path / phase).touch()
    code, out, err = job.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[rank {rank}] ended {rank}" for rank in range(3)]
    assert without_numbers(said + err) == [
        "torchestra: rank 1 (pid N) failed: killed by SIGKILL (out of memory?); ranks 0, 2 go on",
        "torchestra: rank 1: its replacement has started (pid N; restart 1 of 7), T s after the death",
        "torchestra: rank 1: ranks 0, 2 have shrunk the group, T s after the death",
        "torchestra: rank 1: ranks 0, 2 train, T s after the death",
        "torchestra: rank 1: its replacement has joined, T s after the death",
        "torchestra: rank 1: its replacement trains, T s after the death",
        "torchestra: ranks 0-2 ended well, after 1 restart",
    ]
    nothing_left()


def test_too_few_members_end_the_job_with_the_root_cause(elastic, nothing_left) -> None:
    """A program that does not go on without a rank ends as it would without --elastic."""
    job = elastic(
        4,
        "3:4",
        """
    from torchestra.errors import RankFailedError
    if join:
        threading.Event().wait()
    meet(4)
    if rank == "2":
        with open(path("pid"), "w") as file:
            file.write(str(os.getpid()))
        os.rename(path("pid"), path("victim"))
        for other in "013":
            await_file("watches" + other)
        die()
    await_file("victim")
    import select
    victim = os.pidfd_open(int(open(path("victim")).read()))
    open(path("watches" + rank), "w").close()
    select.select([victim], [], [])
    raise RankFailedError("rank 2 died", (2,))
    """,
    )
    code, _, err = job.finish()
    assert code == 128 + signal.SIGKILL, err
    lines = without_numbers(err)
    assert "torchestra: the job ends: of its members 2 are left, and --elastic needs 3" in lines
    assert lines[-1].startswith("torchestra: rank 2 (pid N) failed: killed by SIGKILL")
    nothing_left()


def test_the_death_that_needs_one_restart_too_many_ends_the_job(elastic, nothing_left) -> None:
    job = elastic(
        2,
        "1:2",
        """
    if not join:
        meet(2)
    report("joined"); report("trains")
    sys.exit(9) if rank == "1" else threading.Event().wait()
    """,
        "--max-restarts",
        "4",
    )
    code, _, err = job.finish()
    assert code == 9, err
    assert err.count("its replacement has started") == 4, "each was of use, so this is no loop"
    assert "torchestra: the job ends: its 4 restarts are used up\n" in err
    nothing_left()


def test_a_rank_that_dies_at_once_again_and_again_ends_the_job_with_its_error(elastic, nothing_left) -> None:
    job = elastic(
        3,
        "1:3",
        """
    if join:
        raise OSError("no such data")
    meet(3)
    if rank == "0":
        die()
    threading.Event().wait()
    """,
        "--max-restarts",
        "1000",
    )
    code, _, err = job.finish()
    assert code == 1, err
    assert err.count("its replacement has started") == 3
    last = err.splitlines()[-1]
    assert re.match(r"torchestra: rank 0 \(pid \d+\) failed: exit code 1; ranks 1, 2 ended with it", last)
    assert "OSError: no such data" in err
    nothing_left()


def test_a_rank_that_dies_before_there_is_a_group_ends_the_job(elastic, nothing_left) -> None:
    """Nobody could join the ranks that wait for it."""
    job = elastic(2, "1:2", "    sys.exit(5) if rank == '1' else threading.Event().wait()")
    code, _, err = job.finish()
    assert code == 5
    assert "the job ends: a rank failed before any was in a group" in err
    assert "replacement" not in err
    nothing_left()


def test_a_rank_that_has_ended_well_is_not_replaced_nor_is_any_after_it(elastic, nothing_left) -> None:
    """And a replacement that has not joined by the end is killed, which is no failure."""
    job = elastic(
        4,
        "2:4",
        """
    if join:
        open(path("waits"), "w").close()
        threading.Event().wait()
    meet(4)
    if rank == "3":
        die()
    await_file("waits")
    if rank == "2":
        await_file("over")
        die()
    if rank == "1":
        await_file("end")
    """,
    )
    ended = Path(job.process.args[-1])
    await_members(job, lambda members: members[0]["state"] == "done")
    (ended / "over").touch()
    await_members(job, lambda members: members[2]["state"] == "dead")
    (ended / "end").touch()
    code, _, err = job.finish()
    assert code == 0, err
    assert err.count("its replacement has started") == 1
    assert err.endswith("torchestra: ranks 0, 1 ended well, without rank 2, after 1 restart\n")
    nothing_left()


def test_a_rank_that_raises_and_does_not_end_is_killed_and_replaced(elastic, nothing_left) -> None:
    job = elastic(
        2,
        "1:2",
        """
    if join:
        report("joined")
        open(path("end"), "w").close()
    else:
        meet(2)
        if rank == "0":
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("and a thread that never ends")
        await_file("end")
    """,
    )
    code, _, err = job.finish()
    assert code == 0, err
    assert "ValueError: and a thread that never ends" in err
    nothing_left()


def test_top_shows_members_and_restarts(elastic, capsys) -> None:
    """Beside the survivors' group, which the rank that joins is not in yet."""
    job = elastic(
        3,
        "1:5",
        """
    import torchestra as dist
    if join:
        threading.Event().wait()
    dist.init_process_group()
    open(path("met" + rank), "w").close()
    if rank == "0":
        await_file("met1"); await_file("met2")
        sys.exit(3)
    try:
        dist.barrier()
    except dist.RankFailedError:
        dist.group.WORLD.shrink()
    open(path("shrunk" + rank), "w").close()
    threading.Event().wait()
    """,
    )
    folder, launcher = Path(job.process.args[-1]), str(job.process.pid)
    for _ in pauses(LONG):
        if (folder / "shrunk1").exists() and (folder / "shrunk2").exists():
            break
    await_members(job, lambda members: members[0]["restarts"] == 1 and members[0]["pid"] is not None)
    assert main(["top", "--once", "--interval", "0.05", "--job", launcher]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "elastic 1:5: 2 of 3 ranks are members; restarts: 1" in lines, lines
    assert any(
        re.match(r"rank 0 \(pid \d+\): joins, .*, after exit code 3; restarts: 1$", line) for line in lines
    )
    assert main(["top", "--once", "--interval", "0.05", "--json", "--job", launcher]) == 0
    membership = json.loads(capsys.readouterr().out)["membership"]
    assert (membership["least"], membership["most"], membership["restarts"]) == (1, 5, None)
    assert [member["state"] for member in membership["members"]] == ["joins", "trains", "trains"]
    job.send(signal.SIGTERM)
    job.finish()


def test_limits_that_make_no_sense_are_refused(start) -> None:
    assert _least_and_most("2:8") == (2, 8)
    for text in ("2", "0:3", "3:2", "a:b", ":"):
        with pytest.raises(Exception, match="must be MIN:MAX, two positive numbers in order"):
            _least_and_most(text)
    for options, why in {
        ("--max-restarts", "3"): "--max-restarts is for --elastic MIN:MAX",
        ("--elastic", "1:2", "--max-failures", "1"): "--max-failures is for jobs that replace nobody",
        ("--elastic", "3:4"): "--nproc is 2, which is not within --elastic 3:4",
    }.items():
        code, _, err = start("", 2, before=options).finish()
        assert (code, err.startswith(f"torchestra run: {why}")) == (2, True), err
