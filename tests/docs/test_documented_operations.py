"""The table of operations on docs/process_group.md has the rows of the package's own."""

from __future__ import annotations

import re

from pages import ROOT

from torchestra.engine.operations import COLLECTIVES, Collective

PAGE = (ROOT / "docs" / "process_group.md").read_text()


def cells(row: Collective) -> list[str]:
    """Return what the page says of a collective."""
    functions, methods = (row.name, *row.aliases), (row.method, *row.method_aliases)
    several = [row.coalesced, *(f"{alias}_coalesced" for alias in row.aliases)] if row.coalesced else []
    operators = [f"{row.functional}{end}" for end in ("", "_coalesced") if row.functional]
    kinds = (functions, methods, several, operators if row.coalesced else operators[:1])
    return [", ".join(f"`{name}`" for name in names) for names in kinds]


def test_the_page_has_every_collective_by_all_its_names() -> None:
    _, _, section = PAGE.partition("## One operation, several names\n")
    told = re.findall(r"^\| (`.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert [" | ".join(cells(row)) for row in COLLECTIVES.values()] == told, "\n".join(
        f"| {' | '.join(cells(row))} |" for row in COLLECTIVES.values()
    )
