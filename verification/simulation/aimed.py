"""Worlds that do little else than what some defect harms, so that most runs show it: see mutations.py."""

from __future__ import annotations

from collections.abc import Callable

from verification.simulation.faults import Fault
from verification.simulation.network import Quality
from verification.simulation.rpc import Program, RpcWorld
from verification.simulation.world import Plan


class _Calls(Program):
    def actions(self) -> list[Callable[[], None]]:
        """Make calls that nobody waits for at once."""
        return [self._call_later, self._relay_later]


class CallsWorld(RpcWorld):
    """Workers that make calls, and shut down while some may be under way."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._settles = False

    def work(self, rank: int) -> None:
        """Make calls."""
        _Calls(self, rank).go()


class _References(Program):
    def actions(self) -> list[Callable[[], None]]:
        """Make references, and pass them on."""
        return [self._make, self._pass_on, self._hand_over, self._borrow, self._drop]


class ReferencesWorld(RpcWorld):
    """Workers that pass references on, and keep nothing at last."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._settles = True

    def work(self, rank: int) -> None:
        """Pass references on."""
        _References(self, rank).go()


def calls(seed: int) -> Plan:
    """Return a run of workers on machines that are not close to each other."""
    return Plan(seed, (0, 1, 2), 0.05, Quality(0.002, 0.01), [], most_turns=60_000)


def lost_worker(seed: int) -> Plan:
    """Return a run in which a worker dies while others call it."""
    crash = Fault(1.1 + 0.1 * (seed % 10), "crash", 1, 0, 0, 0.0)
    return Plan(seed, (0, 0, 1, 2), 0.01, Quality(0.002, 0.01), [crash], most_turns=60_000)
