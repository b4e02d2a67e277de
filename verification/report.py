"""Print the outcome of a search; a counterexample as a table with a column for each rank."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from torchestra.engine import layout as at
from torchestra.engine.p2p import layout as w
from verification.execution import LOADS, STORES
from verification.program import VISIBLE
from verification.ranks import Ranks
from verification.search import Outcome
from verification.world import ONLY, SLEEP_ENDS, TIME_OUT, UNASKED, Event

_WIDEST = 40

_CONTROL = {at.WAITERS: "WAITERS"}
_FLAG = {at.FLAG: "FLAG", at.META: "META", at.COUNT: "COUNT", at.SHARED: "SHARED"}
_RECORD = {at.WAITING_SINCE: "WAITING_SINCE", at.WAITING_FOR: "WAITING_FOR"}
_ENTRY = {
    at.STAMP: "STAMP", at.BEGAN: "BEGAN", at.ENDED: "ENDED", at.WHAT: "WHAT", at.AMOUNT: "AMOUNT",
    at.MOVED_BYTES: "MOVED_BYTES", at.WAITED: "WAITED", at.AWAITED: "AWAITED",
}  # fmt: skip
_DOORBELL = {w.RUNG: "RUNG", w.SLEEPING: "SLEEPING"}
_CHANNEL = {w.HEAD: "HEAD", w.TAKEN: "TAKEN", w.TAIL: "TAIL"}


def names_of(ranks: Ranks) -> Callable[[int], str]:
    """Return a function that names a word by its address."""
    layout, size = ranks.layout, ranks.size
    doorbells = layout.channels
    channels = doorbells + w.doorbells_bytes(size)

    def name(address: int) -> str:
        offset = address - ranks.arena.address
        if offset == at.HEADER_ABORT:
            return "ABORT"
        if layout.control <= offset < layout.splits:
            rank, word = divmod(offset - layout.control, at.CONTROL_BYTES)
            if word in _CONTROL:
                return f"{_CONTROL[word]} of {rank}"
            line, word = divmod(word - at.FLAG_LINES, at.LINE)
            return f"{_FLAG.get(word, f'+{word}')} {line} of {rank}"
        if layout.records <= offset < layout.records + size * layout.record_bytes:
            rank, word = divmod(offset - layout.records, layout.record_bytes)
            for ring in (at.OPERATIONS_AT, at.MESSAGES_AT):
                if ring <= word < ring + at.ENTRIES * at.ENTRY_BYTES:
                    entry, word = divmod(word - ring, at.ENTRY_BYTES)
                    return f"{_ENTRY[word]} {entry} of {rank}"
            return f"{_RECORD.get(word, f'+{word}')} of {rank}"
        if doorbells <= offset < channels:
            rank, word = divmod(offset - doorbells, w.DOORBELL_BYTES)
            return f"{_DOORBELL.get(word, f'+{word}')} of {rank}"
        if channels <= offset < layout.heaps:
            channel, word = divmod(offset - channels, w.channel_bytes(size))
            place = f"of {channel // size} to {channel % size}"
            if w.SLOTS_AT <= word < w.DATA_AT:
                return f"STAMP {(word - w.SLOTS_AT) // w.SLOT_BYTES} {place}"
            return f"{_CHANNEL.get(word, f'+{word}')} {place}"
        return hex(address)

    return name


def describe(event: Event, name: Callable[[int], str]) -> str:
    """Return an event in words."""
    kind, words, _ = event.stop
    if event.choice in (*UNASKED, SLEEP_ENDS, TIME_OUT):
        return f"{event.choice}"
    if kind == "syscall":
        what = "sleeps on" if words[2] == 0 else "wakes sleepers on"
        return f"{what} {name(words[1])}" + (f" if {words[3]:#x}" if words[2] == 0 else "")
    if kind not in VISIBLE:
        chosen = "" if event.choice in (ONLY, 0) else f": choice {event.choice}"
        return " ".join([kind, *map(_short, words)]) + chosen
    where = name(words[0]) if words else ""
    if kind in LOADS:
        return f"{kind} {where}: value {event.choice}"
    if kind in STORES:
        return f"{kind} {where} = {words[1]:#x}"
    return " ".join([kind, where, *(str(each) for each in words[1:])])


def _short(word: object) -> str:
    text = word.rstrip(b"\0").decode(errors="backslashreplace") if isinstance(word, bytes) else str(word)
    return text if len(text) <= _WIDEST else text[:_WIDEST] + "..."


def show_path(
    outcome: Outcome, size: int, name: Callable[[int], str], console: Console, last: int = 0
) -> None:
    """Print the events that led to a violation; only the last ones if there are many."""
    table = Table("", *(f"rank {rank}" for rank in range(size)), "line", show_lines=False)
    for number, event in list(enumerate(outcome.path, 1))[-last:]:
        cells = [""] * size
        cells[event.rank] = describe(event, name)
        table.add_row(str(number), *cells, event.stop.line)
    console.print(table)
    console.print(f"[bold]{outcome.violation}[/bold]")
