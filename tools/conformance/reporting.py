"""Print a table of endings by module, and failures by reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tools.conformance.running import Ending

_SHOWN = ("passed", "failed", "timed out", "crashed", "skipped")
_RAISED = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Failure|Exit|Failed))\b(?:: (.*))?$")
_VARIES = [
    (re.compile(r"0x[0-9a-f]+"), "0x…"),
    (re.compile(r"/[\w./-]*/"), "…/"),
    (re.compile(r"\b(?:rank|ranks|Process|process|worker) ?\d+(?:, \d+)*"), "rank N"),
    (re.compile(r"'[0-9a-f]{8,}'|\b\d+(?:\.\d+)?(?:e-?\d+)?\b"), "N"),
]


def reason(ending: Ending) -> str:
    """Return why a test was skipped or failed, in a line that other tests may have too."""
    if ending.how in ("skipped", "timed out"):
        return ending.text.strip().split("\n")[0]
    if ending.how == "crashed":
        return "the process that ran it ended"
    raised = [found.groups() for line in ending.text.splitlines() if (found := _RAISED.match(line.strip()))]
    # The rank's own error comes before the one of the process that waited for it, and is told twice by it.
    kinds = [
        (kind, text or "") for kind, text in raised if kind not in ("RankFailure", "RankError")
    ] or raised
    if not kinds:
        return ending.text.strip().split("\n")[-1]
    kind, text = kinds[0]
    return f"{kind}: {text}"


def general(text: str) -> str:
    """The same without what varies from test to test: addresses, paths, ranks and numbers."""
    for pattern, replacement in _VARIES:
        text = pattern.sub(replacement, text)
    return text[:160]


def table(endings: Sequence[Ending]) -> Table:
    """Return how many of each module's tests passed, failed and so on."""
    by_module: dict[str, Counter[str]] = defaultdict(Counter)
    for ending in endings:
        by_module[ending.module][ending.how] += 1
    made = Table("module", *_SHOWN, title="PyTorch's tests on torchestra", title_justify="left")
    for column in made.columns[1:]:
        column.justify = "right"
    total: Counter[str] = Counter()
    for module, counts in by_module.items():
        total += counts
        cells = ["not loaded"] if counts["not loaded"] else [str(counts[how] or "") for how in _SHOWN]
        made.add_row(module, *cells)
    made.add_section()
    made.add_row("all", *(str(total[how] or "") for how in _SHOWN), style="bold")
    return made


def reasons(endings: Sequence[Ending], *hows: str) -> RenderableType:
    """The reasons of some kinds of endings, the most frequent first, with the tests of each."""
    by_reason: dict[str, list[Ending]] = defaultdict(list)
    for ending in endings:
        if ending.how in hows:
            by_reason[general(reason(ending))].append(ending)
    parts: list[RenderableType] = []
    for each in sorted(by_reason.values(), key=len, reverse=True):
        parts.append(Text.from_markup(f"[bold]{len(each):4}[/]  {escape(reason(each[0])[:300])}"))
        names = ", ".join(ending.test or ending.module for ending in each)
        parts.append(Padding(Text(names, style="dim"), (0, 0, 0, 6)))
    return Group(*parts)


def show(endings: Sequence[Ending], console: Console, skips: bool) -> None:
    """Print the table, and the reasons of failures; on demand those of skips."""
    console.print(table(endings))
    failed = ("failed", "timed out", "crashed", "not loaded")
    if any(ending.how in failed for ending in endings):
        console.print("\n[bold]Why tests failed[/]")
        console.print(reasons(endings, *failed))
    if skips:
        console.print("\n[bold]Why tests were skipped[/]")
        console.print(reasons(endings, "skipped"))
