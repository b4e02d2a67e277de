"""Time what happens while a rank joins a training, by phase: `python -m benchmarks.join_phases`.

    python -m benchmarks.join_phases [--nproc 4] [--joins 6] [--state-mb 100] [--model-mb 0] [--step-ms 60]

Runs tools/chaos_training.py under ``torchestra run --elastic``, kills a rank now and then, and prints for
each phase of its replacement's joining how long it takes, and how long a core works for it: medians over all
joins, of the ranks that were there and of the one that joins. A pause is from a step's end until the next
step may begin. Where there are fewer cores than ranks, the work of all together is what makes it long.
A large state comes to the new rank in the steps that follow: of ``--state-mb`` little changes in each step;
with ``--model-mb`` there are further parameters, three times as much with what the optimizer keeps of them.
What the others wait for that in a step is told too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchestra.elastic import fetching, incremental, loop, membership, shard_sum, state
from torchestra.launcher.membership_file import read_membership
from torchestra.process_group import growing

_PAUSE = "the pause: all until the next step"
_STEP = "the end of the first step: reduce and update"
_PHASES: dict[str, tuple[Any, str]] = {
    _PAUSE: (loop._Loop, "_admit"),
    "  a new group": (membership.Members, "grow"),
    "    look who waits": (growing.GroupAdmission, "growth"),
    "    enter the group (in a thread)": (growing, "_enter"),
    "  one state for all": (loop._Loop, "_sync"),
    "    tell how far each is": (loop._Loop, "_tell"),
    "    fetch the state": (state, "fetch"),
    "      move its blocks": (fetching._Exchange, "_move"),
    "    new buffers for gradients": (shard_sum.ShardSum, "use"),
    _STEP: (loop._Loop, "_finish_step"),
}
_OFFER, _SENT = "offer parameters", "wait until they have gone"
_LAST = "fetch what has changed, at last"
_SENDING: dict[str, tuple[Any, str]] = {
    _OFFER: (incremental.IncrementalTransfer, "_offer"),
    _SENT: (incremental.IncrementalTransfer, "finish"),
    _LAST: (state.State, "finish_filling"),
}
_LIMIT_S, _POLL_S = 120.0, 0.05


class Span(NamedTuple):
    """One call: the phase, when it began and ended, and how long a core worked for it in its thread."""

    phase: str
    began: float
    ended: float
    work: float


def record(folder: Path) -> None:
    """Write a line for each call of a phase into a file of this process."""
    file = os.open(folder / f"spans-{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            began, worked = time.monotonic(), time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                span = Span(name, began, time.monotonic(), time.thread_time() - worked)
                os.write(file, (json.dumps(span) + "\n").encode())

        return timed

    for name, (owner, attribute) in {**_PHASES, **_SENDING}.items():
        setattr(owner, attribute, recorded(name, getattr(owner, attribute)))


def train() -> None:
    """Be a rank of the training, with its phases recorded."""
    from tools import chaos_training

    record(Path(sys.argv[1]))
    chaos_training.main()


def job_of(options: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    """Start the training."""
    limits = ["--nproc", str(options.nproc), "--elastic", f"1:{options.nproc}"]
    size = ["--steps", "1000000", "--step-ms", str(options.step_ms)]
    size += ["--state-mb", str(options.state_mb), "--model-mb", str(options.model_mb)]
    command = [sys.executable, "-m", "torchestra", "run", *limits, __file__, str(folder), *size]
    with open(folder / "output", "wb") as output:
        root = str(Path(__file__).resolve().parent.parent)  # for `tools` and `benchmarks`
        environment = {**os.environ, "PYTHONPATH": root}
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def members(job: subprocess.Popen[bytes], folder: Path, nproc: int) -> list[int]:
    """Wait until all ranks train, and return their processes."""
    deadline = time.monotonic() + _LIMIT_S
    while job.poll() is None and time.monotonic() < deadline:
        told = read_membership(job.pid)
        ranks = [each for each in told["members"] if each["state"] == "trains"] if told else []
        logs = [any(folder.glob(f"log-{each['rank']}-{each['pid']}.*")) for each in ranks]
        if len(ranks) == nproc and all(logs):
            return [each["pid"] for each in ranks]
        time.sleep(_POLL_S)
    sys.exit(f"the training has not begun or has ended:\n{(folder / 'output').read_text()[-4000:]}")


def run(options: argparse.Namespace, folder: Path) -> list[int]:
    """Have ranks killed and replaced; return the processes that have joined."""
    job, dice = job_of(options, folder), random.Random(0)
    try:
        first = last = members(job, folder, options.nproc)
        joined: list[int] = []
        for _ in range(options.joins):
            time.sleep(1.0)
            os.kill(dice.choice(last), signal.SIGKILL)
            before, last = last, []
            while len(set(last) - set(before)) == 0:
                last = members(job, folder, options.nproc)
                time.sleep(_POLL_S)
            joined += set(last) - set(before) - set(first)
        time.sleep(1.0)
        return joined
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()


def spans_of(folder: Path) -> dict[int, list[Span]]:
    """Return the calls of each process."""
    found = {}
    for path in folder.glob("spans-*"):
        lines = path.read_text().splitlines(keepends=True)
        found[int(path.name.partition("-")[2])] = [
            Span(*json.loads(line)) for line in lines if line.endswith("\n")
        ]
    return found


def joins_of(spans: dict[int, list[Span]], joined: list[int]) -> Iterator[tuple[bool, list[Span]]]:
    """Yield for each rank at each join whether it is the one that joins, and its calls from then on."""
    for own in (spans[pid] for pid in joined if pid in spans):
        entered = next(span for span in own if span.phase.endswith("(in a thread)"))
        end = next((span.ended for span in own if "first step" in span.phase), entered.ended)
        yield True, [span for span in own if span.ended <= end]
        for others in spans.values():
            pauses = [span for span in others if span.phase == _PAUSE]
            pause = next((each for each in pauses if each.began < entered.ended < each.ended), None)
            if pause is not None:
                stop = min(
                    (s.ended for s in others if "first step" in s.phase and s.began > pause.ended), default=0
                )
                yield False, [span for span in others if pause.began <= span.began and span.ended <= stop]


def table(spans: dict[int, list[Span]], joined: list[int]) -> Iterator[str]:
    """Yield the lines of the table."""
    found: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    for joins, own in joins_of(spans, joined):
        for name in _PHASES:
            calls = [span for span in own if span.phase == name]
            if calls:
                wall = sum(span.ended - span.began for span in calls)
                found[name, joins].append((wall, sum(span.work for span in calls)))
    pauses = [wall * 1e3 for wall, _ in found[_PAUSE, False]]
    yield f"{len(joined)} joins; a rank pauses {statistics.median(pauses):.0f} ms, {max(pauses):.0f} at most"
    yield "\n| milliseconds, median | a rank: time | its core | the new rank: time | its core |"
    yield "|---|---|---|---|---|"
    for name in _PHASES:
        cells = []
        for joins in (False, True):
            both = found[name, joins]
            cells += [f"{statistics.median(each) * 1e3:.1f}" for each in zip(*both, strict=True)] or ["", ""]
        yield f"| {name.replace('  ', '&emsp;')} | {' | '.join(cells)} |"
    ends = [span.ended - span.began for own in spans.values() for span in own if span.phase == _STEP]
    yield f"\nthe same in any step: {statistics.median(ends) * 1e3:.1f} ms"
    if waits := list(waits_of(spans)):
        middle, most = statistics.median(waits) * 1e3, max(waits) * 1e3
        steps = len(waits) / len(pauses)
        yield f"\nin each of {steps:.1f} steps then a sender is kept {middle:.1f} ms, {most:.1f} at most"
    ends = [span.ended - span.began for own in spans.values() for span in own if span.phase == _LAST]
    if ends:
        middle, most = statistics.median(ends) * 1e3, max(ends) * 1e3
        yield f"and what has changed meanwhile keeps all {middle:.1f} ms in the end, {most:.1f} at most"


def waits_of(spans: dict[int, list[Span]]) -> Iterator[float]:
    """Yield for each rank and step in which it sends parameters how long that keeps it."""
    for own in spans.values():
        offered = 0.0
        for span in own:
            if span.phase == _OFFER:
                offered += span.ended - span.began
            elif span.phase == _SENT and offered:
                yield offered + span.ended - span.began
                offered = 0.0


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Time what happens while a rank joins a training, by phase.")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--joins", type=int, default=6)
    parser.add_argument("--state-mb", type=float, default=100.0, help="of state beside the small model")
    parser.add_argument("--model-mb", type=float, default=0.0, help="of further parameters")
    parser.add_argument("--step-ms", type=float, default=60.0, help="the least time of a step")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torchestra-joins-"))
    try:
        joined = run(options, folder)
        print("\n".join(table(spans_of(folder), joined)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        train()
    else:
        main()
