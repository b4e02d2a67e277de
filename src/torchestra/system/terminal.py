"""What commands print on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_COLUMNS = 200


def wide_console() -> Console:
    """Return a console as wide as the terminal; what goes elsewhere has room for whole lines."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_COLUMNS)
