"""Numbers of bytes as people write them: ``64KB``, ``1 MB`` (powers of 1,024)."""

from __future__ import annotations

from torchestra.errors import InvalidArgumentError

__all__ = ["parse_size", "size_label"]

_POWERS = {"": 0, "B": 0, "K": 10, "KB": 10, "M": 20, "MB": 20, "G": 30, "GB": 30}


def parse_size(text: str) -> int:
    """Return a number of bytes: ``4``, ``4B``, ``64KB``, ``1 MB``.

    Raises:
        InvalidArgumentError: the text is none, or the number is 0.
    """
    cleaned = text.strip().upper()
    digits = cleaned.rstrip("BKMG ")
    unit = cleaned[len(digits) :].strip()
    if not digits.isdecimal() or unit not in _POWERS or int(digits) == 0:
        raise InvalidArgumentError(f"a size must be like 4, 4B, 64KB or 1MB, got {text!r}")
    return int(digits) << _POWERS[unit]


def size_label(size: int) -> str:
    """Return a size as people write it: ``64 KB``."""
    for unit in ("GB", "MB", "KB"):
        if size >> _POWERS[unit] and size % (1 << _POWERS[unit]) == 0:
            return f"{size >> _POWERS[unit]} {unit}"
    return f"{size} B"
