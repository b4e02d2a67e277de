"""Who calls whom by RPC."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torchestra.engine.recorder.formats.rows import CallRow


@dataclass(frozen=True)
class CallEdge:
    """The calls of one worker that another has executed.

    Attributes:
        caller, callee: ranks; the caller is -1 if it is not known.
        calls: how many.
        seconds: that their execution took, in all.
        functions: that were called: name, calls, seconds, those that took most time first.
    """

    caller: int
    callee: int
    calls: int
    seconds: float
    functions: tuple[tuple[str, int, float], ...]


def call_edges(calls: Sequence[CallRow]) -> list[CallEdge]:
    """Return the edges of the call graph of a group, those that took most time first."""
    by_pair: dict[tuple[int, int], list[CallRow]] = defaultdict(list)
    for call in calls:
        by_pair[call.caller, call.callee].append(call)
    edges = [
        CallEdge(
            caller,
            callee,
            sum(call.calls for call in own),
            sum(call.seconds for call in own),
            tuple(
                (call.function, call.calls, call.seconds)
                for call in sorted(own, key=lambda call: (-call.seconds, call.function))
            ),
        )
        for (caller, callee), own in by_pair.items()
    ]
    return sorted(edges, key=lambda edge: (-edge.seconds, edge.caller, edge.callee))
