"""``torchestra run --nnodes``: several launchers, one job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ports import free_port
from torchestra.errors import DistError, DistNetworkError, InvalidArgumentError
from torchestra.launcher import launcher_rendezvous
from torchestra.launcher import nodes as meeting
from torchestra.launcher.event_loop import EventLoop
from torchestra.launcher.launcher_rendezvous import LauncherRendezvous, parse_rendezvous
from torchestra.launcher.nodes import Nodes
from torchestra.store import PrefixStore, TCPStore
from torchestra.store.base import interruptible_sleep
from torchestra.store.tcp.address import Address
from torchestra.system import deadline
from warm_programs import WarmProgram

SCRIPT = """
    import atexit, os, signal, sys, time
    import torch
    import torchestra as dist

    dist.init_process_group()
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    hosts = dist.group.WORLD.communicator.engine.hosts.members
    local = f"{os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
    print(f"{local}: {total.item()} {hosts}", flush=True)
    if sys.argv[1:] and dist.get_rank() == 2:
        os._exit(7)
    if sys.argv[1:] == ["fail", "slowly"] and dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit.register(time.sleep, 3.0)
    dist.barrier()
    dist.destroy_process_group()
"""
LIMIT_S = 100


def free_address() -> str:
    """Where launchers can meet."""
    return f"127.0.0.1:{free_port()}"


def run_nodes(script: Path, ranks: tuple[int, ...], *arguments: str) -> list[tuple[str, str, int]]:
    """One launcher for each node, all on this machine but told that they are not; how each ended."""
    with nodes_running(free_address(), script, ranks, *arguments) as launchers:
        return [ended(launcher) for launcher in launchers]


def ended(launcher: subprocess.Popen[str]) -> tuple[str, str, int]:
    """Return what a launcher has printed, and its exit code."""
    out, err = launcher.communicate(timeout=LIMIT_S)
    return out, err, launcher.returncode


@contextmanager
def nodes_running(
    rendezvous: str, script: Path, ranks: tuple[int, ...], *arguments: str, options: tuple[str, ...] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same, under way. ``options`` are the launchers' own."""
    launchers = []
    for node, nproc in enumerate(ranks):
        command = [
            sys.executable,
            "-m",
            "torchestra",
            "run",
            "--nnodes",
            str(len(ranks)),
            "--node-rank",
            str(node),
        ]
        command += ["--rendezvous", rendezvous, "--nproc", str(nproc), *options, str(script), *arguments]
        environment = {**os.environ, "TORCHESTRA_SECRET": "of this test", "TORCHESTRA_HOST_ID": f"node{node}"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        launchers.append(WarmProgram(command, env=environment, text=True, **pipes))
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_ranks_are_numbered_by_node_and_meet(script: Path) -> None:
    (first, _, code), (second, _, other_code) = run_nodes(script, (1, 2))
    assert (code, other_code) == (0, 0)
    assert first == "[rank 0] 0 of 1: 6 ((0,), (1, 2))\n"
    assert sorted(second.splitlines()) == [
        "[rank 1] 0 of 2: 6 ((0,), (1, 2))",
        "[rank 2] 1 of 2: 6 ((0,), (1, 2))",
    ]


@pytest.mark.parametrize("how", [("fail",), ("fail", "slowly")])
def test_the_failure_of_one_node_ends_all_with_its_code(script: Path, how: tuple[str, ...]) -> None:
    """Also if its other rank takes long to end: the other node waits a second only to hear of the cause."""
    (_, first, code), (_, second, other_code) = run_nodes(script, (1, 2), *how)
    assert (code, other_code) == (7, 7)
    assert re.search(
        r"torchestra: ended because node 1 failed: rank 2 \(pid \d+ on \S+\) failed: exit code 7", first
    )
    assert re.search(r"torchestra: rank 2 \(pid \d+\) failed: exit code 7", second)


FAILING = """
    import os, sys, time
    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    def await_the_test():
        while not os.path.exists(os.path.join(folder, "go on")):
            time.sleep(0.01)
"""


def test_a_host_whose_ranks_all_fail_does_not_end_the_others(tmp_path: Path) -> None:
    """What --max-failures allows may be all that a host has: with one rank on each, say, as with one GPU."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(FAILING + "    sys.exit(3) if rank == 1 else await_the_test()\n"))
    options = ("--max-failures", "1")
    with nodes_running(free_address(), script, (1, 1), str(tmp_path), options=options) as (first, second):
        _, told, code = ended(second)
        assert code == 0, told
        assert re.search(r"torchestra: rank 1 \(pid \d+\) failed: exit code 3\n", told)
        assert told.endswith("torchestra: no rank is left on this host; those on other hosts go on\n")
        (tmp_path / "go on").touch()
        assert ended(first) == ("", "", 0)


def test_failures_on_all_hosts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_SECRET", "of this test")
    script, rendezvous = tmp_path / "job.py", free_address()
    last = """
    if rank == 0: sys.exit(3)
    await_the_test()
    if rank == 3: sys.exit(5)
    time.sleep(1000)
"""
    script.write_text(textwrap.dedent(FAILING + last))
    with nodes_running(
        rendezvous, script, (2, 2), str(tmp_path), options=("--max-failures", "1")
    ) as launchers:
        store = PrefixStore("launchers", TCPStore(*parse_rendezvous(rendezvous), timeout=LIMIT_S))
        store.wait(["failures"], LIMIT_S)
        (tmp_path / "go on").touch()
        (_, first, code), (_, second, other_code) = map(ended, launchers)
    assert (code, other_code) == (5, 5), "the second failure is one too many, though the first here"
    assert "failed: exit code 3; rank 1 goes on" in first
    assert re.search(r"ended because node 1 failed: rank 3 \(pid \d+ on \S+\) failed: exit code 5", first)
    assert re.search(r"torchestra: rank 3 \(pid \d+\) failed: exit code 5; rank 2 ended with it\n$", second)


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_SECRET", "a secret")
    with pytest.raises(InvalidArgumentError, match="--node-rank must be from 0 to 1, got 2"):
        Nodes(2, 2, "127.0.0.1:1", 1, 1)
    for text in ("node0", "node0:", ":29400", "node0:0", "node0:99999"):
        with pytest.raises(InvalidArgumentError, match="--rendezvous must be host:port"):
            parse_rendezvous(text)
    assert parse_rendezvous("[::1]:29400") == ("::1", 29400)
    with pytest.raises(InvalidArgumentError, match="has 2 addresses, but the launchers of 1 nodes serve"):
        Nodes(2, 0, "127.0.0.1:1,127.0.0.1:2", 1, 1)
    with pytest.raises(InvalidArgumentError, match="has an address twice"):
        Nodes(3, 0, "127.0.0.1:1,127.0.0.1:1", 1, 1)
    monkeypatch.delenv("TORCHESTRA_SECRET")
    with pytest.raises(InvalidArgumentError, match="set TORCHESTRA_SECRET to the same random text"):
        Nodes(2, 0, "127.0.0.1:1", 1, 1)


def test_node_0_that_is_not_at_the_rendezvous_says_so_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts whose node ranks are exchanged would wait for each other for ten minutes."""
    monkeypatch.setenv("TORCHESTRA_SECRET", "a secret")
    monkeypatch.setattr(launcher_rendezvous, "_OWN_SECONDS", 0.5)
    of_no_host = free_address().replace("127.0.0.1", "192.0.2.1")
    with pytest.raises(
        DistError, match=f"--node-rank 0 listens at --rendezvous {of_no_host}; is that an address"
    ):
        Nodes(2, 0, of_no_host, 1, 1)


class Launchers:
    """Launchers of one job in this process, each on a thread of its own. As a context, ends them."""

    def __init__(self, nnodes: int) -> None:
        self.nnodes = nnodes
        self.rendezvous = free_address()
        self._threads: list[threading.Thread] = []
        self.ended: dict[int, Nodes | DistError] = {}

    def come(self, node: int, nnodes: int | None = None) -> int:
        """One more; its number, under which stands how it ended."""
        number = len(self._threads)

        def body() -> None:
            try:
                self.ended[number] = Nodes(nnodes or self.nnodes, node, self.rendezvous, node + 1, 1)
            except DistError as error:
                self.ended[number] = error

        self._threads.append(threading.Thread(target=body))
        self._threads[-1].start()
        return number

    def how(self, number: int) -> Nodes | DistError:
        """Return what became of one, waited for."""
        self._threads[number].join(LIMIT_S)
        return self.ended[number]

    def signed(self, node: int, text: bytes = b"") -> bytes:
        """Wait until another launcher has come as a node; what it says."""
        store = PrefixStore("launchers", TCPStore(*parse_rendezvous(self.rendezvous), timeout=LIMIT_S))
        while (said := store.get(f"node/{node}")) == text:
            interruptible_sleep(0.001)
        return said

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *error: object) -> None:
        came = [each for each in self.ended.values() if isinstance(each, Nodes)]
        threads = [threading.Thread(target=nodes.close) for nodes in came]  # those that serve wait for all
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)


def test_hosts_that_do_not_answer_are_given_up_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try of a host that is off lasts long, and all of it counts."""
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    def try_in_vain(address: Address) -> bool:
        pass_time(launcher_rendezvous._TRY_SECONDS)
        return False

    monkeypatch.setattr(deadline.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(launcher_rendezvous, "interruptible_sleep", pass_time)
    monkeypatch.setattr(launcher_rendezvous, "_answers", try_in_vain)
    with pytest.raises(DistNetworkError, match="node 2 has reached no launcher at --rendezvous a:1,b:1,c:1"):
        LauncherRendezvous("a:1,b:1,c:1", 3, 2)
    assert launcher_rendezvous.MEET_SECONDS <= now[0] < launcher_rendezvous.MEET_SECONDS + 10


def test_a_loop_that_is_closed_is_not_woken_by_a_thread() -> None:
    """A thread that heard of a failure after the end wrote into what had the number of a closed pipe."""
    loop = EventLoop()
    descriptors = loop._wake_end, loop.wakeup_fd
    loop.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    loop.call_soon_threadsafe(lambda: None)
    loop.close()


def test_a_loop_calls_what_is_due_in_its_order() -> None:
    loop, calls = EventLoop(), []
    loop.call_at(0.0, lambda: calls.append("second timer, made first"))
    loop.call_at(-1.0, lambda: calls.append("first timer"))
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(lambda: calls.append("thread"),))
    thread.start()
    thread.join()
    loop.run_once()
    assert calls == ["thread", "first timer", "second timer, made first"]
    loop.close()


def test_launchers_wait_for_each_other_and_say_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that does not fit the others is told so, and they are not disturbed."""
    monkeypatch.setenv("TORCHESTRA_SECRET", "a secret")
    monkeypatch.setattr(meeting, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(meeting, "_NOTICE_AFTER_S", 0.0)
    with Launchers(3) as launchers:
        first = launchers.come(0)
        launchers.signed(0)
        other_number = launchers.how(launchers.come(1, nnodes=2))
        assert re.search(
            r"node 1 has --nnodes 2, but that of node 0 \(process \d+ on \S+\) has --nnodes 3",
            str(other_number),
        )
        with monkeypatch.context() as patch:
            patch.setattr("torchestra.__version__", "0.0.1")
            old = launchers.how(launchers.come(1))
        assert "node 1 has torchestra 0.0.1, but that of node 0" in str(old)
        replaced = launchers.come(1)
        said = launchers.signed(1)
        second = launchers.come(1)
        launchers.signed(1, said)
        assert "two launchers are node 1: process" in str(launchers.how(replaced))
        third = launchers.come(2)
        nodes = [launchers.how(each) for each in (first, second, third)]
        assert [(each.first_rank, each.world_size) for each in nodes if isinstance(each, Nodes)] == [
            (0, 6),
            (1, 6),
            (3, 6),
        ]
        assert "two launchers are node 1: process" in str(launchers.how(launchers.come(1)))
    assert re.search(r"waiting for nodes? (1, )?2 to connect to 127\.0\.0\.1:\d+", capsys.readouterr().err)
