"""A way to break distributed autograd that shows where a connection is lost: a defect that was, put back."""

from __future__ import annotations

from torchestra.autograd.contexts import ContextContainer
from verification.simulation.autograd import AutogradWorld
from verification.simulation.faults import Fault
from verification.simulation.launching_mutations import Mutation
from verification.simulation.network import Quality
from verification.simulation.world import Plan


def _release_what_another_loses(self: ContextContainer, source: int, context_id: int, how: str) -> None:
    self.release(context_id)


def _lost_connection(seed: int) -> AutogradWorld:
    """Return a run in which two of three machines lose their connections, in which much is under way."""
    reset = Fault(1.2 + 0.1 * (seed % 24), "reset", 0, 0, 1, 0.0)
    quality = Quality(0.01, 0.01, 0.15, 0.2)
    return AutogradWorld(Plan(seed, (0, 1, 2), 0.1, quality, [reset], most_turns=60_000))


MUTATIONS: dict[str, Mutation] = {
    "release what another loses": Mutation(
        ContextContainer,
        "_lose_part",
        _release_what_another_loses,
        _lost_connection,
        "Could not find autograd context",
    ),
}
