"""The diagnosis of a mismatch: which ranks called something else than most."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torchestra.engine.diagnosis.rules import Diagnosis
from torchestra.engine.diagnosis.source_lines import loops_at
from torchestra.errors import named_globally

_SITE = re.compile(r"(?s)(.*) at (.*:\d+ in .*)")


def diagnose_calls(calls: Mapping[int, str], global_ranks: Sequence[int]) -> Diagnosis:
    """Return which ranks called something else than most.

    Args:
        calls: by rank, what it called, and the line of its program: ``barrier() at train.py:9 in main``.
        global_ranks: as for named_globally().
    """
    parts = {rank: _split(call) for rank, call in calls.items()}
    by_call: dict[str, list[int]] = {}
    for rank, (call, _) in parts.items():
        by_call.setdefault(call, []).append(rank)
    most = max(by_call, key=lambda call: len(by_call[call]))  # the first ranks' of equals
    other = next((call for call in by_call if call != most), most)
    ranks, site, usual = by_call[other], parts[by_call[other][0]][1], parts[by_call[most][0]][1]
    those, others = (named_globally(each, global_ranks) for each in (ranks, by_call[most]))
    text = f"{those} called {other} at {site}, and {others} {most} at {usual}"
    if (loop := _left_loop(site, usual)) is not None:
        text += f"; the former had left the loop at line {loop}: was its data shorter?"
    return Diagnosis("mismatch", tuple(ranks), text)


def _split(call: str) -> tuple[str, str]:
    """Return a call and its site."""
    found = _SITE.match(call)
    return (found[1], found[2]) if found is not None else (call, "an unknown line")


def _left_loop(site: str, usual: str) -> int | None:
    """Return the first line of a loop of a function that one line of it is in, and another comes after."""
    (file, line), (other_file, other_line) = (_file_and_line(each) for each in (site, usual))
    if file != other_file or site.partition(" in ")[2] != usual.partition(" in ")[2]:
        return None
    return next((first for first, last in loops_at(file, other_line)[::-1] if line > last), None)


def _file_and_line(site: str) -> tuple[str, int]:
    file, _, line = site.partition(" in ")[0].rpartition(":")
    return file, int(line) if line.isdigit() else 0
