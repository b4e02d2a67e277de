"""The stand-in for a group on a rank that is not in it."""

from __future__ import annotations

from collections.abc import Sequence


class NonMember:
    """Stand for a new group on a rank that is not in it; :func:`torchestra.new_group` returns it.

    Operations on it do nothing but warn; its rank and size are -1.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.ranks = tuple(ranks)
        self.group_name = name

    def rank(self) -> int:
        """Return -1."""
        return -1

    def size(self) -> int:
        """Return -1."""
        return -1

    def __repr__(self) -> str:
        return f"<no member of group {self.group_name!r}, which has global ranks {list(self.ranks)}>"
