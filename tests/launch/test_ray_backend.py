"""Test the launcher with the actors of ranks on Ray; threads carry the calls instead of Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torchestra
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.errors import LaunchTimeoutError, RankError
from torchestra.launcher import fork_server_client
from torchestra.launcher.failure_report import conclude
from torchestra.launcher.job import Job
from torchestra.launcher.launched_job import LaunchedJob
from torchestra.launcher.on_ray.actor import RankActor
from torchestra.launcher.on_ray.backend import RayBackend
from torchestra.launcher.on_ray.messages import ActorInfo, EventBatch
from torchestra.launcher.on_ray.placement import Placement
from torchestra.launcher.output import open_sinks
from torchestra.launcher.pickling import dump_call
from torchestra.launcher.replacements import ElasticLimits, Replacements
from torchestra.launcher.spec import JobSpec, Script
from torchestra.store.replicated import server
from warm_programs import WarmSubprocess


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ActorUnavailableError(RayError):
    pass


class FakeRay:
    """As much of ray as a backend uses."""

    def __init__(self, nodes: list[str]) -> None:
        self.alive = dict.fromkeys(nodes, True)
        self.exceptions = SimpleNamespace(
            RayError=RayError, RayTaskError=RayTaskError, ActorUnavailableError=ActorUnavailableError
        )

    def kill(self, handle: Handle) -> None:
        """End the actor's rank, and what it serves of the store."""
        handle.actor.close()

    def put(self, thing: object) -> object:
        return thing

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": node, "Alive": alive} for node, alive in self.alive.items()]


class Handle:
    """An actor in this process. ``spoil`` is called with each reply of ``listen``, and may raise."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.actor = RankActor()
        self.spoil: Callable[[EventBatch], None] = lambda batch: None
        self.name = "node9"
        self._pool = pool

    def info_of_node(self) -> ActorInfo:
        return ActorInfo(self.name, self.name, "127.0.0.1", (), "", torchestra.__version__)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            def run() -> Any:
                try:
                    if name == "info":
                        return self.info_of_node()
                    result = getattr(self.actor, name)(*arguments)
                except Exception as error:
                    raise RayTaskError(error) from error
                if isinstance(result, EventBatch):
                    self.spoil(result)
                return result

            future: Future[Any] = self._pool.submit(run)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=call)


class Stage(Placement):
    """Ranks on pretended nodes, two on each, and perhaps actors more."""

    def __init__(self, ranks: int, spares: int = 0) -> None:
        self.pool = ThreadPoolExecutor(16)
        self.handles = [Handle(self.pool) for _ in range(ranks + spares)]
        names = [f"node{index // 2}" for index in range(ranks + spares)]
        self.ray = FakeRay(names)
        self._actors, self._ranks = list(self.handles), ranks
        for handle, name in zip(self.handles, names, strict=True):
            handle.name = name
        self._number([handle.info_of_node() for handle in self.handles])

    def _start_actor(self, bundle: int) -> Handle:
        self.handles.append(Handle(self.pool))
        return self.handles[-1]

    def call(self, replies: Sequence[Any], purpose: str) -> list[Any]:
        return [reply.future().result() for reply in replies]

    def launch(self, function: Callable[[], Any], timeout: float | None = None, **more: Any) -> list[Any]:
        """As launch_on_ray does it, but for the cluster."""
        target = more.pop("target", None) or dump_call(function, (), elsewhere=True)
        spec = JobSpec(len(self.ranks_placed), target, environment={}, directory=more.pop("directory", ""))
        backend = RayBackend(self, {"MY_OWN": "word"})
        job = Job(backend, spec, open_sinks(sys.stdout, sys.stderr))
        launched = LaunchedJob(job, timeout)
        with contextlib.closing(job):
            launched.run()
            return launched.results()

    def run_elastic(self, script: Path, *arguments: str) -> tuple[int | None, list[str]]:
        """As ``torchestra run --on ray --elastic`` does it; return exit code and the launcher's lines."""
        ranks, lines = len(self.ranks_placed), []
        spec = JobSpec(ranks, Script(str(script), arguments), environment={}, directory=str(script.parent))
        job = Job(
            RayBackend(self, {HEARTBEAT_VARIABLE: "0.5"}, elastic=True),
            spec,
            open_sinks(sys.stdout, sys.stderr),
        )
        job.policy = Replacements(job, ElasticLimits(1, ranks), lines.append)
        with contextlib.closing(job):
            job.run()
        return conclude(job, []), lines

    def close(self) -> None:
        for handle in self.handles:
            handle.actor.close()
        self.pool.shutdown()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    """Make a stage. Where the actors would ask Ray, they find nothing special. Fork servers are forked."""
    monkeypatch.setattr("torchestra.launcher.on_ray.actor._search_path", lambda: tuple(sys.path))
    monkeypatch.setattr(fork_server_client, "subprocess", WarmSubprocess())
    stages: list[Stage] = []

    def make(ranks: int, spares: int = 0) -> Stage:
        stages.append(Stage(ranks, spares))
        return stages[-1]

    yield make
    for each in stages:
        each.close()


def test_replies_that_are_lost_are_fetched_anew(stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is missing and nothing comes twice, whichever replies a broken connection swallows."""
    there = stage(2)
    for handle in there.handles:
        lost = iter([True, False, True, True])

        def spoil(batch: EventBatch, lost: Iterator[bool] = lost) -> None:
            if next(lost, False):
                raise ActorUnavailableError("connection lost")

        handle.spoil = spoil

    def work() -> tuple[list[str | None], bytes]:
        for line in range(3):
            print(f"line {line}")
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "MY_OWN")
        return [os.environ.get(name) for name in names], bytes(20 << 20)

    for rank, (names, data) in enumerate(there.launch(work)):
        assert names == [str(rank), str(rank), "2", "0", "2", "word"]
        assert data == bytes(20 << 20)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        assert [line for line in lines if f"rank {rank}" in line] == [
            f"[rank {rank}] line {n}" for n in range(3)
        ]


def test_a_node_and_an_actor_that_are_lost_are_named(stage) -> None:
    def wait() -> None:
        print("here", flush=True)
        threading.Event().wait()

    there = stage(3)

    def die(batch: EventBatch) -> None:
        if batch.first > 0 or batch.events:
            there.ray.alive["node1"] = False
            raise RayError("The actor died unexpectedly before finishing this task.\nno more is known")

    there.handles[2].spoil = die
    message = r"rank 2 of 3 failed: host node1 \(127.0.0.1\) with rank 2 is lost: its Ray node died"
    with pytest.raises(RankError, match=message):
        there.launch(wait)

    alone = stage(1)

    def be_killed(batch: EventBatch) -> None:
        raise RayError("The actor died.\nThe actor is dead because it was killed by `ray.kill`.")

    alone.handles[0].spoil = be_killed
    with pytest.raises(RankError, match=r"the Ray actor of rank 0 on host node0 .* killed by `ray.kill`"):
        alone.launch(wait)


def test_a_rank_that_prints_more_than_is_fetched_waits(stage, capsys: pytest.CaptureFixture[str]) -> None:
    """An actor keeps only so much; all of it arrives."""

    def chatter() -> None:
        for _ in range(250):
            print("x" * 99_999)

    there = stage(1)
    most = 0

    def look(batch: EventBatch) -> None:
        nonlocal most
        most = max(most, sum(len(getattr(piece, "data", b"")) for piece in batch.events))

    there.handles[0].spoil = look
    assert there.launch(chatter) == [None]
    assert len(capsys.readouterr().out) == 250 * 100_000
    assert most <= 8 << 20


def test_a_script_that_is_not_on_the_node_is_an_error_with_its_host(stage, tmp_path) -> None:
    message = (
        f"there is no file '{tmp_path}/job.py' on host {socket.gethostname()}; it must be there on every"
    )
    with pytest.raises(RankError, match=message):
        stage(1).launch(print, target=Script("job.py"), directory=str(tmp_path))
    with pytest.raises(RankError, match="there is no directory '/nowhere/at/all' on host"):
        stage(1).launch(print, target=Script("job.py"), directory="/nowhere/at/all")


def test_a_rank_that_is_stopped_before_it_exists_never_starts(stage, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("torchestra.launcher.on_ray.backend._LAST_WAIT_S", 1e9)
    monkeypatch.setattr(fork_server_client, "subprocess", subprocess)  # a server that is not ready at once

    def wait() -> None:
        (tmp_path / "started").touch()
        threading.Event().wait()

    with pytest.raises(LaunchTimeoutError, match=r"rank 0 of 1 had not finished after 0\.01 s"):
        stage(1).launch(wait, timeout=0.01)
    assert list(tmp_path.iterdir()) == []


MEMBER = """
    import os, pathlib, signal, sys, time
    import torchestra as dist
    from torchestra.system.phases import report
    folder, rank, join = pathlib.Path(sys.argv[1]), os.environ["RANK"], os.environ.get("TORCHESTRA_JOIN")
    addresses, secret = os.environ["TORCHESTRA_STORE"].split(","), os.environ["TORCHESTRA_SECRET"]
    store = dist.ReplicatedStore(addresses, secret=secret)
    times = store.add(f"times/{rank}", 1)
    assert join == (None if times == 1 else "1"), (rank, join, times)
    report("joined")
    report("trains")
    local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]
    store.set(f"there/{rank}/{times}", " ".join(local))
    store.wait(["there/0/1", "there/1/1"])
    if rank == "0" and times == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "1":
        before = store.get(f"replicas/{times - 1}").decode() if times > 1 else ""
        while before == ",".join(store.addresses):  # until that of the actor before is replaced
            store.check([])
            time.sleep(0.02)
        store.set(f"replicas/{times}", ",".join(store.addresses))
        if times < 3:
            (folder / f"mortal{times}").touch()
            print("lost", file=sys.stderr, flush=True)  # so that the launcher hears of its actor at once
            time.sleep(1e6)
        store.set("over", "")
    store.wait(["there/0/2", "there/1/3", "over"])
    print(*(store.get(key).decode() for key in ("there/0/2", "there/1/2", "there/1/3")), flush=True)
"""


def test_ranks_are_replaced_by_their_actor_a_spare_one_and_a_new_one(
    stage, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies is forked again where it was; one that has lost its actor starts at another.

    So is the replica of the store that the lost actor served.
    """
    script = tmp_path / "member.py"
    script.write_text(textwrap.dedent(MEMBER))
    monkeypatch.setattr(server, "VIEW_CHANGE_TIMEOUT_S", 0.5)
    there = stage(3, spares=1)

    def lose(actor: Handle, which: int) -> None:
        def die(batch: EventBatch) -> None:
            if (tmp_path / f"mortal{which}").exists():
                raise RayError("The actor died.")

        actor.spoil = die

    lose(there.handles[1], 1)
    lose(there.handles[3], 2)
    code, lines = there.run_elastic(script, str(tmp_path))
    assert code == 0, lines
    out = capsys.readouterr().out.splitlines()
    assert sorted(out) == [f"[rank {rank}] 0 2 0 1 2 1 0 1 2" for rank in range(3)]
    said = "".join(lines)
    assert said.count("torchestra: rank 1: its replacement has started") == 2, said
    assert said.count("torchestra: rank 0: its replacement trains") == 1, said
    assert len(there.handles) == 5, "three ranks, the spare actor, and the new one"
