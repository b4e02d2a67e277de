"""Measure the time from a launcher's start to the first finished all_reduce of all ranks."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.options import BenchOptions
from benchmarks.peers import torchestra_environment
from benchmarks.ranks.session import SOCKET_VARIABLE
from benchmarks.report import SideRow, SideTable
from benchmarks.summary import percentile
from benchmarks.worker_processes import free_port, last_line

__all__ = ["end_launcher", "launch_time", "measure_startup"]

_REPEATS = 3
_LIMIT_SECONDS = 90.0
_GRACE_SECONDS = 5.0
_SCRIPT = str(Path(__file__).resolve().parent / "ranks" / "first_all_reduce.py")
_COLUMNS = (("torchestra", "torchestra run"), ("gloo", "torchrun"))
_COMMANDS = {
    "torchestra": ("torchestra", "run", "--nproc={world}"),
    "gloo": (
        "torch.distributed.run",
        "--master-addr=127.0.0.1",
        "--master-port={port}",
        "--nproc-per-node={world}",
    ),
}
_ENVIRONMENTS = {
    "torchestra": {"TORCHESTRA_BENCH_MODULE": "torchestra"},
    "gloo": {"TORCHESTRA_BENCH_MODULE": "torch.distributed", "TORCHESTRA_BENCH_BACKEND": "gloo"},
}


def measure_startup(options: BenchOptions) -> tuple[SideTable, list[str]]:
    """Launch 3 times by each launcher and size, in turn; return the medians in seconds, and failures."""
    notes: list[str] = []
    rows = []
    keys = [key for key, _ in _COLUMNS if options.wants(key)]
    for world in options.nproc:
        times: dict[str, list[float]] = {key: [] for key in keys}
        for _ in range(_REPEATS):
            for key in list(times):
                words = [word.format(world=world, port=free_port()) for word in _COMMANDS[key]]
                command = [sys.executable, "-m", *words, _SCRIPT]
                try:
                    times[key].append(launch_time(command, world, _ENVIRONMENTS[key]))
                except (OSError, RuntimeError) as error:
                    notes.append(f"start-up of {world} ranks by {dict(_COLUMNS)[key]}: {error}")
                    del times[key]
        rows.append(SideRow(f"{world} ranks", {key: percentile(taken, 0.5) for key, taken in times.items()}))
    columns = tuple((key, title) for key, title in _COLUMNS if key in keys)
    title = "Start-up: from launch to the first finished all_reduce"
    return SideTable("startup", title, "s", columns, tuple(rows)), notes


def launch_time(command: Sequence[str], world: int, environment: Mapping[str, str]) -> float:
    """Return the seconds from the start of ``command`` until the last of its ranks says that it is done.

    Each rank sends ``repr(time.monotonic())`` to the datagram socket that ``TORCHESTRA_BENCH_SOCKET`` names
    (after a 0 byte). Nothing of the command is left running, nor on the disk.

    Raises:
        RuntimeError: the command failed or took longer than 90 seconds, or not all ranks said something.
    """
    address = f"torchestra-bench-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as marks, tempfile.TemporaryFile() as output:
        marks.bind("\0" + address)
        marks.setblocking(False)
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=torchestra_environment({**environment, SOCKET_VARIABLE: address}),
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"did not end within {_LIMIT_SECONDS:.0f} s") from None
        finally:
            end_launcher(process)
        done = []
        with contextlib.suppress(BlockingIOError):
            while True:
                done.append(float(marks.recv(64)))
        if code != 0 or len(done) != world:
            raise RuntimeError(f"exit code {code}, {len(done)} of {world} ranks came: {last_line(output)}")
        return max(done) - start


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs: asked first, so that it ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
    process.wait()
