"""``torchestra top``: show what the ranks of a running job do, how fast, and which ranks they wait for.

It maps the job's arenas read-only and samples them from time to time; the job takes no part in this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchestra.engine.recorder.flight_entries import RankRecord
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.errors import InvalidArgumentError
from torchestra.monitor.jobs import Job, choose_job, find_jobs
from torchestra.monitor.rates import RankRates, rates, straggler

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_EPILOG = """\
WAITING is the share of the time that a rank has waited for others, and FOR the rank that it waited for most:
the straggler, named below the table. Waits of some microseconds are not counted. FOR SO LONG tells how long
the operation has been running, or when it ended. Numbers are taken between two looks.
"""
_ENTRIES = 16  # a rank's last entries: enough to find the message that it hangs in
_UNITS = ("B", "KB", "MB", "GB", "TB")
_MOST_RANKS_SHOWN = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--job", type=int, metavar="PID", help="the job that this process is a rank of, or has started"
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each look")


def main(options: argparse.Namespace) -> int:
    """Show the job until it ends or Ctrl-C; return 1 if there is none to show."""
    try:
        job = choose_job(options.job)
    except InvalidArgumentError as error:
        print(f"torchestra top: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if options.json:
            _print_json(job, options)
        elif options.once or not sys.stdout.isatty():
            _print_once(job, options.interval)
        else:
            _show(job, options)
    return 0


@dataclass(frozen=True)
class Look:
    """A sample of one group: its record, the rates since the previous sample, and which ranks live."""

    record: FlightRecord
    rates: list[RankRates]
    alive: list[bool]


class Watch:
    """Samples a job repeatedly."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = self._records()

    def _records(self) -> list[FlightRecord]:
        return [read_flight_record(group.arena, _ENTRIES) for group in self._job.groups]

    def look(self) -> list[Look]:
        """Return all groups, with their rates since the previous sample."""
        records = self._records()
        looks = [
            Look(after, rates(before, after), [group.is_alive(rank) for rank in range(len(after.ranks))])
            for group, before, after in zip(self._job.groups, self._before, records, strict=True)
        ]
        self._before = records
        return looks


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.05 and 3600 seconds, got {text}")
    return seconds


def _still_there(job: Job) -> Job | None:
    """Return the same job as it is now, because groups come and go and ranks die; None if it has ended."""
    jobs, _ = find_jobs(job.pids)  # quicker than to look at all processes
    return next(iter(jobs), None)


def _show(job: Job, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.console import Group as Lines
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        current: Job | None = job
        while current is not None:
            watch = Watch(current)
            time.sleep(options.interval)
            live.update(Lines(_title(current), *tables(watch.look())), refresh=True)
            current = _still_there(current)
    console.print(f"job {job.pid} has ended", highlight=False)


def _print_once(job: Job, interval: float) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    watch = Watch(job)
    time.sleep(interval)
    # print() would make a new text of its argument, and wrap it.
    console.print(_title(job), highlight=False, overflow="ellipsis", no_wrap=True)
    console.print(*tables(watch.look()), sep="\n", highlight=False)


def _print_json(job: Job, options: argparse.Namespace) -> None:
    current: Job | None = job
    while current is not None:
        watch = Watch(current)
        time.sleep(options.interval)
        groups = [as_json(look) for look in watch.look()]
        print(json.dumps({"job": current.pid, "command": current.command, "groups": groups}), flush=True)
        current = None if options.once else _still_there(current)


def as_json(look: Look) -> dict[str, Any]:
    """Return one group as ``--json`` prints it."""
    ranks = []
    for rank, rate, alive in zip(look.record.ranks, look.rates, look.alive, strict=True):
        entry = rank.running_message or rank.last_operation
        ranks.append(
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "alive": alive,
                "presence": rank.presence,
                "operation": None if entry is None else asdict(entry),
                **asdict(rate),
            }
        )
    return {"group": look.record.group, "aborted": look.record.aborted, "ranks": ranks}


def _title(job: Job) -> RenderableType:
    from rich.text import Text

    return Text.assemble((f"job {job.pid} ", "bold"), job.command, overflow="ellipsis", no_wrap=True)


def tables(looks: list[Look]) -> list[RenderableType]:
    """Return the groups as rich renders them."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for look in looks:
        parts += ["", _table(look)]
        behind = straggler(look.rates)
        if behind is not None:
            rank, share = behind
            parts.append(Text(f"the others wait for rank {rank}: {share:.0%} of their time", style="yellow"))
        if look.record.aborted is not None:
            parts.append(Text(f"the group was aborted: {look.record.aborted}", style="red"))
    return parts


def _table(look: Look) -> Table:
    from rich.table import Table
    from rich.text import Text

    record = look.record
    where = (
        f" on host {record.hosts[0].name}, {len(record.ranks)} of {record.size} ranks" if record.hosts else ""
    )
    table = Table(
        title=Text(f"group {record.group!r}{where}"), title_justify="left", box=None, header_style="bold"
    )
    for name in ("rank", "pid", "no.", "operation", "for so long", "ops/s", "bytes/s", "waiting", "for"):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    for rank, rate, alive in list(zip(record.ranks, look.rates, look.alive, strict=True))[:_MOST_RANKS_SHOWN]:
        style = "" if alive else "red"
        table.add_row(*_row(rank, rate, alive, record.taken), style=style)
    if len(record.ranks) > _MOST_RANKS_SHOWN:
        table.caption = f"and {len(record.ranks) - _MOST_RANKS_SHOWN} more ranks (--json has all)"
    return table


def _row(rank: RankRecord, rate: RankRates, alive: bool, now: float) -> list[str]:
    first = [str(rank.rank), str(rank.pid)]
    if rank.presence == "absent":
        return [*first, "", "has not come yet"]
    entry = rank.running_message or rank.last_operation
    number, doing, long = "", "nothing yet", ""
    if entry is not None:
        number, doing = str(entry.number), str(entry)
        if entry.ended is None:
            long = _duration(now - entry.started)
        else:
            long = f"{_duration(now - entry.ended)} ago"
            doing += " done" if entry.state == "done" else " failed"
    if not alive:
        doing += " when it died" if rank.presence == "present" else ""
    if rank.presence == "left":
        doing = "has left the group"
    awaited = rate.awaited
    return [
        *first,
        number,
        doing,
        long,
        f"{rate.operations:,.0f}",
        _bytes(rate.bytes),
        f"{rate.waiting:.0%}",
        "" if awaited is None else f"rank {awaited}",
    ]


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{max(0.0, seconds) * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _bytes(amount: float) -> str:
    for unit in _UNITS:
        if amount < 999.5 or unit == _UNITS[-1]:
            break
        amount /= 1000
    return f"{amount:.3g} {unit}"
