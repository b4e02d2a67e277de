"""Show the answers of ``torchestra simulate`` as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from torchestra.performance.workload import shown_bytes

_TITLES = {"faults": "What faults cost", "buckets": "Bucket sizes", "thresholds": "Thresholds"}


def show(answers: Mapping[str, Any]) -> None:
    """Print the answers on the terminal."""
    console = Console()
    console.print(_overview(answers))
    for key, title in (
        ("faults", "What faults cost"),
        ("buckets", "Bucket sizes"),
        ("thresholds", "Thresholds"),
    ):
        if key in answers:
            console.print(_cases(title, answers[key]))
    if "control" in answers:
        console.print(_control(answers["control"]))
    if "goal" in answers:
        console.print(f"wrote {answers['goal']['path']}, of {answers['goal']['ranks']} ranks")


def shown_seconds(seconds: float) -> str:
    """Return a time for people: ``1.25 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def _overview(answers: Mapping[str, Any]) -> Table:
    hosts, ranks = answers["hosts"], answers["ranks_per_host"]
    shape = f"{hosts} host{'' if hosts == 1 else 's'} x {ranks} rank{'' if ranks == 1 else 's'}"
    table = Table(title=f"{answers['workload']}: {shape}", show_header=False)
    table.add_row("takes", shown_seconds(answers["seconds"]))
    table.add_row("a rank waits for", f"{answers['waiting_share']:.0%}")
    if "closed_form_seconds" in answers:
        table.add_row("closed form (LogGP)", shown_seconds(answers["closed_form_seconds"]))
    if "simgrid_seconds" in answers:
        table.add_row("on SimGrid", shown_seconds(answers["simgrid_seconds"]))
    if "recorded_seconds" in answers:
        table.add_row("took when it was recorded", shown_seconds(answers["recorded_seconds"]))
    if hosts > 1:
        sent = shown_bytes(round(answers["bytes_of_a_host"]))
        table.add_row("a host sends", f"{answers['messages_of_a_host']:.0f} messages, {sent}")
    return table


def _cases(title: str, cases: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("")
    table.add_column("takes", justify="right")
    table.add_column("a rank waits for", justify="right")
    for case in cases:
        share = case["waiting_share"]
        style = "bold" if case["best"] else None
        name = f"{case['case']} (fastest)" if case["best"] else case["case"]
        table.add_row(
            name, shown_seconds(case["seconds"]), "" if share is None else f"{share:.0%}", style=style
        )
    return table


def _control(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Control messages")
    for name in ("what", "from", "to"):
        table.add_column(name)
    for name in ("messages", "bytes", "each"):
        table.add_column(name, justify="right")
    for row in rows:
        nbytes = "" if row["nbytes"] is None else shown_bytes(round(row["nbytes"]))
        table.add_row(
            row["what"], row["sender"], row["receiver"], f"{row['messages']:.4g}", nbytes, row["per"]
        )
    return table
