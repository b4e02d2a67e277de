"""Ranks on a Ray cluster of two nodes on this machine, which count as two hosts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import torchestra as dist
from ports import free_port
from torchestra.errors import InvalidArgumentError, LaunchTimeoutError, RankError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-ray installs it"
    ),
    # Ray's processes start slowly, and each rank's loads torch.
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

LIMIT_S = 200
Starter = Callable[..., "subprocess.Popen[str]"]
SOURCES = str(Path(dist.__file__).parents[1])
MEMORY = 100 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with two CPUs each, one with two GPUs that are not there; this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    before = {process.pid for process in psutil.process_iter()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SOURCES)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args=node("first", include_dashboard=False))
        try:
            cluster.add_node(**node("second", num_gpus=2))
            ray.init(cluster.address, log_to_driver=False, logging_level="warning")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
    left = [process for process in psutil.process_iter() if process.pid not in before and is_rays(process)]
    assert psutil.wait_procs(left, timeout=30)[1] == []


def node(host: str, **more: Any) -> dict[str, Any]:
    return {"num_cpus": 2, "object_store_memory": MEMORY, "env_vars": {"TORCHESTRA_HOST_ID": host}, **more}


def is_rays(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "raylet" in process.name() or "gcs_server" in process.name() or "ray::" in process.name()
    return False


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: Any) -> Iterator[None]:
    """No rank, no actor and no placement group outlives a job, however it ends."""
    yield
    import ray
    from ray.util import placement_group_table

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        if not groups and not ranks_alive() and ray.available_resources().get("CPU", 0) >= 4:
            return
        time.sleep(0.1)
    pytest.fail(f"left: {groups}, {ranks_alive()}, {ray.available_resources()}")


def ranks_alive() -> list[psutil.Process]:
    """Processes that have the environment of a rank on Ray."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "RAY_ADDRESS" in process.environ() and "TORCHESTRA_STORE" in process.environ():
                found.append(process)
    return found


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """As if ``__main__`` defined it: this module cannot be imported on the nodes."""
    function.__module__ = "__main__"
    return function


@by_value
def facts(word: str, addend: torch.Tensor) -> dict[str, Any]:
    dist.init_process_group()
    total = addend + dist.get_rank()
    dist.all_reduce(total)
    members = dist.group.WORLD.communicator.engine.hosts.members
    print(f"{word} from {dist.get_rank()}")
    dist.destroy_process_group()
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MY_OWN",
        "OMP_NUM_THREADS",
    )
    return {"environment": [os.environ.get(name) for name in names], "total": total, "members": members}


def test_ranks_share_memory_on_a_node_and_a_bridge_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    results = dist.launch(facts, 4, "hello", torch.arange(3), on="ray", env={"MY_OWN": "word"})
    for rank, result in enumerate(results):
        host, local_rank = divmod(rank, 2)
        assert result["environment"] == [str(rank), "4", str(local_rank), "2", str(host), "word", "1"]
        assert torch.equal(result["total"], 4 * torch.arange(3) + 6)
        assert result["members"] == ((0, 1), (2, 3))
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] hello from {r}" for r in range(4)]


def test_a_failed_rank_is_named_with_its_own_exception() -> None:
    class RefusedError(Exception):
        pass

    def refuse() -> None:
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 1:
            raise RefusedError("no", 7)
        threading.Event().wait()

    with pytest.raises(RankError, match=r"rank 1 of 2 failed: .*RefusedError: \('no', 7\)") as caught:
        dist.launch(refuse, 2, on=dist.RayOptions(strategy="STRICT_SPREAD"))
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert isinstance(caught.value.__cause__, RefusedError), "the caller's class, though it went by value"
    assert caught.value.__cause__.args == ("no", 7)
    assert "in refuse" in caught.value.traceback


def test_a_killed_rank_and_overtime_are_told_as_on_one_host() -> None:
    def kill_or_wait(victim: int) -> None:
        if int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    message = r"rank 1 of 2 ended before the function returned: killed by SIGKILL \(out of memory\?\)"
    with pytest.raises(RankError, match=message) as caught:
        dist.launch(kill_or_wait, 2, 1, on="ray")
    assert caught.value.exit_code == -signal.SIGKILL
    with pytest.raises(LaunchTimeoutError, match="rank 0 of 1 had not finished after") as late:
        dist.launch(kill_or_wait, 1, -1, on="ray", timeout=15)
    assert late.value.ranks == (0,)
    assert "KeyboardInterrupt" in late.value.tracebacks


def test_ranks_see_the_gpus_of_all_ranks_on_their_node() -> None:
    def visible() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    one, other = dist.launch(visible, 2, on=dist.RayOptions(num_gpus=1))
    assert one == other
    assert sorted(one.split(",")) == ["0", "1"]


def test_a_cluster_that_is_too_small_is_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    message = (
        r"Ray had no place for the ranks within 4 s: 5 ranks ask for 1 CPUs each \(PACK\), and the cluster"
        r" has 4 CPUs of which \d are free, on 2 nodes"
    )
    with pytest.raises(LaunchTimeoutError, match=message):
        dist.launch(os.getpid, 5, on=dist.RayOptions(placement_timeout=4))
    assert "torchestra: waiting for Ray: 5 ranks ask for" in capfd.readouterr().err


def test_an_address_where_nobody_listens_is_an_error_at_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "job.py").touch()
    command = [sys.executable, "-m", "torchestra", "run", "--on", "ray", "--ray-address", address, "job.py"]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert f"torchestra run: no connection to a Ray cluster at {address}: [Errno" in done.stderr


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be picklable to reach the ranks"):
        dist.launch(print, 2, threading.Lock(), on="ray")


SCRIPT = """
    import os, sys, threading
    import torch
    import torchestra as dist

    dist.init_process_group()
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print(f"{os.path.basename(os.getcwd())}: {total.item()} {os.environ.get('MY_OWN')}", flush=True)
    dist.barrier()
    if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
        os._exit(7)
    if sys.argv[1:]:
        threading.Event().wait()
    dist.destroy_process_group()
"""


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Starter]:
    """Start ``torchestra run --on ray`` for the script, in a folder of its own."""
    (tmp_path / "job.py").write_text(textwrap.dedent(SCRIPT))
    started = []

    def begin(*arguments: str, directory: Path = tmp_path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torchestra", "run", "--on", "ray", "--nproc", "2"]
        command += ["--ray-address", cluster.address, *arguments]
        environment = {**os.environ, "PYTHONPATH": SOURCES, "MY_OWN": "word", "RAY_AUTH_MODE": "disabled"}
        process = subprocess.Popen(
            command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_run_prints_and_ends_as_on_one_host(start: Starter, tmp_path: Path) -> None:
    job = start("--env", "MY_OWN", "job.py", "fail")
    out, err = job.communicate(timeout=LIMIT_S)
    assert sorted(out.splitlines()) == [f"[rank {rank}] {tmp_path.name}: 3 word" for rank in range(2)]
    assert job.returncode == 7
    assert f"on {socket.gethostname()}) failed: exit code 7" in err.splitlines()[-1]


def test_run_ships_a_folder(start: Starter, tmp_path: Path) -> None:
    job = start("--working-dir", str(tmp_path), "job.py", directory=tmp_path.parent)
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, err
    lines = sorted(out.splitlines())
    assert [line.partition(":")[2] for line in lines] == [" 3 None"] * 2
    assert tmp_path.name not in out, "the ranks run in a copy"


def test_ctrl_c_ends_the_ranks_everywhere(start: Starter) -> None:
    job = start("job.py", "wait")
    assert job.stdout is not None
    for _ in range(2):
        assert ": 3 None" in job.stdout.readline()
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert err.splitlines()[-1] == "torchestra: ended by SIGINT"


def test_a_launcher_that_is_killed_takes_its_ranks_along(start: Starter) -> None:
    job = start("job.py", "wait")
    assert job.stdout is not None
    assert ": 3 None" in job.stdout.readline()
    job.kill()
    job.wait()


def test_a_node_that_dies_is_named_with_its_ranks(cluster: Any, tmp_path: Path) -> None:
    third = cluster.add_node(**node("third", resources={"mortal": 2}))

    def wait_there(folder: Path) -> None:
        (folder / os.environ["RANK"]).touch()
        threading.Event().wait()

    def kill_when_all_are_there() -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.iterdir())) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.remove_node(third, allow_graceful=False)

    killer = threading.Thread(target=kill_when_all_are_there)
    killer.start()
    try:
        with pytest.raises(RankError) as caught:
            dist.launch(wait_there, 6, tmp_path, on="ray")
    finally:
        killer.join()
    host = f"host {socket.gethostname()} "
    assert host in str(caught.value)
    assert "is lost: its Ray node died" in str(caught.value)
    assert any(f"with ranks {n}, {n + 1} is lost" in str(caught.value) for n in (0, 2, 4))


TRAINING = """
    import os, pathlib, signal, sys, time
    import torch
    import torchestra as dist
    from torchestra import elastic

    folder, ranks = pathlib.Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    state = elastic.State(model, torch.optim.Adam(model.parameters()))
    inputs = torch.arange(128.0).reshape(16, 8) / 128
    first = "TORCHESTRA_JOIN" not in os.environ
    dist.init_process_group()
    for shard in elastic.shards(state, steps=12, shards=6, minimum=ranks):
        if ranks > 1 and shard.step == 3 and os.environ["RANK"] == "1" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks > 1 and shard.step == 7:
            (folder / f"seven-{os.environ['RANK']}").touch()
            while not (folder / "removed").exists():
                time.sleep(0.02)
        batch = inputs[shard.indices(16, 12)]
        shard.backward(model(batch).square().sum(), samples=len(batch))
    print("weights", model.weight.detach().numpy().tobytes().hex(), flush=True)
    dist.destroy_process_group()
"""


def test_an_elastic_job_replaces_ranks_that_die_alone_or_with_their_node(
    cluster: Any, start: Starter, tmp_path: Path
) -> None:
    """A rank is started again by its actor; those of a lost node by a spare actor, or in Ray's next place."""
    (tmp_path / "job.py").write_text(textwrap.dedent(TRAINING))
    third = cluster.add_node(**node("third"))
    options = ("--nproc", "3", "--elastic", "1:3", "--spares", "1", "--strategy", "SPREAD")
    more = ("--env", "TORCHESTRA_HEARTBEAT=5", "job.py", str(tmp_path))
    job = start(*options, *more)
    deadline = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("seven-*"))) < 3 and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    cluster.remove_node(third, allow_graceful=False)
    assert job.stderr is not None
    begin = ""
    while "is lost: its Ray node died" not in begin and (line := job.stderr.readline()):
        begin += line
    (tmp_path / "removed").touch()
    out, err = job.communicate(timeout=LIMIT_S)
    err = begin + err
    assert job.returncode == 0, err
    command = [sys.executable, "-m", "torchestra", "run", "--nproc", "1", "job.py", str(tmp_path)]
    undisturbed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    weights = undisturbed.stdout.strip()
    printed = sorted(line for line in out.splitlines() if line.startswith("[rank"))  # Ray prints, too
    assert printed == [f"[rank {rank}] {weights}" for rank in range(3)], err
    assert "torchestra: rank 1: its replacement has joined" in err
    assert "is lost: its Ray node died" in err
    assert err.count("its replacement trains") >= 2, err
