"""Seconds, bytes and texts, as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_UNITS = ("B", "KB", "MB", "GB", "TB")


def duration(seconds: float) -> str:
    """Return a time with its unit, from microseconds to minutes."""
    if seconds < 1e-3:
        return f"{max(0.0, seconds) * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def data(amount: float) -> str:
    """Return a number of bytes with its unit, of three digits; units are powers of 1000."""
    for unit in _UNITS:
        if amount < 999.5 or unit == _UNITS[-1]:
            break
        amount /= 1000
    return f"{amount:.3g} {unit}"


def shown(text: str, style: str = "") -> Text:
    """Return a text of a program to be shown as it is: not as markup, and without what a terminal obeys."""
    from rich.text import Text

    return Text(printable(text), style=style)


def printable(text: str) -> str:
    """Return a text with its control characters escaped, but for the ends of lines."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)
