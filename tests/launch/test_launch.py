"""``launch()``: functions on ranks that are processes, from any Python program."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchestra.errors import InvalidArgumentError, LaunchTimeoutError, RankError
from torchestra.launcher import RemoteTraceback, fork_server_client, launch
from warm_programs import NestedWarm, WarmSubprocess

STATE: list[str] = []


class Refusal(Exception):
    """Two arguments, so that it survives pickling only by its own care."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank


class Unpicklable(Exception):
    def __init__(self, what: str, *, lock: Any) -> None:
        super().__init__(what)
        self.lock = lock


@pytest.fixture(autouse=True)
def _servers_have_loaded_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_client, "subprocess", WarmSubprocess())


def rank() -> int:
    return int(os.environ["RANK"])


def wait_for_ever() -> None:
    threading.Event().wait()


def wait_unless_first() -> None:
    if rank() != 0:
        wait_for_ever()


def facts(word: str, tensor: torch.Tensor) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MY_OWN")
    print(f"{word} from {rank()}")
    return {
        "environment": [os.environ.get(name) for name in names],
        "sum": tensor.sum().item(),
        "tensor": torch.full((3,), float(rank())),
        "directory": os.getcwd(),
        "state": STATE,
    }


def misbehave(how: str) -> object:
    """Rank 1 does, the others wait."""
    if rank() != 1:
        wait_for_ever()
    if how == "raise":
        raise Refusal(1, "no")
    if how == "raise unpicklable":
        raise Unpicklable("strange", lock=threading.Lock())
    if how == "sys.exit":
        sys.exit(4)
    if how == "exit 0":
        os._exit(0)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "unpicklable":
        return [threading.Lock()]
    raise AssertionError(how)


def test_results_come_in_the_order_of_the_ranks(capsys) -> None:
    STATE.append("of this process")
    results = launch(facts, 3, "hello", torch.arange(4), env={"MY_OWN": "word"})
    for number, result in enumerate(results):
        assert result["environment"] == [str(number), "3", str(number), "3", "word"]
        assert result["sum"] == 6
        assert torch.equal(result["tensor"], torch.full((3,), float(number)))
        assert result["directory"] == os.getcwd()
        assert result["state"] == [], "ranks are forked from a server, not from this process"
    assert "MY_OWN" not in os.environ
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] hello from {r}" for r in range(3)]


def test_a_lambda_and_what_it_closes_over_are_sent_by_value() -> None:
    factor = 10
    assert launch(lambda x: x * factor + rank(), 2, 4) == [40, 41]


def test_hundreds_of_megabytes_come_back_whole() -> None:
    (result,) = launch(lambda: torch.arange(25_000_000), 1)
    assert torch.equal(result, torch.arange(25_000_000))


@pytest.mark.parametrize(
    ("how", "message", "exit_code", "cause"),
    [
        ("raise", "rank 1 of 3 failed: test_launch.Refusal: (1, 'no')", 1, Refusal),
        ("raise unpicklable", "rank 1 of 3 failed: test_launch.Unpicklable: strange", 1, RemoteTraceback),
        ("sys.exit", "rank 1 of 3 failed: SystemExit: 4", 4, None),
        ("exit 0", "rank 1 of 3 ended before the function returned: exit code 0", 0, None),
        (
            "signal",
            "rank 1 of 3 ended before the function returned: killed by SIGKILL (out of memory?)",
            -signal.SIGKILL,
            None,
        ),
        (
            "unpicklable",
            "rank 1 of 3 failed: TypeError: the function returned a builtins.list, which cannot be pickled"
            " (cannot pickle '_thread.lock' object); return tensors or plain data",
            1,
            TypeError,
        ),
    ],
)
def test_a_failed_rank_is_named(how, message, exit_code, cause) -> None:
    with pytest.raises(RankError) as caught:
        launch(misbehave, 3, how)
    error = caught.value
    assert (str(error), error.rank, error.exit_code) == (message, 1, exit_code)
    assert type(error.__cause__) is (cause or type(None))
    if how == "raise":
        assert isinstance(error.__cause__, Refusal)
        assert error.__cause__.rank == 1
        assert isinstance(error.__cause__.__cause__, RemoteTraceback)
    if how.startswith("raise"):
        first, second, *_ = error.traceback.splitlines()
        assert first == "Traceback (most recent call last):"
        assert second.endswith("in misbehave"), "it begins in the user's function"


def test_a_time_out_names_the_ranks_and_where_they_are() -> None:
    launch(rank, 1)  # so that the fork server runs: the time-out counts from the call
    for timeout in (3, 30):  # on a busy machine rank 0 may need longer, too
        with pytest.raises(LaunchTimeoutError) as caught:
            launch(wait_unless_first, 3, timeout=timeout)
        if caught.value.ranks == (1, 2):
            break
    assert str(caught.value) == (
        f"launch: ranks 1, 2 of 3 had not finished after {timeout} s and were ended;"
        " raise timeout= if that is not a hang"
    )
    assert "[ranks 1, 2]" in caught.value.tracebacks
    assert "in wait_for_ever" in caught.value.tracebacks


def test_launches_from_several_threads_do_not_wait_for_each_other() -> None:
    """Each of the two needs the other to have begun."""
    here, there = os.pipe(), os.pipe()
    results: dict[int, list[int]] = {}

    def meet(number: int, read: str, write: str) -> None:
        results[number] = launch(_say_and_hear, 1, read, write)

    paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (*here, *there)]
    threads = [
        threading.Thread(target=meet, args=(1, paths[0], paths[3])),
        threading.Thread(target=meet, args=(2, paths[2], paths[1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for descriptor in (*here, *there):
        os.close(descriptor)
    assert results == {1: [0], 2: [0]}


def _say_and_hear(read: str, write: str) -> int:
    with open(write, "wb", buffering=0) as out:
        out.write(b"x")
    with open(read, "rb", buffering=0) as inward:
        assert inward.read(1) == b"x"
    return rank()


def test_a_server_that_died_meanwhile_is_replaced() -> None:
    (server,) = launch(os.getppid, 1)
    process = os.pidfd_open(server)
    os.kill(server, signal.SIGKILL)
    select.select([process], [], [])
    os.close(process)
    (another,) = launch(os.getppid, 1)
    assert another != server


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: launch(os.getpid, 0), "launch: nproc must be a positive int or 'auto', got 0"),
        (lambda: launch(os.getpid, True), "launch: `nproc` must be an int or 'auto', got True"),
        (lambda: launch(os.getpid, 1, timeout=-1), "timeout must not be negative, got -1"),
        (lambda: launch(os.getpid, 1, kind="hosts"), "`kind` must be 'processes' or 'threads', got 'hosts'"),
        (lambda: launch(print, 1, threading.Lock()), "must be picklable to reach the ranks"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_started(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    assert message in str(caught.value)


PROGRAM = """
import os, sys, threading
from torchestra.launcher import launch

class Point:
    def __init__(self, x): self.x = x

class Odd(Exception): pass

def work(point):
    if "--wait" in sys.argv or os.environ.get("WAIT"):
        print("ready", flush=True)
        threading.Event().wait()
    if point.x < 0:
        raise Odd("negative")
    return Point(point.x + int(os.environ["RANK"]))

if __name__ == "__main__":
    print([type(p) is Point and p.x for p in launch(work, 2, Point(5))])
    try:
        launch(work, 2, Point(-1))
    except Exception as error:
        print(type(error.__cause__) is Odd)
    if len(sys.argv) > 1:
        launch(work, 2, Point(1), env={"WAIT": "1"})
"""


def program(tmp_path, *arguments: str, fresh: bool = False) -> subprocess.Popen[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return (subprocess.Popen if fresh else NestedWarm)(
        [sys.executable, str(tmp_path / "program.py"), *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_scripts_own_functions_and_classes_go_and_come_back(tmp_path, nothing_left) -> None:
    out, err = program(tmp_path).communicate(timeout=60)
    assert out == "[5, 6]\nTrue\n", err
    assert err == ""
    nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_an_ended_program(signum, tmp_path, nothing_left) -> None:
    process = program(tmp_path, "wait", fresh=signum == signal.SIGKILL)
    assert process.stdout is not None
    while not process.stdout.readline().endswith("ready\n"):
        assert process.poll() is None
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    if signum == signal.SIGINT:
        assert "KeyboardInterrupt" in err
    nothing_left()
