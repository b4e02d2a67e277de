"""The life of a rank in a round: it meets the others, works, says how it ended, and leaves."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tools.chaos.rounds import Round, load
from tools.chaos.workloads import WORKLOADS, Job

import torchestra as dist
from torchestra.store import FileStore, HashStore, Store, TCPStore
from torchestra.world.registry import thread_rank

MEETING_S = 30.0
_OPENED = ("/memfd:", "/dev/shm", "socket:", "anon_inode:")
_STACKS = "/memfd:stacks of torchestra"  # where a process writes its stacks: one, until it ends
_SECRET = "a secret of these rounds"


class Diary:
    """What a rank tells: a file with one line of JSON for each thing, opened before there is trouble."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def write(self, what: str, **more: Any) -> None:
        """Add a line."""
        os.write(self._file, json.dumps({"what": what, **more}).encode() + b"\n")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def be_process(round_: Round, rank: int, folder: Path, address: str) -> None:
    """Be a rank that is a process. Files in the folder tell how it went.

    Args:
        address: of the host of rank 0, for worlds of several hosts.
    """
    diary = Diary(folder, rank)
    _set_up(round_, folder, rank)
    if round_.world.bridge:
        os.environ["TORCHESTRA_BRIDGE"] = round_.world.bridge
        os.environ["TORCHESTRA_TRUST_NETWORK"] = "0" if round_.world.bridge == "curve" else "1"
        if not round_.world.namespaces:
            os.environ["TORCHESTRA_HOST_ID"] = f"host{round_.world.host_of(rank)}"
    _live(round_, rank, diary, lambda: _store(round_, rank, folder, address))
    # MPI has its own threads and files until the process ends.
    diary.write("over", left=[] if round_.world.bridge == "mpi" else remains(round_.timeout_s))


def be_threads(round_: Round, folder: Path) -> None:
    """Be a process whose threads are the ranks."""
    _set_up(round_, folder, 0)
    store, world = HashStore(), round_.world
    diaries = [Diary(folder, rank) for rank in range(world.size)]

    def body(rank: int) -> None:
        host = f"host{world.host_of(rank)}" if world.bridge else ""
        with thread_rank(rank, world.size, store, host):
            _live(round_, rank, diaries[rank], lambda: store)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = remains(round_.timeout_s)
    for diary in diaries:
        diary.write("over", left=left)


def _set_up(round_: Round, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.update({"TORCHESTRA_SECRET": _SECRET, "TORCHESTRA_HEARTBEAT": str(round_.heartbeat_s)})
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    faulthandler.register(signal.SIGUSR1, file=_opened(folder / f"stacks-{rank}"), all_threads=True)
    faulthandler.enable(_opened(folder / f"crash-{rank}"))


def _opened(path: Path) -> int:
    """Open a file for writing, as long as the process lives."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)


def _store(round_: Round, rank: int, folder: Path, address: str) -> Store:
    """Return the store of the ranks: a file on one host, else rank 0's server, whose port is in a file."""
    files = FileStore(str(folder / "store"), round_.world.size)
    if not round_.world.bridge:
        return files
    if rank == 0:
        served = TCPStore(address, 0, is_master=True, timeout=MEETING_S)
        files.set("port", str(served.port))
        return served
    return TCPStore(address, int(files.get("port")), timeout=MEETING_S)


def _live(round_: Round, rank: int, diary: Diary, store: Any) -> None:
    diary.write("begun", pid=os.getpid())
    job = Job(round_, rank, diary.write)
    try:
        job.doing = "init_process_group"
        job.store = store()
        dist.init_process_group(
            store=job.store, rank=rank, world_size=round_.world.size, timeout=MEETING_S
        ) if round_.world.ranks == "processes" else dist.init_process_group(timeout=MEETING_S)
        dist.barrier()
        dist.group.WORLD.set_timeout(round_.timeout_s)
        WORKLOADS[round_.workload](job)
        job.doing = "barrier"
        dist.barrier()
        diary.write("right", steps=job.steps, digests=job.digests, at=time.time())
    except BaseException as error:
        _lift_limits()
        diary.write("error", doing=job.doing, digests=job.digests, **described(error))
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        if isinstance(job.store, TCPStore):
            job.store.close()
    except BaseException as error:
        diary.write("leaving failed", **described(error))


def _lift_limits() -> None:
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


def described(error: BaseException) -> dict[str, Any]:
    """Return what the tool needs to know of an error."""
    named = getattr(error, "ranks", ()) or getattr(error, "missing", ())
    return {
        "type": type(error).__name__,
        "ours": isinstance(error, dist.DistError),
        "text": str(error),
        "ranks": list(named),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "at": time.time(),
    }


def remains(limit_s: float) -> list[str]:
    """Return the memory, files and threads of torchestra that this process has after leaving its groups."""
    deadline = time.monotonic() + limit_s
    while (left := _remains()) and time.monotonic() < deadline:
        gc.collect()  # an error's traceback may hold a group in a circle
        time.sleep(0.01)
    return left


def _remains() -> list[str]:
    with open("/proc/self/maps") as maps:
        left = sorted(set(re.findall(r"/(?:memfd:|dev/shm/)torchestra\S*", maps.read())))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(_OPENED) and not target.startswith(_STACKS):
                left.append(f"descriptor {name}: {target}")
    names = [thread.name for thread in threading.enumerate()]
    return left + [f"thread {name}" for name in names if left or name.startswith("torchestra")]


def main() -> None:
    """Be a rank that mpiexec has started: ``python -m tools.chaos.rank FOLDER ADDRESS``."""
    folder, rank = Path(sys.argv[1]), int(os.environ["PMI_RANK"])
    round_ = load((folder / "round").read_text())
    be_process(round_, rank, folder, sys.argv[2])


if __name__ == "__main__":
    main()
