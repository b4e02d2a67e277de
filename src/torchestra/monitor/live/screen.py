"""What ``torchestra top`` shows on a terminal, and what keys do: it knows of no terminal, and no job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torchestra.monitor.live.job_table import SORTS, group_tables, membership_lines, sorted_local_ranks, title
from torchestra.monitor.live.rank_page import rank_page
from torchestra.monitor.live.samples import Change, JobSample, changes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_HELP = """
  up, down, k, j    choose a rank
  enter             the page of that rank
  escape            back
  s                 sort the ranks by another column: {sorts}
  p, space          pause, and go on{replay}
  q                 quit
  ?                 this page
"""
_REPLAY_HELP = """
  right, left       (also . and ,) pause, and show the sample after or before"""
_LINES_OF_A_GROUP, _LINES_ABOVE, _MIN_RANKS = 5, 4, 4

Action = Literal["quit", "forward", "back"]


class Screen:
    """The state that keys change, and the page drawn of it.

    Args:
        replays: samples come from a file, so that keys can go through them.

    Attributes:
        paused: what is shown stays, until the key is pressed again.
    """

    def __init__(self, *, replays: bool) -> None:
        self.paused = False
        self._replays = replays
        self._page: Literal["job", "rank", "help"] = "job"
        self._sort = SORTS[0]
        self._selected: tuple[str, int] | None = None
        self._rows: list[tuple[str, int]] = []  # as drawn last: each rank's group and number

    def press(self, key: str) -> Action | None:
        """Do what a key is for; return what is left to the caller."""
        if key == "q":
            return "quit"
        if key in ("p", "space"):
            self.paused = not self.paused
        elif key == "?":
            self._page = "job" if self._page == "help" else "help"
        elif key == "escape":
            self._page = "job"
        elif key == "enter":
            self._page = "rank"
        elif key == "s":
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        elif key in ("up", "k"):
            self._move(-1)
        elif key in ("down", "j"):
            self._move(1)
        elif self._replays and key in ("right", ".", "left", ","):
            self.paused = True
            return "forward" if key in ("right", ".") else "back"
        return None

    def _move(self, by: int) -> None:
        if self._selected in self._rows:
            row = self._rows.index(self._selected) + by
            self._selected = self._rows[min(max(0, row), len(self._rows) - 1)]

    def draw(self, before: JobSample | None, after: JobSample, height: int, state: str) -> RenderableType:
        """Return the page.

        Args:
            before: the sample before, or None.
            height: of the terminal, in lines.
            state: what the caller tells of itself, such as the number of the sample.
        """
        from rich.console import Group as Lines

        groups = changes(before, after)
        self._rows = [
            (change.after.key, change.after.record.ranks[local_rank].rank)
            for change in groups
            for local_rank in sorted_local_ranks(change, self._sort)
        ]
        if self._selected not in self._rows:
            self._selected = self._rows[0] if self._rows else None
        return Lines(title(after), self._status(state), *self._parts(groups, after, height))

    def _status(self, state: str) -> Text:
        from rich.text import Text

        words = [f"sorted by {self._sort}", state, "PAUSED" if self.paused else "", "? for help"]
        return Text("  ".join(filter(None, words)), style="dim", overflow="ellipsis", no_wrap=True)

    def _parts(self, groups: list[Change], after: JobSample, height: int) -> list[RenderableType]:
        from rich.text import Text

        if self._page == "help":
            return [Text(_HELP.format(sorts=", ".join(SORTS), replay=_REPLAY_HELP if self._replays else ""))]
        if self._page == "rank":
            for change in groups:
                for local_rank, rank in enumerate(change.after.record.ranks):
                    if (change.after.key, rank.rank) == self._selected:
                        return list(rank_page(change, local_rank))
        room = (height - _LINES_ABOVE) // max(1, len(groups)) - _LINES_OF_A_GROUP
        tables = group_tables(groups, self._sort, self._selected, max(_MIN_RANKS, room))
        return [*membership_lines(after), *tables]
