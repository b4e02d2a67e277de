"""Kill a rank with SIGKILL at a random moment inside an operation, many times, and look at what happens.

    python tools/kill_test.py --times 200 [--ranks 3] [--seed N] [--op NAME]

Every time, ranks are forked from this process (which has torch and the kernels loaded, and no threads), meet
through a FileStore, and repeat one operation. When all do, one of them is killed after 0 to 30 ms. Then

- every survivor must raise an error that names the dead rank, within 2 s, and no result may be wrong;
- after the survivors have left the group, none of them may hold memory or descriptors of it;
- afterwards no process of the job may be left, nobody may have its shared memory, there may be no files of
  it, and no new descriptors in this process.

Prints a table by operation; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from kill_operations import operations
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import torchestra as dist
from torchestra.engine import warm_up

BOUND = 2.0  # seconds from the kill to the error of the last survivor
LIMIT = 20.0  # seconds after which a rank hangs
_PR_SET_CHILD_SUBREAPER = 36


def be_rank(name: str, rank: int, size: int, directory: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """The whole life of a rank: it says when it has gone round once, and later how it failed."""
    torch.set_num_threads(1)
    os.environ["TMPDIR"] = tempfile.tempdir = os.path.join(directory, "tmp")
    store = dist.FileStore(os.path.join(directory, "store"), size)
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=LIMIT)
    step = operations(rank, size)[name]()
    step()
    tell({"looping": True})
    try:
        while True:
            step()
    except dist.GroupAbortedError as error:
        seen = time.monotonic()
        told = {"seen": seen, "text": str(error), "ranks": getattr(error, "ranks", None)}
    del step
    dist.destroy_process_group()
    while memory_of("self") and time.monotonic() < seen + BOUND:
        gc.collect()  # an asynchronous operation's error and its traceback hold each other, and the group
        time.sleep(0.01)
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    left = [name for name in names if "memfd" in name or "pidfd" in name] + sorted(memory_of("self"))
    tell({**told, "left": left})


def memory_of(pid: str) -> set[str]:
    """Torchestra's memory files that a process has mapped, by inode; nothing if it may not be asked."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            return set(re.findall(r"(\d+) +/memfd:torchestra", file.read()))
    except OSError:
        return set()


class Job:
    """Ranks that repeat one operation."""

    def __init__(self, name: str, size: int, directory: str) -> None:
        os.mkdir(os.path.join(directory, "tmp"))
        self.directory, self.pids, self.pipes = directory, [], []
        self.lines: list[bytes] = [b""] * size
        for rank in range(size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._child(name, rank, size, write)
            os.close(write)
            self.pids.append(pid)
            self.pipes.append(read)

    def _child(self, name: str, rank: int, size: int, write: int) -> None:
        for pipe in self.pipes:
            os.close(pipe)
        faulthandler.register(signal.SIGUSR1, all_threads=True)

        def tell(what: dict[str, Any]) -> None:
            os.write(write, json.dumps(what).encode() + b"\n")

        code = 1
        try:
            be_rank(name, rank, size, self.directory, tell)
            code = 0
        except BaseException as error:
            tell({"unexpected": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(code)

    def wait(self, ranks: set[int], lines: int) -> bool:
        """Until these ranks have said so many lines or ended; False after the limit, with stacks."""
        deadline, waiting = time.monotonic() + LIMIT + 5, set(ranks)
        while waiting:
            pipes, left = [self.pipes[rank] for rank in waiting], deadline - time.monotonic()
            ready, _, _ = select.select(pipes, [], [], max(0.0, left))
            if not ready:
                for rank in waiting:
                    os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(1)  # for the stacks to be written
                return False
            for pipe in ready:
                rank = self.pipes.index(pipe)
                piece = os.read(pipe, 1 << 16)
                self.lines[rank] += piece
                if not piece or self.lines[rank].count(b"\n") >= lines:
                    waiting.discard(rank)
        return True

    def said(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has told."""
        return [json.loads(line) for line in self.lines[rank].splitlines()]

    def close(self) -> list[int]:
        """Kill what runs, and wait until it is gone; the exit codes."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # nothing where it has ended: nobody else waits for our children
        for pipe in self.pipes:
            os.close(pipe)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def kill_one(name: str, size: int, dice: random.Random) -> tuple[list[float], list[str]]:
    """One job and its end: seconds to the error of each survivor, and what was wrong."""
    wrong: list[str] = []
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    directory = tempfile.mkdtemp(prefix="torchestra-kill-")
    job, seconds = Job(name, size, directory), []
    everyone = set(range(size))
    try:
        if not job.wait(everyone, 1) or any({"looping": True} not in job.said(rank) for rank in everyone):
            return [], [f"the ranks did not get going: {[job.said(rank) for rank in everyone]}"]
        shared = set().union(*(memory_of(str(pid)) for pid in job.pids))
        victim = dice.randrange(size)
        time.sleep(dice.random() * 0.03)
        killed_at = time.monotonic()
        os.kill(job.pids[victim], signal.SIGKILL)
        if not job.wait(everyone, 99):
            wrong.append("a survivor hangs; its stacks are above")
        for rank in everyone - {victim}:
            told = job.said(rank)[-1]
            if "seen" not in told:
                wrong.append(f"rank {rank} did not get the error expected: {told}")
                continue
            seconds.append(told["seen"] - killed_at)
            if seconds[-1] > BOUND:
                wrong.append(f"rank {rank} heard of the death after {seconds[-1]:.2f} s")
            if f"rank {victim}" not in told["text"] or victim not in (told["ranks"] or [victim]):
                wrong.append(f"rank {rank} does not name rank {victim}: {told['ranks']}, {told['text']!r}")
            wrong += [f"rank {rank} still has {each}" for each in told["left"]]
    finally:
        codes = job.close()
        files = [os.path.join(at, file) for at, _, found in os.walk(directory) for file in found]
        shutil.rmtree(directory)
    if any(code for rank, code in enumerate(codes) if rank != victim):
        wrong.append(f"exit codes are {codes}, and rank {victim} was killed")
    wrong += [f"left: {file}" for file in files if not file.endswith("/store")]
    return seconds, wrong + leftovers(*before, shared)


def leftovers(descriptors: set[str], shm: set[str], shared: set[str]) -> list[str]:
    """Return what is left of a job: processes, who has its memory, files, and descriptors of this process."""
    try:
        wrong = [f"a process is left: {os.waitpid(-1, os.WNOHANG)}"]  # orphans become our children
    except ChildProcessError:
        wrong = []
    wrong += [f"process {pid} has its memory" for pid in os.listdir("/proc") if memory_of(pid) & shared]
    wrong += [f"left: /dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shm if "torchestra" in name]
    new = set(os.listdir("/proc/self/fd")) - descriptors
    return wrong + ([f"new descriptors: {sorted(new)}"] if new else [])


def main() -> int:
    """Read the arguments, kill, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=200, help="how many ranks to kill (%(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="ranks of each job (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeats the victims and delays of a run")
    parser.add_argument("--op", choices=operations(0, 1), help="only this operation; default: all in turn")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    names = [options.op] if options.op else list(operations(0, 1))
    console = Console()
    console.print(f"killing one of {options.ranks} ranks {options.times} times, --seed {seed}")
    torch.set_num_threads(1)
    warm_up()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seconds, failures, kills = defaultdict(list), defaultdict(list), defaultdict(int)
    with Progress(console=console, auto_refresh=False) as progress:  # no thread: this process forks
        task = progress.add_task("kills", total=options.times)
        for number in range(options.times):
            name = names[number % len(names)]
            took, wrong = kill_one(name, options.ranks, random.Random(f"{seed} {number}"))
            kills[name] += 1
            seconds[name] += took
            failures[name] += wrong
            for text in wrong:
                console.print(f"kill {number}, {name}, --seed {seed}: {text}", style="red", markup=False)
            progress.update(task, advance=1, refresh=console.is_terminal)
            if not console.is_terminal and number % 20 == 19:
                console.print(f"{number + 1} kills")
    table = Table(
        "operation", "kills", "median ms", "slowest ms", "failures", title="SIGKILL inside operations"
    )
    for name in kills:
        middle, worst = statistics.median(seconds[name] or [0]), max(seconds[name], default=0)
        bad = len(failures[name])
        cells = str(kills[name]), f"{middle * 1e3:.1f}", f"{worst * 1e3:.1f}", str(bad)
        table.add_row(name, *cells, style="red" if bad else None)
    console.print(table)
    every = sorted(each for took in seconds.values() for each in took) or [0.0]
    marks = [
        f"{part * 100:g} %: {every[int(part * (len(every) - 1))] * 1e3:.1f} ms"
        for part in (0.5, 0.9, 0.99, 1)
    ]
    total = sum(map(len, failures.values()))
    console.print(f"errors of {len(every)} survivors after " + ", ".join(marks) + f"; {total} failures")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
