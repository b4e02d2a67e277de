"""``torchestra top``: show what the ranks of a running job do, how fast, and which ranks they wait for.

It maps the job's arenas read-only and samples them from time to time. The ranks take no part in this, but for
the first of this host in a group that has several: while somebody looks, it asks the other hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

from torchestra.errors import InvalidArgumentError
from torchestra.monitor.jobs import choose_job
from torchestra.monitor.live.job_table import group_tables, membership_lines, title
from torchestra.monitor.live.keyboard import Keyboard
from torchestra.monitor.live.recording import Recording, RecordingWriter
from torchestra.monitor.live.samples import Change, JobSample, JobSampler, changes, current_entry
from torchestra.monitor.live.screen import Screen
from torchestra.monitor.numbers_between import number_between, seconds_between
from torchestra.system.interrupts import Interrupts
from torchestra.system.terminal import wide_console

_EPILOG = """\
WAITING is the share of the time that a rank has waited for others, and FOR the rank that it waited for most:
the straggler, named below the table. Waits of some microseconds are not counted. FOR SO LONG tells how long
the operation has been running, or when it ended. Numbers are taken between two samples. Of an elastic job it
is said who is a member, who joins, and how many ranks have been started again. Ranks on other hosts are shown
as their hosts told last; a host that does not answer is named.

Keys: up and down (or k and j) choose a rank, enter shows its page, escape leaves it, s sorts, p pauses, q
quits, ? helps. In a replay, right and left go from sample to sample.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _EPILOG
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--job", type=int, metavar="PID", help="the job that this process is a rank of, or has started"
    )
    source.add_argument("--replay", type=Path, metavar="FILE", help="show what --record has written")
    parser.add_argument(
        "--interval",
        type=seconds_between(0.05, 3600),
        default=1.0,
        metavar="S",
        help="seconds between two samples (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each sample")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the samples into a new file, too")
    parser.add_argument(
        "--speed",
        type=number_between(0.01, 10_000),
        default=1.0,
        metavar="N",
        help="replay so many times as fast (default: 1)",
    )


def main(options: argparse.Namespace) -> int:
    """Show the job until it ends, q or Ctrl-C; return 1 if there is none to show, or a file is not right."""
    try:
        with contextlib.ExitStack() as stack:
            source: Source
            if options.replay is not None:
                if options.record is not None:
                    raise InvalidArgumentError(
                        "--record does not go with --replay: the file is there already"
                    )
                recording = Recording(options.replay)
                stack.callback(recording.close)
                source = Replay(recording, options.speed)
            else:
                sampler = JobSampler(choose_job(options.job))
                writer = None if options.record is None else RecordingWriter(options.record)
                if writer is not None:
                    stack.callback(writer.close)
                source = LiveJob(sampler, options.interval, writer)
            _run(source, options)
    except (InvalidArgumentError, OSError) as error:  # the latter: of standard output
        print(f"torchestra top: {error}", file=sys.stderr)
        return 1
    return 0


def _run(source: Source, options: argparse.Namespace) -> None:
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), Interrupts() as interrupts:
        if options.json:
            for before, after in _pairs(source, interrupts):
                print(json.dumps(as_json(before, after)), flush=True)
                if options.once:
                    break
        elif options.once or not sys.stdout.isatty() or Console().is_dumb_terminal:
            _print_once(source, interrupts)
        else:
            with _sigterm_as_exit():
                _show(source, interrupts)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Have SIGTERM raise SystemExit in the block, so that the terminal is left as it was found."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


class Source(Protocol):
    """Where samples come from.

    Attributes:
        before, after: the present sample, and the one before it; None at the beginning.
        replays: keys can go through the samples.
    """

    before: JobSample | None
    after: JobSample | None
    replays: bool

    def go(self, by: int) -> bool:
        """Go to the next sample, or to the one before; return False if there is none."""

    @property
    def seconds(self) -> float:
        """Return how long the present sample is to be shown; infinity for the last of a file."""

    @property
    def state(self) -> str:
        """Return which sample it is, for the screen."""


class LiveJob:
    """Samples of a running job, which are written into a file as well if there is one."""

    replays = False
    state = ""

    def __init__(self, sampler: JobSampler, interval_s: float, writer: RecordingWriter | None) -> None:
        self.before: JobSample | None = None
        self.after: JobSample | None = None
        self.seconds = interval_s
        self._sampler, self._writer = sampler, writer

    def go(self, by: int) -> bool:
        """Take a sample; return False if the job has ended."""
        sample = self._sampler.sample()
        if sample is None:
            return False
        self.before, self.after = self.after, sample
        if self._writer is not None:
            self._writer.write(sample)
        return True


class Replay:
    """The samples of a file."""

    replays = True

    def __init__(self, recording: Recording, speed: float) -> None:
        self.before: JobSample | None = None
        self.after: JobSample | None = None
        self._recording, self._speed, self._index = recording, speed, -1

    def go(self, by: int) -> bool:
        """Go to a sample near the present one; return False if there is none."""
        index = self._index + by
        if not 0 <= index < len(self._recording.times):
            return False
        self.before = self.after if by == 1 else self._recording.sample(index - 1) if index else None
        self.after, self._index = self._recording.sample(index), index
        return True

    @property
    def seconds(self) -> float:
        """Return for how long the sample was the newest, at the speed of the replay."""
        times = self._recording.times
        if self._index + 1 == len(times):
            return math.inf
        return max(0.0, times[self._index + 1] - times[self._index]) / self._speed

    @property
    def state(self) -> str:
        """Return the number of the sample, and when it was taken."""
        times = self._recording.times
        taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(times[self._index]))
        return f"sample {self._index + 1} of {len(times)}, {taken}"


def _pairs(source: Source, interrupts: Interrupts) -> Iterator[tuple[JobSample, JobSample]]:
    """Return each two neighbouring samples, as time goes; those of a file without waiting.

    A file of one sample has that beside itself.
    """
    pairs = 0
    while source.go(1):
        if source.before is not None and source.after is not None:
            pairs += 1
            yield source.before, source.after
        if not source.replays:
            interrupts.wait(source.seconds)
    if source.replays and not pairs and source.after is not None:
        yield source.after, source.after


def _print_once(source: Source, interrupts: Interrupts) -> None:
    """Print the first two samples of a job, or the last two of a file, as one table."""
    console = wide_console()
    pairs = _pairs(source, interrupts)
    found = next(iter(deque(pairs, maxlen=1)), None) if source.replays else next(pairs, None)
    if found is None:
        console.print("the job has ended")
        return
    before, after = found
    # print() would make a new text of its argument, and wrap it.
    console.print(title(after), highlight=False, overflow="ellipsis", no_wrap=True)
    lines = membership_lines(after), group_tables(changes(before, after))
    console.print(*(line for part in lines for line in part), sep="\n", highlight=False)


def _show(source: Source, interrupts: Interrupts) -> None:
    """Draw the samples on the terminal as they come, and do what keys ask for."""
    from rich.live import Live

    console, screen, ended = Console(), Screen(replays=source.replays), False
    pid: int | None = None  # when it was seen first: a job is named by its first rank that lives
    with Live(console=console, screen=True, auto_refresh=False) as live, Keyboard(interrupts) as keyboard:
        shown: tuple[JobSample | None, JobSample] | None = None
        due = time.monotonic()
        while True:
            goes_on = not (screen.paused and source.replays)
            if goes_on and time.monotonic() >= due:
                if not source.go(1):
                    ended = not source.replays
                    break
                pid = source.after.pid if pid is None and source.after is not None else pid
                due = time.monotonic() + source.seconds
            if source.after is not None and (shown is None or source.replays or not screen.paused):
                shown = source.before, source.after
            if shown is not None:
                live.update(screen.draw(*shown, console.size.height, source.state), refresh=True)
            left = due - time.monotonic() if goes_on else math.inf
            key = keyboard.read(None if left == math.inf else max(0.0, left))
            action = None if key is None else screen.press(key)
            if action == "quit":
                break
            if action is not None:
                source.go(1 if action == "forward" else -1)
            if key is not None and source.replays:
                due = time.monotonic() + source.seconds  # when it goes on after a pause
    if ended:
        console.print(f"job {pid} has ended", highlight=False)


def as_json(before: JobSample, after: JobSample) -> dict[str, Any]:
    """Return a sample as ``--json`` prints it."""
    return {
        "job": after.pid,
        "command": after.command,
        "membership": json.loads(after.membership),
        "groups": [_group_as_json(change) for change in changes(before, after)],
    }


def _group_as_json(change: Change) -> dict[str, Any]:
    record, ranks = change.after.record, []
    group = change.after
    told_of = zip(record.ranks, change.rates, group.alive, group.lines, group.processes, strict=True)
    for rank, rate, alive, line, process in told_of:
        entry = current_entry(rank)
        ranks.append(
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "alive": alive,
                "presence": rank.presence,
                "operation": None if entry is None else asdict(entry),
                "line": line,
                "process": None if process is None else asdict(process),
                **asdict(rate),
            }
        )
    told: dict[str, Any] = {"group": record.group, "aborted": record.aborted, "ranks": ranks}
    if change.after.host:
        told |= {"host": change.after.host, "answered": change.after.answered}
    return told
