"""A way to break messages between hosts that shows where connections are reset: a defect put back."""

from __future__ import annotations

from torchestra.engine.multihost.point_to_point import PointToPoint
from verification.simulation import aimed
from verification.simulation.aimed import LargeMessagesWorld
from verification.simulation.launching_mutations import Mutation


def _send_nothing_again(self: PointToPoint, rank: int, why: str) -> None:
    for request in self._under_way():
        if request.partner == rank:
            request.note_broken_connection(why)


def _resets(seed: int) -> LargeMessagesWorld:
    return LargeMessagesWorld(aimed.resets(seed))


MUTATIONS: dict[str, Mutation] = {
    "send no rest again": Mutation(
        PointToPoint, "_lose_connection", _send_nothing_again, _resets, "lost messages"
    ),
}
