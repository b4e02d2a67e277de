"""Test how ranks meet: the ways to meet, meeting again, ranks of mpiexec and torchrun, and who is missing."""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed
from tools.mpich_memory import mpich_memory_removed

from forking import Child
from ports import free_port
from torchestra.errors import DistError, DistNetworkError, InvalidArgumentError, StoreTimeoutError
from torchestra.rendezvous import Rendezvous, methods, rendezvous
from torchestra.rendezvous.local_job import local_store_address
from torchestra.store import FileStore, HashStore, Store, TCPStore, TCPStoreServer
from warm_programs import NestedWarm, is_python, run_warm

T = TypeVar("T")
LONG = 60.0


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what launched the tests themselves: it must not matter."""
    starts = ("OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC_", "TORCHESTRA_", "MASTER_", "LOCAL_")
    for name in list(os.environ):
        if name.startswith(starts) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def port() -> int:
    return free_port()


def together(count: int, work: Callable[[int], T]) -> list[T]:
    """Return what ``work(rank)`` returns on each rank, where the ranks are threads."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def exchange(met: Rendezvous) -> list[bytes]:
    """Tells the others the rank; returns what all told. Nothing must be there before."""
    assert not met.store.check([f"k{met.rank}"])
    met.store.set(f"k{met.rank}", str(met.rank))
    told = met.store.multi_get([f"k{rank}" for rank in range(met.world_size)])
    met.store.barrier("told", met.world_size)
    return told


def ranks(count: int) -> list[bytes]:
    return [str(rank).encode() for rank in range(count)]


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
    "PMIX_RANK": "3",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "run",
}
PLAIN = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}


# The ways to meet ------------------------------------------------------------------------------------------


@pytest.fixture(params=["env", "tcp", "query", "file", "hash store", "tcp store", "torch store"])
def meet(
    request: pytest.FixtureRequest, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, int], Rendezvous]:
    """Meets as rank of world size, in each of the ways."""
    if request.param == "env":
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        return lambda rank, size: rendezvous(None, rank=rank, world_size=size, timeout=LONG)
    if request.param == "tcp":
        return lambda rank, size: rendezvous(
            f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=LONG)
        )
    if request.param == "query":
        return lambda rank, size: rendezvous(
            f"tcp://127.0.0.1:{port}?rank={rank}&world_size={size}", timeout=LONG
        )
    if request.param == "file":
        # A name with what an address must write otherwise.
        url = (tmp_path / "a file").as_uri()
        return lambda rank, size: rendezvous(url, rank=rank, world_size=size, timeout=LONG)
    stores: dict[str, Callable[[], Store]] = {
        "hash store": HashStore,
        "tcp store": lambda: TCPStore("127.0.0.1", 0, is_master=True),
        "torch store": torch.distributed.HashStore,
    }
    store = stores[request.param]()
    return lambda rank, size: rendezvous(rank=rank, world_size=size, store=store, timeout=LONG)


def test_ranks_meet_and_meet_again(meet: Callable[[int, int], Rendezvous]) -> None:
    """The keys of the first world must not be seen in the second."""
    for size in (3, 3, 2):
        assert together(size, lambda rank, size=size: exchange(meet(rank, size))) == [ranks(size)] * size


def test_a_process_may_be_a_world_of_its_own(port: int) -> None:
    met = rendezvous(f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=LONG)
    assert (met.rank, met.world_size, exchange(met)) == (0, 1, [b"0"])
    assert rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", timeout=LONG).store.num_keys() == 0


def test_many_worlds_one_after_the_other(port: int) -> None:
    def run(rank: int) -> list[list[bytes]]:
        return [
            exchange(rendezvous(f"tcp://127.0.0.1:{port}", rank=rank, world_size=4, timeout=LONG))
            for _ in range(20)
        ]

    assert together(4, run) == [[ranks(4)] * 20] * 4


def test_the_time_out_is_the_stores_afterwards(tmp_path: Path) -> None:
    met = rendezvous((tmp_path / "f").as_uri(), rank=0, world_size=1, timeout=7.5)
    assert met.store.timeout == timedelta(seconds=7.5)


def test_the_launchers_store_is_used_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHESTRA_SECRET", "the job's")
    with TCPStoreServer() as server:
        monkeypatch.setenv("TORCHESTRA_STORE", f"{server.host}:{server.port}")
        assert (
            together(2, lambda rank: exchange(rendezvous(rank=rank, world_size=2, timeout=LONG)))
            == [ranks(2)] * 2
        )
    with TCPStoreServer(f"unix:@torchestra-test-{os.getpid()}") as server:
        monkeypatch.setenv("TORCHESTRA_STORE", server.host)
        assert (
            together(2, lambda rank: exchange(rendezvous(rank=rank, world_size=2, timeout=LONG)))
            == [ranks(2)] * 2
        )


def test_a_wrong_address_of_the_launchers_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHESTRA_STORE", "localhost")
    with pytest.raises(InvalidArgumentError, match="TORCHESTRA_STORE must be host:port, got 'localhost'"):
        rendezvous(rank=0, world_size=1, timeout=LONG)


def test_torchruns_store_is_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent listens at MASTER_PORT; were rank 0 to listen there too, the port would be in use."""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, None, True)
    variables = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        for _ in range(2):
            met = together(2, lambda rank: exchange(rendezvous(rank=rank, world_size=2, timeout=LONG)))
            assert met == [ranks(2)] * 2
    keys = agent.list_keys()
    assert keys
    assert all(key.startswith("torchestra/run/") for key in keys)


def test_a_torchrun_whose_agent_has_gone(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistNetworkError, match=rf"no store answered at 127\.0\.0\.1:{port} within 0\.1 s"):
        rendezvous(timeout=0.1)


# Ranks of mpiexec and srun on one host ---------------------------------------------------------------------


def as_rank(variables: Mapping[str, str]) -> list[bytes]:
    os.environ.update(variables)
    return exchange(rendezvous(timeout=LONG))


def local_variables(launcher: str, rank: int, size: int) -> dict[str, str]:
    number, count = str(rank), str(size)
    if launcher == "openmpi":
        return {
            "OMPI_COMM_WORLD_RANK": number,
            "OMPI_COMM_WORLD_SIZE": count,
            "OMPI_COMM_WORLD_LOCAL_RANK": number,
            "OMPI_COMM_WORLD_LOCAL_SIZE": count,
        }
    if launcher == "mpich":
        return {"PMI_RANK": number, "PMI_SIZE": count, "MPI_LOCALRANKID": number, "MPI_LOCALNRANKS": count}
    return {
        "SLURM_PROCID": number,
        "SLURM_NTASKS": count,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": count,
        "SLURM_JOB_ID": str(os.getppid()),
        "SLURM_STEP_NODELIST": "this-host.invalid",
    }


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "slurm"])
def test_ranks_on_one_host_meet_without_an_address(launcher: str) -> None:
    children = [Child(lambda rank=rank: as_rank(local_variables(launcher, rank, 3))) for rank in range(3)]
    assert [child.result() for child in children] == [ranks(3)] * 3


def test_two_jobs_at_once_do_not_meet() -> None:
    """The same launcher, as far as processes go: the jobs' own numbers keep them apart."""
    children = [
        Child(lambda rank=rank, job=job: as_rank({**local_variables("mpich", rank, 2), "PMI_JOBID": job}))
        for rank in range(2)
        for job in ("a", "b")
    ]
    assert [child.result() for child in children] == [ranks(2)] * 4


def test_a_wrapper_around_the_program_changes_nothing() -> None:
    """With `mpiexec sh -c ...` the program's parent is a shell, which was started as a rank itself."""
    program = "import sys, time; print('up', flush=True); sys.stdin.read()"
    environment = {**os.environ, "PMI_RANK": "0"}
    wrapper = subprocess.Popen(
        [sys.executable, "-S", "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert wrapper.stdout is not None
    assert wrapper.stdin is not None
    wrapper.stdout.readline()
    direct = local_store_address({}, "mpich")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getppid", lambda: wrapper.pid)
        # The wrapper is passed over, and its parent, this process, takes the launcher's place.
        through_wrapper = local_store_address({}, "mpich")
        patch.setattr(os, "getppid", os.getpid)
        assert through_wrapper == local_store_address({}, "mpich")
    assert direct != through_wrapper
    wrapper.communicate()


def test_ranks_on_several_hosts_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no MPI that could tell."""
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(methods, "why_no_mpi", lambda: "MPI cannot be used here: install it")
    with pytest.raises(InvalidArgumentError, match=r"MASTER_ADDR expected, .*several hosts.*: install it"):
        rendezvous(timeout=LONG)


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("mpich", r"MPI has a world of 1 rank, but there are 4: mpi4py uses MPICH.* one mpiexec of it"),
        ("openmpi", r"MASTER_ADDR expected, .* mpi4py uses MPICH.*, which is not the MPI of this mpiexec"),
    ],
)
def test_ranks_on_several_hosts_need_an_address_where_mpi_is_another(launcher: str, words: str) -> None:
    """A rank that MPICH's mpiexec has not started believes that it is alone."""

    def meet() -> str:
        os.environ.update(local_variables(launcher, 1, 4))
        os.environ.update({"MPI_LOCALNRANKS": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
        try:
            rendezvous(timeout=LONG)
        except DistError as error:
            return str(error)
        return "met"

    with mpich_memory_removed():
        assert re.search(words, Child(meet).result())


SCRIPT = textwrap.dedent(
    """
    from torchestra.rendezvous import rendezvous
    for _ in range(2):
        met = rendezvous(timeout=60)
        met.store.set(f"k{met.rank}", str(met.rank))
        told = met.store.multi_get([f"k{rank}" for rank in range(met.world_size)])
        assert told == [str(rank).encode() for rank in range(met.world_size)], told
    print(f"rank {met.rank} of {met.world_size}\\n", end="", flush=True)
    """
)


def launched(command: list[str], tmp_path: Path) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = functools.partial(run_warm, kind=NestedWarm) if is_python(command) else subprocess.run
    done = run([*command, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line)


def test_torchrun_itself(tmp_path: Path, nothing_left: Callable[[], None]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert launched(command, tmp_path) == ["rank 0 of 2", "rank 1 of 2"]
    nothing_left()


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec on PATH")
def test_mpiexec_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: Callable[[], None]
) -> None:
    # What Open MPI wants to hear from root, and on a machine with few cores.
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    with mpich_memory_removed():
        assert launched(["mpiexec", "-n", "2", sys.executable], tmp_path) == ["rank 0 of 2", "rank 1 of 2"]
    nothing_left()


# What goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_in_torchs_words(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLAIN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    words = (
        rf"env:// rendezvous: environment variable {missing} expected, but not set; start with torchestra run"
    )
    with pytest.raises(ValueError, match=words):
        rendezvous(timeout=LONG)


@pytest.mark.parametrize(
    ("method", "rank", "world_size", "words"),
    [
        ("tcp://127.0.0.1:1?world_size=2", -1, -1, r"tcp:// rendezvous: rank parameter missing; pass rank="),
        ("tcp://127.0.0.1:1?rank=0", -1, -1, r"tcp:// rendezvous: world size parameter missing"),
        ("file:///tmp/f", -1, 2, "file:// rendezvous: rank parameter missing"),
        ("file://", 0, 1, "file:// rendezvous: path missing"),
        ("tcp://127.0.0.1", 0, 1, "port number missing"),
        ("tcp://:1", 0, 1, "host missing"),
        ("tcp://127.0.0.1:99999", 0, 1, "tcp:// rendezvous: Port out of range"),
        ("tcp://127.0.0.1:0", 1, 2, "a client needs the port"),
        ("http://127.0.0.1:1", 0, 1, "No rendezvous handler for 'http://127"),
        ("tcp://127.0.0.1:1?rank=0", 1, 2, "rank is 1 as an argument, but 0 in the address"),
        ("tcp://127.0.0.1:1?rank=one", -1, 2, "rank in the address must be a number, got 'one'"),
        (None, 2, 2, "rank must be from 0 to world_size - 1, got rank 2 and world_size 2"),
        (None, 0, 0, "got rank 0 and world_size 0"),
        (None, -3, 2, "got rank -3"),
        (None, "0", 2, "`rank` must be an int, got '0'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    method: str | None, rank: int, world_size: int, words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        rendezvous(method, rank=rank, world_size=world_size, timeout=LONG)


def test_who_is_missing_is_named() -> None:
    store = HashStore()
    words = r"rank 2 of 5 waited 0\.05 s at HashStore for ranks 0, 1, 3, 4 to come; are all running"
    with pytest.raises(StoreTimeoutError, match=words):
        rendezvous(rank=2, world_size=5, store=store, timeout=0.05)
    with pytest.raises(StoreTimeoutError, match=r"for ranks 0, .*, 15 and 83 more to come"):
        rendezvous(rank=99, world_size=100, store=HashStore(), timeout=0.01)


def test_a_rank_that_gave_up_may_try_again_also_with_another_world_size() -> None:
    store = HashStore()
    for size in (3, 2):
        with pytest.raises(StoreTimeoutError):
            rendezvous(rank=0, world_size=size, store=store, timeout=0.01)
    assert together(2, lambda rank: exchange(rendezvous(rank=rank, world_size=2, store=store, timeout=LONG)))


def test_ranks_must_agree_on_their_number() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(rendezvous, rank=0, world_size=2, store=store, timeout=LONG)
        store.wait(["rendezvous/0/rank/0"], LONG)
        with pytest.raises(
            InvalidArgumentError, match=r"rank 1 has world_size 3, but another rank at .* has 2"
        ):
            rendezvous(rank=1, world_size=3, store=store, timeout=LONG)
        rendezvous(rank=1, world_size=2, store=store, timeout=LONG)
        assert first.result(LONG).rank == 0


def test_two_processes_cannot_be_the_same_rank(tmp_path: Path) -> None:
    """The usual mistake: RANK was exported once for all."""
    url = (tmp_path / "f").as_uri()

    def meet() -> str:
        try:
            rendezvous(url, rank=1, world_size=2, timeout=LONG)
        except InvalidArgumentError as error:
            return str(error)
        return "met"

    store = FileStore(tmp_path / "f", 2)
    first = Child(meet)
    store.wait(["rendezvous/0/rank/1"], LONG)
    error = Child(meet).result()
    assert f"two processes are rank 1: process {first.pid} on " in error
    assert "every process needs a RANK of its own" in error
    rendezvous(url, rank=0, world_size=2, timeout=LONG)
    assert first.result() == "met"


def test_a_killed_ranks_place_is_taken_by_the_next(tmp_path: Path) -> None:
    url = (tmp_path / "f").as_uri()
    store = FileStore(tmp_path / "f", 3)
    first = Child(lambda: rendezvous(url, rank=1, world_size=2, timeout=LONG).rank)
    store.wait(["rendezvous/0/rank/1"], LONG)
    first.kill()
    with pytest.raises(StoreTimeoutError, match="with rank 1, whose process has died"):
        rendezvous(url, rank=0, world_size=2, timeout=0.05)
    second = Child(lambda: exchange(rendezvous(url, rank=1, world_size=2, timeout=LONG)))
    assert exchange(rendezvous(url, rank=0, world_size=2, timeout=LONG)) == ranks(2)
    assert second.result() == ranks(2)


def test_a_rank_0_that_is_started_again_is_found_by_those_who_wait(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"

    def serve_and_wait() -> int:
        return rendezvous(url, rank=0, world_size=3, timeout=LONG).rank

    first = Child(serve_and_wait)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(lambda: exchange(rendezvous(url, rank=1, world_size=3, timeout=LONG)))
        TCPStore("127.0.0.1", port, timeout=LONG).wait(["rendezvous/0/rank/0", "rendezvous/0/rank/1"], LONG)
        first.kill()
        second = Child(lambda: exchange(rendezvous(url, rank=0, world_size=3, timeout=LONG)))
        assert exchange(rendezvous(url, rank=2, world_size=3, timeout=LONG)) == ranks(3)
        assert other.result(LONG) == ranks(3)
    assert second.result() == ranks(3)


def test_a_rank_0_that_never_comes_back_is_an_error(port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    first = Child(lambda: rendezvous(url, rank=0, world_size=3, timeout=LONG).rank)
    with ThreadPoolExecutor(1) as threads:
        store = TCPStore("127.0.0.1", port, timeout=LONG)
        store.wait(["rendezvous/0/rank/0"], LONG)
        other = threads.submit(lambda: rendezvous(url, rank=1, world_size=3, timeout=5.0))
        store.wait(["rendezvous/0/rank/1"], LONG)
        first.kill()
        with pytest.raises(DistNetworkError, match=r"while it waited for the others: lost .* within 5 s"):
            other.result(LONG)


def test_rank_0_stays_until_the_others_have_had_their_answers(port: int) -> None:
    """A rank that is done first must not take the store away from those who still ask."""
    url = f"tcp://127.0.0.1:{port}"
    told, tell = os.pipe()

    def meet_and_end() -> None:
        multiprocessing.util.Finalize(None, os.write, (tell, b"ending"), exitpriority=100)
        rendezvous(url, rank=0, world_size=2, timeout=LONG).store.set("k", "1")

    child = Child(meet_and_end)
    store = rendezvous(url, rank=1, world_size=2, timeout=LONG).store
    assert os.read(told, 10) == b"ending"
    for _ in range(20):
        assert store.get("k") == b"1"
    del store
    child.result()
    os.close(told)
    os.close(tell)


def test_a_port_in_use_is_an_error_of_rank_0(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(DistNetworkError, match="in use"):
        rendezvous(f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=LONG)


def test_ctrl_c_gets_through(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "f")

    def interrupt() -> None:
        store.wait(["rendezvous/0/rank/0"], LONG)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        rendezvous((tmp_path / "f").as_uri(), rank=0, world_size=2, timeout=LONG)
    helper.join()
