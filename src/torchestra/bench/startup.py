"""How long it takes from a launcher's start to the first finished all_reduce of all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchestra.bench.fleet import free_port
from torchestra.bench.options import BenchOptions
from torchestra.bench.peers import torchestra_environment
from torchestra.bench.report import SideRow, SideTable
from torchestra.bench.summary import percentile

__all__ = ["launch_time", "measure_startup"]

_REPEATS = 3
_LIMIT_SECONDS = 90.0
_GRACE_SECONDS = 5.0
_MARKS = "TORCHESTRA_BENCH_MARKS"
_SCRIPT = """\
import os, pathlib, time
import torch
import {module} as dist
dist.init_process_group({backend})
tensor = torch.ones(1)
dist.all_reduce(tensor)
done = time.monotonic()
assert tensor.item() == dist.get_world_size()
pathlib.Path(os.environ["{marks}"], f"rank-{{dist.get_rank()}}").write_text(repr(done))
dist.destroy_process_group()
"""
_COLUMNS = (("torchestra", "torchestra run"), ("gloo", "torchrun"))
_LAUNCHERS = {
    "torchestra": (("torchestra", "run", "--nproc={world}"), "torchestra", ""),
    "gloo": (
        (
            "torch.distributed.run",
            "--master-addr=127.0.0.1",
            "--master-port={port}",
            "--nproc-per-node={world}",
        ),
        "torch.distributed",
        '"gloo"',
    ),
}


def measure_startup(options: BenchOptions) -> tuple[SideTable, list[str]]:
    """Launch 3 times with each launcher and world size, by turns; the medians in seconds, and what failed."""
    notes: list[str] = []
    rows = []
    keys = [key for key, _ in _COLUMNS if options.wants(key)]
    for world in options.nproc:
        times: dict[str, list[float]] = {key: [] for key in keys}
        for _ in range(_REPEATS):
            for key in list(times):
                command, module, backend = _LAUNCHERS[key]
                script = _SCRIPT.format(module=module, backend=backend, marks=_MARKS)
                try:
                    port = free_port()
                    arguments = [argument.format(world=world, port=port) for argument in command]
                    times[key].append(launch_time([sys.executable, "-m", *arguments], script, world))
                except (OSError, RuntimeError) as error:
                    notes.append(f"start-up of {world} ranks by {dict(_COLUMNS)[key]}: {error}")
                    del times[key]
        rows.append(SideRow(f"{world} ranks", {key: percentile(taken, 0.5) for key, taken in times.items()}))
    columns = tuple((key, title) for key, title in _COLUMNS if key in keys)
    title = "Start-up: from launch to the first finished all_reduce"
    return SideTable("startup", title, "s", columns, tuple(rows)), notes


def launch_time(
    command: Sequence[str], script: str, world: int, environment: Mapping[str, str] | None = None
) -> float:
    """Seconds from the start of ``command`` (a script's name is added) until the last rank has left its mark.

    Each rank writes ``time.monotonic()`` into the file ``rank-R`` of the directory that the variable
    ``TORCHESTRA_BENCH_MARKS`` names. Nothing of the command is left running.

    Raises:
        RuntimeError: the command failed or took longer than 90 seconds, or a rank left no mark.
    """
    with tempfile.TemporaryDirectory(prefix="torchestra-bench-") as name:
        directory = Path(name)
        path = directory / "first_all_reduce.py"
        path.write_text(script)
        extra = {_MARKS: name, **(environment or {})}
        start = time.monotonic()
        with (directory / "output").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=torchestra_environment(extra),
                start_new_session=True,
            )
        try:
            code = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"did not end within {_LIMIT_SECONDS:.0f} s") from None
        finally:
            _end(process)
        marks = [directory / f"rank-{rank}" for rank in range(world)]
        if code != 0 or not all(mark.exists() for mark in marks):
            lines = (directory / "output").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"exit code {code}: {lines[-1] if lines else 'no output'}")
        return max(float(mark.read_text()) for mark in marks) - start


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs: asked first, so that it ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
    process.wait()
