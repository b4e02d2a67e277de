"""``torchestra run --elastic --nnodes``: a host is lost, and a spare one or itself takes its place.

Launchers are all on this machine but told that they are not. Ranks only report how far they are, as groups
do; in one test they train.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nodes import LIMIT_S, ended, free_address

from elastic.training import alone
from torchestra.errors import DistNetworkError
from torchestra.launcher.launcher_rendezvous import parse_rendezvous
from torchestra.launcher.node_ranks import NodeRanks, later_launchers
from torchestra.launcher.node_records import replicas_of
from torchestra.store import HashStore, PrefixStore, TCPStore
from torchestra.store.base import pauses
from torchestra.store.replicated.addresses import Addresses
from torchestra.store.replicated.sessions import SessionPool
from torchestra.store.tcp.protocol import Request
from torchestra.system import deadline
from warm_programs import WarmProgram

SECRET = "of this test"
HEARTBEAT_S = 3.0  # a busy machine may keep a launcher from speaking for a second
PROGRAM = """
    import os, sys, time
    from torchestra.system.phases import report
    folder, rank, join = sys.argv[1], os.environ["RANK"], os.environ.get("TORCHESTRA_JOIN")
    def await_file(name):
        while not os.path.exists(os.path.join(folder, name)):
            time.sleep(0.01)
    assert os.environ.get("TORCHESTRA_MEMBER") == (rank if join else None)
    report("joined")
    report("trains")
    open(os.path.join(folder, f"{'joined' if join else 'began'}{rank}"), "w").close()
    await_file("end")
    print("ended", rank, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"])
"""


TRAINING = f"""
    import hashlib, os, sys, time
    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    import torchestra as dist
    from elastic.training import STEPS, digest, go_on, make
    from torchestra import elastic
    folder, rank, join = sys.argv[1], os.environ["RANK"], os.environ.get("TORCHESTRA_JOIN")
    def hook(shard):
        if shard.step == 2:
            open(os.path.join(folder, ("joined" if join else "began") + rank), "w").close()
            if os.environ["GROUP_RANK"] == "0" and not join:
                time.sleep(1e6)
    dist.init_process_group()
    network, optimizer, scheduler = make(int(rank), 0.0)
    state = elastic.State(network, optimizer=optimizer, scheduler=scheduler)
    go_on(state, 4, STEPS, hook, minimum=4)
    while not os.path.exists(os.path.join(folder, "end")):
        time.sleep(0.01)
    print("ended", rank, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"],
          hashlib.sha256(repr(sorted(digest(state).items())).encode()).hexdigest())
"""


class Hosts:
    """Launchers of one job of two nodes with two ranks each, or of three with one each."""

    def __init__(
        self, folder: Path, *options: str, nodes: int = 2, addresses: int = 1, spares: int = 0
    ) -> None:
        self.folder, self._nodes, self._options, self._spares = folder, nodes, options, spares
        self._rendezvous = ",".join(free_address() for _ in range(addresses))
        self._script = folder / "job.py"
        self.set_program(PROGRAM)
        self.launchers: list[subprocess.Popen[str]] = []

    def set_program(self, text: str) -> None:
        """Have ranks run another program than PROGRAM."""
        self._script.write_text(textwrap.dedent(text))

    def come(self, node: int) -> subprocess.Popen[str]:
        """Start a launcher."""
        ranks = "2" if self._nodes == 2 else "1"
        command = [sys.executable, "-m", "torchestra", "run", "--nnodes", str(self._nodes), "--nproc", ranks]
        command += [
            "--node-rank",
            str(node),
            "--rendezvous",
            self._rendezvous,
            "--spares",
            str(self._spares),
            *self._options,
        ]
        environment = {
            **os.environ,
            "TORCHESTRA_SECRET": SECRET,
            "TORCHESTRA_HOST_ID": f"node{node}",
            "TORCHESTRA_HEARTBEAT": str(HEARTBEAT_S),
            "OMP_NUM_THREADS": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command += [str(self._script), str(self.folder)]
        self.launchers.append(WarmProgram(command, env=environment, **pipes))  # type: ignore[call-overload]
        return self.launchers[-1]

    def wait(self, *names: str) -> None:
        """Wait until ranks have made these files."""
        until = time.monotonic() + LIMIT_S
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < until, sorted(path.name for path in self.folder.iterdir())
            time.sleep(0.01)

    def wait_for_spare(self) -> None:
        """Wait until a spare launcher has said where it would serve a replica of the store."""
        server = TCPStore(*parse_rendezvous(self._rendezvous.split(",")[0]), timeout=LIMIT_S, secret=SECRET)
        PrefixStore("launchers", server).wait(["spare"])
        server.close()

    def wait_for_replacement(self) -> None:
        """Wait until a lost replica of the store has been replaced, and the new one takes part."""
        server = TCPStore(*parse_rendezvous(self._rendezvous.split(",")[1]), timeout=LIMIT_S, secret=SECRET)
        store = PrefixStore("launchers", server)
        began = replicas_of(json.loads(store.get("members")))
        for _ in pauses(LIMIT_S):
            new = set(store.get("replicas").decode().split(",")) - set(began)
            if new and takes_part(*new):
                server.close()
                return
        raise AssertionError(began)

    def end(self) -> None:
        """Let the ranks end."""
        (self.folder / "end").touch()


def takes_part(address: str) -> bool:
    """Return whether the replica at an address, one that has replaced another, takes part in the store."""
    pool = SessionPool(Addresses([address]), SECRET.encode(), "probe")
    try:
        pool.request(Request.CHECK, [], 0.0, 0.0)
    except DistNetworkError as error:
        return "of 1 replicas" in str(error)  # it tells where all are
    finally:
        pool.close()
    return False


def alone_with_one_thread() -> dict[str, Any]:
    """Train as a single rank, with as many threads as the launchers give each of theirs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return alone(4)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(*options: str, **others: int) -> Hosts:
        made.append(Hosts(tmp_path, *options, **others))
        return made[-1]

    yield make
    for launcher in (each for one in made for each in one.launchers):
        launcher.kill()
        launcher.communicate()


def test_a_spare_host_takes_the_place_of_node_0_which_is_spare_when_it_comes_back(
    hosts, nothing_left
) -> None:
    """Of two nodes and a spare one each serves a replica of the store, so that any of them may be lost.

    The ranks train: what they have in the end is, to the bit, what a single rank has that nobody disturbs.
    """
    job = hosts("--elastic", "1:4", addresses=2, spares=1)
    job.set_program(TRAINING)
    expected = hashlib.sha256(repr(sorted(alone_with_one_thread().items())).encode()).hexdigest()
    spare, lost = job.come(2), job.come(0)
    job.wait_for_spare()
    second = job.come(1)
    job.wait(*(f"began{rank}" for rank in range(4)))
    lost.send_signal(signal.SIGKILL)
    job.wait("joined0", "joined1")
    back = job.come(0)
    job.wait_for_replacement()
    job.end()
    out, err, code = ended(second)
    assert (code, err) == (0, ""), "the others go on"
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] ended {rank} {rank - 2} 2 1 {expected}" for rank in (2, 3)
    ]
    out, err, code = ended(spare)
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] ended {rank} {rank} 2 0 {expected}" for rank in (0, 1)
    ]
    assert "takes the place of node 0" in err
    _, err, code = ended(back)
    assert code == 0, err
    assert "the job has ended without this host" in err
    nothing_left()


def test_a_host_that_comes_later_finds_the_job_at_another_address_than_that_of_node_0(
    hosts, nothing_left
) -> None:
    job = hosts("--elastic", "1:4", nodes=3, addresses=2)
    first, second, third = job.come(0), job.come(1), job.come(2)
    job.wait(*(f"began{rank}" for rank in range(3)))
    first.send_signal(signal.SIGKILL)
    back = job.come(0)
    job.wait("joined0")
    job.wait_for_replacement()
    second.send_signal(signal.SIGKILL)  # of three replicas two are lost by now, and one of them is replaced
    job.end()
    assert ended(third)[1:] == ("", 0)
    out, err, code = ended(back)
    assert (code, out) == (0, "[rank 0] ended 0 0 1 0\n"), err
    assert "takes the place of node 0" in err
    nothing_left()


def test_fewer_members_than_needed_on_all_hosts_end_the_job(hosts, nothing_left) -> None:
    job = hosts("--elastic", "3:4")
    first, lost = job.come(0), job.come(1)
    job.wait(*(f"began{rank}" for rank in range(4)))
    lost.send_signal(signal.SIGKILL)
    _, err, code = ended(first)
    assert code == 1
    assert "of the job's members 2 are left on all hosts, and --elastic needs 3" in err
    nothing_left()


def test_a_rank_of_several_hosts_is_replaced_on_its_own(hosts, nothing_left) -> None:
    job = hosts("--elastic", "1:4", "--max-restarts", "1")
    first, second = job.come(0), job.come(1)
    job.wait(*(f"began{rank}" for rank in range(4)))
    server = int(Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text())
    ranks = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    victim = ranks[-1]
    os.kill(victim, signal.SIGKILL)
    job.wait("joined3")
    job.end()
    assert ended(first)[2] == 0
    out, err, code = ended(second)
    assert code == 0, err
    assert "torchestra: rank 3: its replacement has started" in err
    assert "[rank 3] ended 3 1 2 1" in out
    nothing_left()


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_of_two_that_want_a_place_one_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a launcher that was only cut off learns that it has lost its place."""
    store, clock = HashStore(), Clock()
    monkeypatch.setattr(deadline, "time", clock)
    lost, one, two = (NodeRanks(store, [2, 2], name) for name in ("1", "2-a", "3-b"))
    for count in range(30):
        store.set("heartbeat/0", f"{count} 2")
        if count == 0:
            store.set("heartbeat/1", "0 2")
        assert not one._take(0)
        assert not two._take(0)
        assert lost.is_first(0)
        assert not lost.is_first(1), "node rank 0 is not silent"
        if clock.now < 10.0:
            assert not one._take(1)
            assert not two._take(1)
            assert lost.is_mine(1)
        clock.now += 0.5
    holder = one._holder(1)
    assert two._take(1)
    monkeypatch.setattr(one, "_holder", lambda node_rank: holder)  # read before the other took it
    assert not one._take(1)
    assert not lost.is_mine(1)
    assert not lost.is_first(1)
    for _ in range(30):
        silent = lost.is_first(1)
        clock.now += 0.5
    assert silent, "the limits are looked after though host 0 is gone"
    assert two.is_mine(1)


def test_the_launcher_that_serves_the_store_waits_for_those_that_came_later() -> None:
    store = HashStore()
    store.set("ended", b"")
    assert NodeRanks(store, [1], "1-a").wait(0) is None
    assert NodeRanks(store, [1], "2-b").wait(0) is None
    assert list(later_launchers(store)) == ["1-a", "2-b"]
