"""Kill ranks of a training at random moments, let them be replaced, and compare it with an undisturbed one.

    python tools/chaos_elastic.py --kills 500 --every 5 [--nproc 4] [--state-mb 100] [--seed N]
    python tools/chaos_elastic.py --minutes 30

``torchestra run --elastic`` runs tools/chaos_training.py. After 0.5 to 1.5 times ``--every`` seconds one of
its ranks, or two at once, is killed with SIGKILL: members, and sometimes such as are about to join; after
some kills the replacement too, at a random moment of its joining. One that has the state is always left.
Where it is divided, with two replicas (``--optimizer zero``), all ranks have their parts again before the
next kill. With a fifth of these kills, and at the first, a process is killed as well that serves the job's
store, if the one killed before has the state again. At the end

- the job has ended well, and every rank has the same weights, moments and padding, bit for bit, as ranks of a
  training of which nobody was killed; so had it parameters after every single step, whichever process did it;
- no step is missing, and no process has done one twice;
- no process is left and no shared memory, and launcher and fork server have no more descriptors than after
  the first replacements.

Prints a report with the pauses of the survivors at deaths and at joins, and the times from a death until its
replacement has done a step; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `tools`

from tools.ending import dying_with_this, leaving_on_signals

from torchestra.engine.failure.liveness import process_start
from torchestra.errors import DistError
from torchestra.launcher.membership_file import read_membership
from torchestra.store.replicated.addresses import Addresses
from torchestra.store.replicated.sessions import SessionPool
from torchestra.store.tcp.protocol import Request

TRAINING = Path(__file__).with_name("chaos_training.py")
_TAG = "TORCHESTRA_CHAOS_TAG"
_TWO_AT_ONCE = 0.2
_JOINERS_TOO = 0.2
_JOINERS_AFTER = 0.3  # after a kill, the replacement too
_JOINING_S = 0.6  # what it usually takes to join
_STORE_TOO = 0.2
_REPLICAS = 2  # of each part of zero's state: as many as are killed at once
_POLL_S = 0.02
_STUCK_S = 120.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Kill ranks of an elastic training; check its results.")
    parser.add_argument("--kills", type=int, help="how many ranks to kill; default: as many as fit --minutes")
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two kills")
    parser.add_argument("--minutes", type=float, default=2.0, help="used without --kills")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--state-mb", type=float, default=0.0, help="of state beside the small model")
    parser.add_argument("--model-mb", type=float, default=0.0, help="of further parameters of the model")
    parser.add_argument("--step-ms", type=float, default=20.0, help="the least time of a step")
    parser.add_argument("--optimizer", choices=("adam", "zero"), default="adam")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    settings = parser.parse_args(arguments)
    if settings.kills is None:
        settings.kills = max(1, int(settings.minutes * 60 / settings.every))
    return settings


@dataclass
class RankProcess:
    """One process of a rank, by its log.

    Attributes:
        pid: its number, and when it started: numbers are used again.
        steps: the steps that it has done, each with the checksum after it and when that was.
    """

    rank: int
    pid: str
    steps: list[tuple[int, str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Kill:
    """One rank that was killed."""

    time: float
    rank: int
    pid: str
    state: str


class Job:
    """A training under ``torchestra run``, in a session of its own."""

    def __init__(self, folder: Path, nproc: int, *arguments: str, elastic: bool) -> None:
        folder.mkdir()
        self.folder = folder
        self.tag, self.secret = uuid.uuid4().hex, secrets.token_hex(16)
        limits = ["--elastic", f"1:{nproc}"] if elastic else []
        command = [sys.executable, "-m", "torchestra", "run", "--nproc", str(nproc), *limits]
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                [*command, str(TRAINING), str(folder), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, _TAG: self.tag, "TORCHESTRA_SECRET": self.secret},
                start_new_session=True,
                preexec_fn=dying_with_this(signal.SIGTERM),  # noqa: PLW1509 - has no threads
            )

    @property
    def err(self) -> str:
        """What launcher and ranks have written to standard error."""
        return (self.folder / "err").read_text(errors="replace")

    def processes(self) -> list[RankProcess]:
        """Every process that has done a step."""
        found = []
        for path in self.folder.glob("log-*"):
            _, rank, pid = path.name.split("-")
            process = RankProcess(int(rank), pid)
            for line in path.read_text().splitlines():
                step, checksum, when = line.split()
                process.steps.append((int(step), checksum, float(when)))
            found.append(process)
        return [process for process in found if process.steps]

    def await_end(self) -> int | None:
        """Wait until the job ends; return its exit code, or None if no step is done any more."""
        done, deadline = -1, 0.0
        while (code := self.process.poll()) is None:
            if (logged := sum(path.stat().st_size for path in self.folder.glob("log-*"))) != done:
                done, deadline = logged, time.monotonic() + _STUCK_S
            elif time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return code

    def finals(self) -> set[str]:
        """The digests that ranks have written at their end."""
        return {path.read_text() for path in self.folder.glob("final-*")}

    def left(self) -> list[str]:
        """Command lines of the processes of this job that still run."""
        processes = (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return [line for entry in processes if (line := _command_line(entry, self.tag))]

    def close(self) -> None:
        """Leave nothing of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _command_line(entry: Path, tag: str) -> str:
    try:
        tagged = f"{_TAG}={tag}".encode() in (entry / "environ").read_bytes()  # a zombie has none
        return (entry / "cmdline").read_text().replace("\0", " ") if tagged else ""
    except OSError:
        return ""  # it has ended meanwhile


def takes_part(address: str, secret: str) -> bool:
    """Return whether a replica of a store is its primary, or knows which is: it has the state then."""
    pool = SessionPool(Addresses([address]), secret.encode(), "chaos")
    try:
        pool.request(Request.CHECK, [], 0.0, 0.0)
    except DistError as error:
        return "for the primary" in str(error)
    finally:
        pool.close()
    return True


class Killer:
    """Kills ranks of a job at random moments, and processes that serve its store.

    Attributes:
        kills: the ranks that it has killed.
        store_kills: the replicas of the store that it has killed.
        problems: what went wrong meanwhile.
    """

    def __init__(self, job: Job, settings: argparse.Namespace) -> None:
        self._job, self._settings = job, settings
        self._random = random.Random(settings.seed)
        self.kills: list[Kill] = []
        self.store_kills: list[int] = []
        self.problems: list[str] = []
        self._descriptors: list[int] = []

    def run(self) -> None:
        """Kill until enough have been, or the job ends."""
        next_kill = self._await_start()
        while len(self.kills) < self._settings.kills and self._job.process.poll() is None:
            next_kill += self._settings.every * self._random.uniform(0.5, 1.5)
            time.sleep(max(0.0, next_kill - time.monotonic()))
            due = time.monotonic()
            while not self._kill_ranks():
                if self._job.process.poll() is not None or time.monotonic() > due + _STUCK_S:
                    self.problems.append("no two ranks had the state any more: the job is stuck")
                    return
                time.sleep(_POLL_S)
            if self._random.random() < _JOINERS_AFTER:
                self._kill_joiners()
            next_kill = max(next_kill, time.monotonic() - self._settings.every)
            self._descriptors.append(self._count_descriptors())
        self._check_descriptors()

    def _await_start(self) -> float:
        deadline = time.monotonic() + _STUCK_S
        while len(self._job.processes()) < self._settings.nproc and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return time.monotonic()

    def _kill_joiners(self) -> None:
        """Kill those that join, at a random moment of that; none, if they have joined by then."""
        enough = len(self.kills) >= self._settings.kills
        deadline = time.monotonic() + (0.0 if enough else 2.0)
        while time.monotonic() < deadline:
            told = read_membership(self._job.process.pid)
            if told is not None and any(each["state"] == "joins" for each in told["members"]):
                time.sleep(self._random.uniform(0.0, _JOINING_S))
                self._kill_ranks(("joins",))
                return
            time.sleep(_POLL_S)

    def _kill_ranks(self, only: Sequence[str] = ()) -> bool:
        """Kill one or two, of ranks in these states if given; return False if none can be.

        One that has the state is always left.
        """
        told = read_membership(self._job.process.pid)
        if told is None:
            return False
        trained = {path.name for path in self._job.folder.glob("log-*") if path.stat().st_size}
        states = only or (("trains", "joins") if self._random.random() < _JOINERS_TOO else ("trains",))
        killed = {kill.pid for kill in self.kills}
        there = [each for each in told["members"] if each["pid"] is not None]
        named = [{**each, "id": f"{each['pid']}.{process_start(each['pid'])}"} for each in there]
        members = [each for each in named if each["id"] not in killed]
        alive = [each for each in members if each["state"] in states and self._may_kill(each)]
        training = [each for each in members if each["state"] == "trains"]
        have_state = {each["id"] for each in training if f"log-{each['rank']}-{each['id']}" in trained}
        victims = self._random.sample(alive, min(len(alive), 1 + (self._random.random() < _TWO_AT_ONCE)))
        wanted = self._settings.kills - len(self.kills)
        if self._settings.optimizer == "zero" and not only and len(have_state) < self._settings.nproc:
            return False
        if not victims or not have_state - {victim["id"] for victim in victims[:wanted]}:
            return False
        if not self.store_kills or self._random.random() < _STORE_TOO:
            self._kill_replica(told["store"])
        for victim in victims[:wanted]:
            now = time.monotonic()
            try:
                os.kill(victim["pid"], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.kills.append(Kill(now, victim["rank"], victim["id"], victim["state"]))
        return True

    def _kill_replica(self, store: list[dict[str, Any]]) -> None:
        """Kill a replica of the store, first the one that is the primary in the beginning."""
        if len(store) < 3 or not all(takes_part(each["address"], self._job.secret) for each in store):
            return
        replica = self._random.randrange(len(store)) if self.store_kills else 0
        try:
            os.kill(store[replica]["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return  # it has been started again, and the launcher has not told so yet
        self.store_kills.append(replica)

    def _may_kill(self, member: dict[str, Any]) -> bool:
        """Spare a rank that joins if the one before it was killed while joining: three are a crash loop."""
        earlier = [kill.state for kill in self.kills if kill.rank == member["rank"]]
        return not (member["state"] == "joins" and earlier[-1:] == ["joins"])

    def _count_descriptors(self) -> int:
        """How many files launcher and fork server have open."""
        count = 0
        launcher = self._job.process.pid
        for pid in (launcher, *_children(launcher)):
            try:
                count += len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
        return count

    def _check_descriptors(self) -> None:
        """Compare the quietest moment near the end with the busiest near the beginning."""
        tenth = max(3, len(self._descriptors) // 10)
        first, last = max(self._descriptors[:tenth], default=0), min(self._descriptors[-tenth:], default=0)
        if len(self._descriptors) >= 2 * tenth and last > first:
            self.problems.append(f"launcher and fork server had {first} descriptors, at last {last}")


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def check_steps(processes: list[RankProcess], undisturbed: list[RankProcess], steps: int) -> list[str]:
    """Return what is wrong with the steps of a job, compared with one that was not disturbed."""
    problems = []
    expected = {step: checksum for process in undisturbed for step, checksum, _ in process.steps}
    if sorted(expected) != list(range(steps)):
        problems.append(f"the undisturbed training has done {len(expected)} of {steps} steps")
    done: set[int] = set()
    for process in processes:
        who, numbers = f"rank {process.rank} (pid {process.pid})", [step for step, _, _ in process.steps]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            problems.append(f"{who} has done a step twice: {_repeated(numbers)}")
        for step, checksum, _ in process.steps:
            if expected.get(step) != checksum:
                problems.append(f"{who} has other parameters after step {step}")
                break
        done.update(numbers)
    if missing := set(range(steps)) - done:
        problems.append(f"{len(missing)} steps were done by nobody, such as {min(missing)}")
    return problems


def _repeated(numbers: list[int]) -> list[int]:
    return [later for earlier, later in pairwise(numbers) if later <= earlier][:5]


@dataclass
class Times:
    """Durations in seconds.

    Attributes:
        step: the usual time from one step to the next.
        deaths: of each survivor of each kill: from the last step before it to the first after it.
        joins: of each rank that was there, at each join: the same, about the joiner's first step.
        returns: from each kill until the replacement did its first step.
    """

    step: float = 0.0
    deaths: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


def measure(processes: list[RankProcess], kills: list[Kill]) -> Times:
    """Return how long ranks paused and how soon they were replaced."""
    times = Times()
    ends = {process.pid: [when for _, _, when in process.steps] for process in processes}
    gaps = [later - earlier for each in ends.values() for earlier, later in pairwise(each)]
    times.step = statistics.median(gaps) if gaps else 0.0
    killed = {kill.pid: kill.time for kill in kills}
    members = [kill for kill in kills if kill.pid in ends]
    for kill in members:
        times.deaths += [
            gap
            for pid, each in ends.items()
            if pid not in killed or killed[pid] > kill.time + 1.0
            if (gap := _gap_at(each, kill.time)) is not None
        ]
        firsts = [
            process.steps[0][2]
            for process in processes
            if process.rank == kill.rank and process.steps[0][2] > kill.time
        ]
        if firsts:
            times.returns.append(min(firsts) - kill.time)
    start = min((each[0] for each in ends.values()), default=0.0) + 1.0
    for process in processes:
        first = process.steps[0][2]
        if first > start and not any(abs(kill.time - first) < 0.5 for kill in kills):
            others = [each for pid, each in ends.items() if pid != process.pid]
            times.joins += [
                gap for each in others if (gap := _gap_at(each, first - times.step / 2)) is not None
            ]
    return times


def _gap_at(ends: list[float], moment: float) -> float | None:
    """Return the time between the two steps about a moment, if both are there."""
    after = bisect_right(ends, moment)
    return ends[after] - ends[after - 1] if 0 < after < len(ends) else None


def table_row(name: str, seconds: list[float], less: float = 0.0) -> str:
    """Return a row of the report, in milliseconds."""
    if not seconds:
        return f"| {name} | 0 | | | | |"
    ordered = sorted(max(0.0, each - less) * 1e3 for each in seconds)
    points = (ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10], ordered[len(ordered) * 99 // 100])
    return f"| {name} | {len(ordered)} | {' | '.join(f'{each:.0f}' for each in (*points, ordered[-1]))} |"


def report(settings: argparse.Namespace, killer: Killer, times: Times, steps: int, restarts: int) -> str:
    """Return the report of a run that was checked."""
    together = sum(1 for one, two in pairwise(killer.kills) if two.time - one.time < 0.01)
    joining = sum(kill.state == "joins" for kill in killer.kills)
    what = f"{len(killer.kills)} kills ({together} pairs at once, {joining} of ranks about to join)"
    training = f"{settings.nproc} ranks, {steps} steps, {settings.state_mb:g} MB beside the model"
    lines = [
        f"{len(killer.store_kills)} kills of processes that serve the store",
        f"{what}, {restarts} replacements; {training}; seed {settings.seed}",
        f"a step takes {times.step * 1e3:.1f} ms",
        "",
        "| milliseconds | number | median | 90 % | 99 % | most |",
        "|---|---|---|---|---|---|",
        table_row("pause of a survivor at a death, beyond a step", times.deaths, times.step),
        table_row("pause of a rank at a join, beyond a step", times.joins, times.step),
        table_row("from a death until its replacement has done a step", times.returns),
    ]
    return "\n".join(lines)


def _memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch")}


def disturb(settings: argparse.Namespace, folder: Path, trained: str) -> tuple[Job, Killer, list[str]]:
    """Run the training and kill its ranks; return what was wrong."""
    shared = _memory()
    text = f"{trained} --step-ms {settings.step_ms} --optimizer {settings.optimizer} --replicas {_REPLICAS}"
    arguments = text.split()
    with closing(Job(folder / "disturbed", settings.nproc, *arguments, elastic=True)) as job:
        killer = Killer(job, settings)
        killer.run()
        (job.folder / "hurry").touch()
        problems = killer.problems
        if (code := job.await_end()) is None:
            return job, killer, [*problems, f"the job does not end, and has done no step for {_STUCK_S:g} s"]
    if code != 0:
        problems.append(f"the job ended with exit code {code}:\n{job.err[-4000:]}")
    deadline = time.monotonic() + 10.0  # other programs may have shared memory for a moment
    while (left := job.left()) + (more := sorted(_memory() - shared)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if left or more:
        problems.append(f"processes and shared memory were left: {left}, {more}")
    restarted = len(re.findall("of the job's store was killed, and has been started again", job.err))
    if not killer.store_kills or restarted != len(killer.store_kills):
        problems.append(f"of the store {len(killer.store_kills)} were killed, and {restarted} started again")
    if len(killer.kills) < settings.kills:
        problems.append(f"only {len(killer.kills)} of {settings.kills} kills were made")
    return job, killer, problems


@leaving_on_signals()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run once; return the exit code."""
    settings = options(arguments)
    steps = int(settings.kills * settings.every / settings.step_ms * 1e3) + 50
    folder = Path(tempfile.mkdtemp(prefix="torchestra-chaos-"))
    try:
        trained = f"--steps {steps} --state-mb {settings.state_mb} --model-mb {settings.model_mb}"
        job, killer, problems = disturb(settings, folder, trained)
        with closing(Job(folder / "undisturbed", 1, *trained.split(), elastic=False)) as undisturbed:
            undisturbed.await_end()
        processes = job.processes()
        problems += check_steps(processes, undisturbed.processes(), steps)
        if job.finals() != undisturbed.finals() or len(job.finals()) != 1:
            problems.append(f"the last states differ: {job.finals()}, undisturbed {undisturbed.finals()}")
        restarts = len(re.findall("its replacement has started", job.err))
        print(report(settings, killer, measure(processes, killer.kills), steps, restarts))
    finally:
        if settings.keep:
            print(f"logs are in {folder}")
        else:
            shutil.rmtree(folder)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if not problems:
        print("\nevery step was done, none twice, and all states are those of an undisturbed training")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
