"""Which rank waits for which, in what: a wait-for graph (as for deadlocks in databases), and its circles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from torchestra.engine.diagnosis.facts import RankFacts

Kind = Literal["group", "other group", "send", "recv"]


class Wait(NamedTuple):
    """An edge: a rank waits for another.

    Attributes:
        what: the operation or message in which it waits.
    """

    rank: int
    other: int
    kind: Kind
    what: str


class WaitGraph:
    """The graph of a group's ranks."""

    def __init__(self, facts: Sequence[RankFacts]) -> None:
        self._ranks = {each.rank: each for each in facts}
        self._by_process = {each.process: each.rank for each in facts if each.process}
        self.waits = {each.rank: self._waits_of(each) for each in facts}

    def culprits(self, waiting: int) -> list[int]:
        """Return the ranks that a rank waits for in the end, and that wait for no other."""
        reached: dict[int, None] = {waiting: None}
        order = [waiting]
        for rank in order:
            for wait in self.waits.get(rank, ()):
                if wait.other not in reached:
                    reached[wait.other] = None
                    order.append(wait.other)
        return [rank for rank in order if rank != waiting and not self.waits.get(rank)]

    def circle(self, kinds: Collection[str]) -> list[Wait] | None:
        """Return the shortest circle of waits of some kinds, or None."""
        circles = (found for rank in self.waits if (found := self._circle_from(rank, kinds)) is not None)
        return min(circles, key=len, default=None)

    def _circle_from(self, start: int, kinds: Collection[str]) -> list[Wait] | None:
        paths: list[list[Wait]] = [[wait] for wait in self.waits[start] if wait.kind in kinds]
        seen = {path[-1].other for path in paths}
        for path in paths:
            last = path[-1].other
            if last == start:
                return path
            for wait in self.waits.get(last, ()):
                if wait.kind in kinds and (wait.other == start or wait.other not in seen):
                    seen.add(wait.other)
                    paths.append([*path, wait])
        return None

    def _waits_of(self, facts: RankFacts) -> list[Wait]:
        rank = facts.rank
        if facts.presence != "present":
            return []
        message = facts.message
        if message is not None and message.kind in ("send", "recv"):
            kind: Kind = "send" if message.kind == "send" else "recv"
            others = (
                [each for each in self._ranks if each != rank] if message.peer is None else [message.peer]
            )
            return [Wait(rank, other, kind, message.text) for other in others]
        call = facts.running
        if call is not None:
            what = f"operation {call.number}, {call.text},"
            others = [each for each in self._ranks if each != rank]
            late = [each for each in others if self._ranks[each].began < call.number]
            if not late and call.waits_for in others:  # which has not gone on within the operation
                late = [call.waits_for]
            return [Wait(rank, each, "group", what) for each in late]
        groups = facts.program.groups if facts.program is not None and facts.program.inside else ()
        return [
            Wait(rank, self._by_process[process], "other group", f"{group.call} of group {group.group!r}")
            for group in groups
            for process in group.missing
            if process in self._by_process
        ]
