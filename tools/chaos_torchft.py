"""Kill ranks of a training under torchft on Gloo as chaos_elastic.py kills ours, and print the same table.

    pip install torchft
    python tools/chaos_torchft.py --kills 10 --every 5 [--nproc 4] [--step-ms 20] [--heartbeat-ms 5000]

Each rank is a replica group of its own, a process that this program starts again at once when it has killed
it. The lighthouse is never killed: torchft does not survive that. The model and the optimizer are those of
tools/chaos_training.py; run tools/chaos_elastic.py with the same options beside it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tools.chaos_elastic import Kill, RankProcess, measure, table_row
from tools.chaos_training import network
from torch import nn

_ROOT = Path(__file__).parent.parent
_LOOK_S = 0.02
_START_S = 180.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Kill ranks of a training under torchft on Gloo.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two kills")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0, help="the least time of a step")
    parser.add_argument("--heartbeat-ms", type=int, default=5000, help="torchft's default is 5000")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="of torchft's operations and quorums")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # as a rank, with logs in this folder
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def train(settings: argparse.Namespace) -> None:
    """Train, as every rank does, until it is killed."""
    manager_module, groups = map(importlib.import_module, ("torchft.manager", "torchft.process_group"))
    ddp, optim = map(importlib.import_module, ("torchft.ddp", "torchft.optim"))
    torch.set_num_threads(1)
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load(value: dict[str, Any]) -> None:
        model.load_state_dict(value["model"])
        adam.load_state_dict(value["optimizer"])

    limit = timedelta(seconds=settings.timeout_s)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = manager_module.Manager(
        pg=groups.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"rank{settings.rank}",
    )
    wrapped, optimizer = ddp.DistributedDataParallel(manager, model), optim.OptimizerWrapper(manager, adam)
    log = os.open(settings.train / f"log-{settings.rank}-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    while True:
        began = time.monotonic()
        inputs = torch.randn(8, 32)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), inputs[:, :8].sin()).backward()
        step = manager.current_step()
        optimizer.step()
        if manager.current_step() > step:
            checksum = 0
            for parameter in model.parameters():
                checksum = zlib.crc32(parameter.detach().numpy().tobytes(), checksum)
            os.write(log, f"{step} {checksum:08x} {time.monotonic():.6f}\n".encode())
        time.sleep(max(0.0, began + settings.step_ms / 1e3 - time.monotonic()))


class Job:
    """The ranks' processes, of which each that is killed is started again."""

    def __init__(self, folder: Path, settings: argparse.Namespace, lighthouse: str) -> None:
        self.folder, self._settings = folder, settings
        self._environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "PYTHONPATH": _python_path()}
        self._ranks = [self._start(rank) for rank in range(settings.nproc)]
        self.kills: list[Kill] = []

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        settings = self._settings
        told = {"train": self.folder, "rank": rank}
        told |= {"step-ms": settings.step_ms, "timeout-s": settings.timeout_s}
        with open(self.folder / f"out-{rank}", "ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "tools.chaos_torchft", *(f"--{key}={told[key]}" for key in told)],
                env=self._environment,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def lives(self) -> list[RankProcess]:
        """Return what every process has done."""
        found = []
        for path in self.folder.glob("log-*"):
            _, rank, pid = path.name.split("-")
            lines = [line.split() for line in path.read_text().splitlines()]
            found.append(RankProcess(int(rank), int(pid), [(int(a), b, float(c)) for a, b, c in lines]))
        return [life for life in found if life.steps]

    def await_all(self) -> None:
        """Wait until all that are there now have done a step; TimeoutError if they do not."""
        deadline = time.monotonic() + _START_S
        while not {process.pid for process in self._ranks} <= {life.pid for life in self.lives()}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks train {_START_S:.0f} s after the last was started")
            time.sleep(_LOOK_S)

    def kill(self, rank: int) -> None:
        """Kill a rank, and start it again."""
        process = self._ranks[rank]
        self.kills.append(Kill(time.monotonic(), rank, process.pid, "trains"))
        process.send_signal(signal.SIGKILL)
        process.wait()
        self._ranks[rank] = self._start(rank)

    def end(self) -> None:
        """Leave no process."""
        for process in self._ranks:
            process.kill()
            process.wait()


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH"))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once; return the exit code."""
    settings = options(arguments)
    if settings.train is not None:
        train(settings)
    os.environ.setdefault("RUST_LOG", "error")  # the lighthouse tells of every step
    try:
        coordination = importlib.import_module("torchft.coordination")
    except ImportError as error:
        print(f"torchft is not here ({error}): pip install torchft", file=sys.stderr)
        return 2
    dice = random.Random(settings.seed)
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=settings.heartbeat_ms
    )
    with tempfile.TemporaryDirectory(prefix="torchestra-chaos-torchft-") as name:
        job = Job(Path(name), settings, lighthouse.address())
        try:
            for _ in range(settings.kills):
                job.await_all()
                time.sleep(settings.every * dice.uniform(0.5, 1.5))
                job.kill(dice.randrange(settings.nproc))
            job.await_all()
            time.sleep(settings.every / 2)
        finally:
            job.end()
            lighthouse.shutdown()
        lives = job.lives()
    times = measure(lives, job.kills)
    limit = settings.heartbeat_ms
    print(f"torchft: {len(job.kills)} kills, {settings.nproc} ranks, limit of heartbeats {limit} ms")
    print(f"a step takes {times.step * 1e3:.1f} ms\n")
    print("| milliseconds | number | median | 90 % | 99 % | most |\n|---|---|---|---|---|---|")
    print(table_row("pause of a survivor at a death, beyond a step", times.deaths, times.step))
    print(table_row("pause of a rank at a join, beyond a step", times.joins, times.step))
    print(table_row("from a death until its replacement has done a step", times.returns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
