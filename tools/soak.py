"""Run all operations at random for a while, with everything mixed, and check every result.

    python tools/soak.py --minutes 10 [--seed N] [--ranks 4] [--kind processes]

Ranks are processes and threads by turns, 20 s each, from 2 to --ranks of them. What they do is drawn from the
seed, see soak_operations.py: sizes, dtypes, reductions, groups, layouts, synchronous or not, messages.

The exit code is 1 if a result was wrong, or a rank raised or hung (60 s for one operation; stacks are
printed).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from soak_operations import Soak

import torchestra as dist
from torchestra.engine import warm_up
from torchestra.world.registry import thread_rank

OP_SECONDS = 60.0
PHASE_SECONDS = 20.0


def soak(seed: str, until: float) -> dict[str, Any]:
    """On a rank with a default group: what it has done, and how that failed."""
    rank, one = dist.get_rank(), None
    text = ""
    try:
        one = Soak(seed, until)
        one.run()
        dist.destroy_process_group()
    except BaseException:
        text = f"rank {rank}, {one.what if one else 'groups'}:\n{traceback.format_exc()}"
    # A rank that ends takes the others along, and so the first error is the one that counts.
    return {
        "counts": one.counts if one else {},
        "bytes": one.bytes if one else 0,
        "error": text,
        "at": time.time(),
    }


def be_process(seed: str, until: float, rank: int, size: int, directory: str) -> list[dict[str, Any]]:
    """The one rank of a process."""
    store = dist.FileStore(os.path.join(directory, "store"), size)
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=OP_SECONDS)
    return [soak(seed, until)]


def be_threads(seed: str, until: float, size: int) -> list[dict[str, Any]]:
    """All ranks, as threads of a process."""
    store, told = dist.HashStore(), []

    def body(rank: int) -> None:
        with thread_rank(rank, size, store):
            dist.init_process_group(timeout=OP_SECONDS)
            told.append(soak(seed, until))

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def forked(call: Any, *args: Any) -> tuple[int, int]:
    """Call it in a new process; its id, and the descriptor that its result will come through."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    code = 1
    try:
        told = call(*args)
        with os.fdopen(write, "w") as file:
            json.dump(told, file)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def phase(kind: str, size: int, seed: str, seconds: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Some ranks for some time: what each has told, and what went wrong."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="torchestra-soak-") as directory:
        if kind == "threads":
            children = [forked(be_threads, seed, until, size)]
        else:
            children = [forked(be_process, seed, until, rank, size, directory) for rank in range(size)]
        told, wrong = [], []
        open_pipes, said = {read for _, read in children}, {read: b"" for _, read in children}
        while open_pipes:
            # A rank that hangs gets its time-out first; this is for when that does not work.
            ready, _, _ = select.select(
                open_pipes, [], [], max(1.0, until + 2 * OP_SECONDS - time.monotonic())
            )
            if not ready:
                wrong.append("hangs; the stacks are above")
                for pid, _ in children:
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(1)  # for the stacks to be written
                for pid, _ in children:
                    os.kill(pid, signal.SIGKILL)
                break
            for read in ready:
                piece = os.read(read, 1 << 20)
                said[read] += piece
                if not piece:
                    open_pipes.discard(read)
        for pid, read in children:
            os.close(read)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                wrong.append(f"process {pid} ended with exit code {code}")
            told += json.loads(said[read]) if said[read] else []
    errors = sorted((each["at"], each["error"]) for each in told if each["error"])
    return told, wrong + [text for _, text in errors]


def main() -> int:
    """Read the arguments, soak, and show the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="for how long (%(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=4, help="at most so many ranks, at least 2 (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=None, help="repeats the plan of a run")
    parser.add_argument("--kind", choices=["processes", "threads"], help="only ranks of this kind")
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    console = Console()
    console.print(f"soaking for {options.minutes:g} minutes, --seed {seed}")
    torch.set_num_threads(1)
    warm_up()
    end, counts, moved, number, errors = time.monotonic() + 60 * options.minutes, Counter(), 0, 0, 0
    while (left := end - time.monotonic()) > 1:
        kind = options.kind or ("processes", "threads")[number % 2]
        size = options.ranks if number < 2 else random.Random(f"{seed} {number}").randint(2, options.ranks)
        told, wrong = phase(kind, size, f"{seed} {number}", min(PHASE_SECONDS, left))
        done, phase_bytes = Counter[str](), sum(each["bytes"] for each in told)
        for each in told:
            done.update(each["counts"])
        console.print(
            f"phase {number}: {size} {kind}, {done.total()} operations, {phase_bytes / 1e9:.2f} GB,"
            f" {len(wrong)} errors; {max(0.0, end - time.monotonic()) / 60:.1f} minutes left"
        )
        for text in wrong:
            console.print(f"phase {number}, {size} {kind}, --seed {seed}: {text}", style="red", markup=False)
        counts.update(done)
        moved, number, errors = moved + phase_bytes, number + 1, errors + len(wrong)
    table = Table("operation", "synchronous", "asynchronous", title="calls, by all ranks together")
    for name in sorted({name.partition(",")[0] for name in counts}):
        table.add_row(name, str(counts[name]), str(counts[name + ", async"]))
    console.print(table)
    console.print(f"{counts.total()} calls with {moved / 1e9:.1f} GB in {number} phases; {errors} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
