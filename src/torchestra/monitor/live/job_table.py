"""The first page of ``torchestra top``: a table for each group, with a line for each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchestra.engine.recorder.flight_entries import RankRecord
from torchestra.errors import named
from torchestra.monitor.live.samples import Change, JobSample, current_entry
from torchestra.monitor.live.units import data, duration, printable, shown
from torchestra.monitor.rates import RankRates, straggler

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

SORTS = ("rank", "waiting", "ops/s", "bytes/s")
"""By what the ranks of a group can be sorted; all but the first with the largest first."""

_COLUMNS = ("rank", "pid", "no.", "operation", "for so long")
_RATES, _CALL_RATES = ("ops/s", "bytes/s"), ("calls/s", "executed/s", "sent/s")
_WAITS = ("waiting", "for")
_MAX_RANKS_SHOWN = 64


def title(sample: JobSample) -> Text:
    """Return the line that names the job."""
    from rich.text import Text

    head = f"job {sample.pid} "
    return Text.assemble((head, "bold"), printable(sample.command), overflow="ellipsis", no_wrap=True)


def membership_lines(sample: JobSample) -> list[RenderableType]:
    """Return lines on the members and restarts of an elastic job, and on each rank that is not at work."""

    told = json.loads(sample.membership)
    if told is None:
        return []
    members = told["members"]
    at_work = sum(member["state"] in ("starts", "trains") for member in members)
    most = "" if told["restarts"] is None else f" of {told['restarts']}"
    lines = [
        f"elastic {told['least']}:{told['most']}: {at_work} of {len(members)} ranks are members;"
        f" restarts: {told['restarted']}{most}"
    ]
    for member in members:
        if member["state"] in ("joins", "dead"):
            since = duration(sample.taken - member["since"])
            why = f", after {member['last_failure']}" if member["last_failure"] else ""
            restarts = f"; restarts: {member['restarts']}"
            lines.append(
                f"rank {member['rank']} (pid {member['pid']}): {member['state']}, {since}{why}{restarts}"
            )
    return [shown(line, "" if number == 0 else "yellow") for number, line in enumerate(lines)]


def sorted_local_ranks(change: Change, sort: str) -> list[int]:
    """Return the local ranks of a group's record, in the order in which they are shown."""
    local_ranks = list(range(len(change.after.record.ranks)))
    rates = change.rates
    of_rate = {
        "waiting": lambda rank: rates[rank].waiting,
        "ops/s": lambda rank: rates[rank].operations + rates[rank].calls_made + rates[rank].calls_executed,
        "bytes/s": lambda rank: rates[rank].bytes + rates[rank].calls_sent_bytes,
    }
    return sorted(local_ranks, key=of_rate[sort], reverse=True) if sort in of_rate else local_ranks


def group_tables(
    groups: Sequence[Change],
    sort: str = SORTS[0],
    selected: tuple[str, int] | None = None,
    room: int = _MAX_RANKS_SHOWN,
) -> list[RenderableType]:
    """Return the groups as rich renders them.

    Args:
        sort: one of :data:`SORTS`.
        selected: a group's key, and the rank in it that is marked.
        room: for how many ranks of each group there is room; those around the one that is marked are shown.
    """

    parts: list[RenderableType] = []
    for change in groups:
        group = change.after
        if not group.answered:
            ranks = [rank for host in group.record.hosts for rank in host.ranks]
            told = (
                f"\nhost {group.host}, with {named(ranks)} of group {group.record.group!r}, does not answer"
            )
            parts.append(shown(told, "red"))
            continue
        marked = selected[1] if selected is not None and selected[0] == group.key else None
        parts += ["", _table(change, sort, marked, room)]
        behind = straggler(list(change.rates))
        if behind is not None:
            rank, share = behind
            parts.append(shown(f"the others wait for rank {rank}: {share:.0%} of their time", "yellow"))
        if group.record.aborted is not None:
            parts.append(shown(f"the group was aborted: {group.record.aborted}", "red"))
    return parts


def _table(change: Change, sort: str, marked: int | None, room: int) -> Table:
    from rich.table import Table

    group, record = change.after, change.after.record
    where = f" on host {group.host}, {len(record.ranks)} of {record.size} ranks" if group.host else ""
    table = Table(
        title=shown(f"group {record.group!r}{where}"), title_justify="left", box=None, header_style="bold"
    )
    of_rpc = any(rank.is_rpc_worker for rank in record.ranks)
    for name in (*_COLUMNS, *(_CALL_RATES if of_rpc else _RATES), *_WAITS):
        table.add_column(name, justify="left" if name == "operation" else "right", no_wrap=True)
    local_ranks = sorted_local_ranks(change, sort)
    at = next(
        (number for number, local_rank in enumerate(local_ranks) if record.ranks[local_rank].rank == marked),
        0,
    )
    first = max(0, min(at - room // 2, len(local_ranks) - room))
    for local_rank in local_ranks[first : first + room]:
        rank = record.ranks[local_rank]
        style = ("" if group.alive[local_rank] else "red") + (" reverse" if rank.rank == marked else "")
        cells = _row(rank, change.rates[local_rank], group.alive[local_rank], record.taken, of_rpc)
        table.add_row(*map(shown, cells), style=style.strip())
    if len(local_ranks) > room:
        table.caption = f"and {len(local_ranks) - room} more ranks (--json has all)"
    return table


def _row(rank: RankRecord, rate: RankRates, alive: bool, now: float, of_rpc: bool) -> list[str]:
    first = [str(rank.rank), str(rank.pid)]
    if rank.presence == "absent":
        return [*first, "", "has not come yet"]
    entry = current_entry(rank)
    number, doing, long = "", "nothing yet", ""
    if of_rpc and (entry is None or entry.ended is not None):
        calls = "1 call" if rank.calls_in_flight == 1 else f"{rank.calls_in_flight} calls"
        doing = f"RPC, waits for {calls}" if rank.calls_in_flight else "RPC"
    elif entry is not None:
        number, doing = str(entry.number), str(entry)
        if entry.ended is None:
            long = duration(now - entry.started)
        else:
            long = f"{duration(now - entry.ended)} ago"
            doing += " done" if entry.state == "done" else " failed"
    if not alive:
        doing += " when it died" if rank.presence == "present" else ""
    if rank.presence == "left":
        doing = "has left the group"
    awaited = rate.awaited
    amounts = [f"{rate.operations:,.0f}", data(rate.bytes)]
    if of_rpc:
        amounts = [f"{rate.calls_made:,.0f}", f"{rate.calls_executed:,.0f}", data(rate.calls_sent_bytes)]
    return [
        *first,
        number,
        doing,
        long,
        *amounts,
        f"{rate.waiting:.0%}",
        "" if awaited is None else f"rank {awaited}",
    ]
