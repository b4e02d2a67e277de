"""The page of one rank: what it does, for whom it waits, how fast it communicates; and its process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchestra.engine.diagnosis.process_counts import ProcessCounts
from torchestra.engine.recorder.flight_entries import FlightEntry, RankRecord, Tally
from torchestra.monitor.live.samples import Change
from torchestra.monitor.live.units import data, duration, shown
from torchestra.monitor.rates import RankRates

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MAX_ENTRIES, _MAX_PEERS, _MAX_TALLIES = 10, 8, 12
_BAR = 20


def rank_page(change: Change, local_rank: int) -> Iterator[RenderableType]:
    """Return the parts of the page of a rank, by its index in the group's record."""
    group, rank, rate = change.after, change.after.record.ranks[local_rank], change.rates[local_rank]
    record = group.record
    host = f" on host {group.host}" if group.host else ""
    yield shown(f"rank {rank.rank} (pid {rank.pid}){host} of group {record.group!r}", "bold")
    yield shown(_now(rank, record.taken, group.alive[local_rank]), "" if group.alive[local_rank] else "red")
    if group.lines[local_rank]:
        yield shown(f"its program was {group.lines[local_rank]}")
    yield shown(
        f"{rate.operations:,.0f} operations and {data(rate.bytes)} a second, {rate.waiting:.0%} of the time"
        " waiting"
    )
    if rank.is_rpc_worker:
        yield shown(
            f"{rate.calls_made:,.0f} calls by RPC made and {rate.calls_executed:,.0f} executed a second,"
            f" {data(rate.calls_sent_bytes)} a second sent in calls and answers"
        )
    if told := _present(rank):
        yield shown(told)
    before = None if change.before is None else change.before.processes[local_rank]
    elapsed_s = 0.0 if change.before is None else record.taken - change.before.record.taken
    yield shown(_process(before, group.processes[local_rank], elapsed_s))
    yield from _entries("last operations", rank.operations, record.taken)
    yield from _entries("last messages", rank.messages, record.taken)
    yield from _waits(rank, rate)
    earlier = None if change.before is None else change.before.record.ranks[local_rank]
    yield from _bandwidths(earlier, rank)
    yield from _calls(earlier, rank)


def _now(rank: RankRecord, now: float, alive: bool) -> str:
    if rank.presence == "absent":
        return "has not come yet"
    if rank.presence == "left":
        return "has left the group"
    entry, message = rank.last_operation, rank.running_message
    words = []
    if entry is not None and entry.ended is None:
        words.append(f"in {entry} for {duration(now - entry.started)}")
    if message is not None:
        words.append(f"in {message} for {duration(now - message.started)}")
    if rank.waiting_since is not None:
        whom = "ranks of other hosts" if rank.waiting_for is None else f"rank {rank.waiting_for}"
        words.append(f"waits for {whom} since {duration(now - rank.waiting_since)}")
    doing = ", ".join(words) or "in no operation"
    return doing if alive else f"has died, {doing}"


def _present(rank: RankRecord) -> str:
    """Return what waits to be done, and what an RPC worker has open."""
    words = {
        "operations queued": rank.queued,
        "calls in flight": rank.calls_in_flight,
        "references owned": rank.references_owned,
        "references used": rank.references_used,
    }
    return ", ".join(f"{name}: {number}" for name, number in words.items() if number)


def _process(before: ProcessCounts | None, now: ProcessCounts | None, elapsed_s: float) -> str:
    if now is None:
        return "its process: cannot be read, or has several ranks"
    told = (
        f"its process: {now.threads} of {now.all_threads} threads run, {data(now.resident_bytes)} of memory"
    )
    if now.swapped_bytes:
        told += f", {data(now.swapped_bytes)} in swap"
    if now.mhz is not None:
        told += f", {now.mhz:,.0f} MHz"
    if before is None or elapsed_s <= 0:
        return told

    def per_second(early: float, late: float) -> float:
        return max(0.0, late - early) / elapsed_s

    return (
        f"{told}; main thread {per_second(before.cpu_s, now.cpu_s):.0%} on a core,"
        f" {per_second(before.runnable_s, now.runnable_s):.0%} without one; page faults a second:"
        f" {per_second(before.minor_faults, now.minor_faults):,.0f},"
        f" {per_second(before.major_faults, now.major_faults):,.0f} of them from a disk;"
        f" reads {data(per_second(before.read_bytes, now.read_bytes))} a second"
    )


def _entries(name: str, entries: tuple[FlightEntry, ...], now: float) -> Iterator[Table]:
    """Return a table of operations or messages, the newest first, if there are any."""
    if not entries:
        return
    table = _table(name, ("no.", "operation", "state", "began", "took", "waited", "for"), left=(1, 2))
    for entry in entries[: -_MAX_ENTRIES - 1 : -1]:
        took = (now if entry.ended is None else entry.ended) - entry.started
        awaited = "" if entry.waited_for is None else f"rank {entry.waited_for}"
        began = f"{duration(now - entry.started)} ago"
        words = (str(entry.number), str(entry), entry.state, began, duration(took), duration(entry.waited))
        table.add_row(*map(shown, words), awaited)
    yield table


def _waits(rank: RankRecord, rate: RankRates) -> Iterator[Table]:
    """Return a table of the ranks that this one has waited for, if there are any."""
    peers = sorted(range(len(rank.waited_for)), key=rank.waited_for.__getitem__, reverse=True)
    peers = [peer for peer in peers if rank.waited_for[peer] > 0][:_MAX_PEERS]
    if peers:
        table = _table("waits by peer", ("peer", "in all", "now", ""), left=(3,))
        for peer in peers:
            share = rate.waited_for[peer]
            bar = "█" * round(share * _BAR)
            table.add_row(f"rank {peer}", duration(rank.waited_for[peer]), f"{share:.0%}", bar)
        yield table


def _bandwidths(before: RankRecord | None, rank: RankRecord) -> Iterator[Table]:
    """Return a table of what was moved how fast, by operation and size, if anything was."""
    if not rank.tallies:
        return
    earlier = {} if before is None else {_kind(tally): tally for tally in before.tallies}
    columns = ("operation", "size", "calls", "since", "bytes", "mean time", "bandwidth", "waiting")
    table = _table("bandwidth by operation and size", columns, left=(0, 1))
    for tally in sorted(rank.tallies, key=lambda tally: -tally.seconds)[:_MAX_TALLIES]:
        early = earlier.get(_kind(tally))
        since = tally.calls - (early.calls if early is not None else 0)
        size = "more" if tally.most_bytes is None else f"to {data(tally.most_bytes)}"
        seconds = max(tally.seconds, 1e-9)
        table.add_row(
            shown(f"{tally.kind} between hosts" if tally.remote else tally.kind),
            size,
            f"{tally.calls:,}",
            "" if before is None else f"+{since:,}",
            data(tally.nbytes),
            duration(tally.seconds / max(1, tally.calls)),
            f"{data(tally.nbytes / seconds)}/s",
            f"{tally.waited / seconds:.0%}",
        )
    yield table


def _calls(before: RankRecord | None, rank: RankRecord) -> Iterator[Table]:
    """Return a table of the calls that it has executed by RPC, if there are any."""
    if not rank.calls:
        return
    earlier = {} if before is None else {(each.caller, each.function): each.calls for each in before.calls}
    table = _table("calls executed", ("caller", "function", "calls", "since", "mean time"), left=(1,))
    for each in sorted(rank.calls, key=lambda each: -each.seconds)[:_MAX_TALLIES]:
        table.add_row(
            "several" if each.caller < 0 else f"rank {each.caller}",
            shown(each.function),
            f"{each.calls:,}",
            "" if before is None else f"+{each.calls - earlier.get((each.caller, each.function), 0):,}",
            duration(each.seconds / max(1, each.calls)),
        )
    yield table


def _kind(tally: Tally) -> tuple[str, int | None, bool]:
    return tally.kind, tally.most_bytes, tally.remote


def _table(name: str, columns: tuple[str, ...], left: tuple[int, ...]) -> Table:
    from rich.table import Table

    table = Table(title=shown(f"\n{name}"), title_justify="left", box=None, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right", no_wrap=True)
    return table
