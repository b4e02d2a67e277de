"""Worlds that do little else than what some defect harms, so that most runs show it: see mutations.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchestra.errors import DistError
from verification.simulation import growing
from verification.simulation.faults import Fault
from verification.simulation.groups import BOUND_S, GroupsWorld, Lineage
from verification.simulation.messages import MessagesWorld
from verification.simulation.network import Quality
from verification.simulation.rpc import Program, RpcWorld
from verification.simulation.world import Plan


class BriefWorld(GroupsWorld):
    """Groups that end a second after the last fault, if nothing keeps them: so an endless run shows soon."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.until = plan.faults[-1].at + 1.0


class LateWorld(BriefWorld):
    """Groups in which the ranks of the last machine call ``shrink()`` later than others may be silent."""

    def _judge(self, rank: int, lineage: Lineage, error: DistError) -> None:
        super()._judge(rank, lineage, error)
        if self.plan.hosts[rank] == max(self.plan.hosts):
            self.time.sleep(2 * BOUND_S)


class EnteringWorld(BriefWorld):
    """Groups of two machines whose connections are reset while ranks enter a new group, after a crash."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._listening = -1
        self.run.call_later(plan.faults[-1].at, self._await_entry)

    def _await_entry(self) -> None:
        """Reset them twice after the first rank listens in a new group."""
        bound = len(self.network.bound)
        if 0 <= self._listening < bound:
            for earliest in (0.05, 0.25):
                seconds = earliest + self.choices.uniform(0.0, 0.2)
                self.run.call_later(seconds, partial(self.network.reset, 0, 1))
        else:
            self._listening = bound if self._listening < 0 else min(bound, self._listening)
            self.run.call_later(0.002, self._await_entry)


class SmallMessagesWorld(MessagesWorld):
    """Many messages of one frame, none of which a reset of connections may lose."""

    rounds, sizes, pauses = 40, (1, 8, 1000), (0.0,)


class LargeMessagesWorld(MessagesWorld):
    """Many messages most of which is sent when the receiver asks for it, and may be sent again."""

    rounds, sizes, pauses = 20, (300_000,), (0.0,)


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


def two_deaths(seed: int) -> Plan:
    """Return a run in which the first ranks of two machines die, each noticed by its own machine alone."""
    crashes = [Fault(1.5, "crash", rank, 0, 0, 0.0) for rank in (0, 3)]
    return Plan(seed, (0, 0, 0, 1, 1, 1), 0.0, Quality(0.002, 0.01), crashes, most_turns=40_000)


def death(seed: int) -> Plan:
    """Return a run in which a rank dies."""
    crash = Fault(1.5, "crash", 3, 0, 0, 0.0)
    return Plan(seed, (0, 0, 1, 1), 0.0, Quality(0.002, 0.01), [crash], most_turns=40_000)


def resets(seed: int) -> Plan:
    """Return a run in which connections are reset again and again, while messages are under way."""
    faults = [Fault(2.0 + 0.3 * number, "reset", 0, number % 3, -1, 0.0) for number in range(9)]
    return Plan(seed, (0, 1, 2), 0.0, Quality(0.02, 0.02), faults, most_turns=20_000)


def calls(seed: int) -> Plan:
    """Return a run of workers on machines that are not close to each other."""
    return Plan(seed, (0, 1, 2), 0.05, Quality(0.002, 0.01), [], most_turns=60_000)


def lost_worker(seed: int) -> Plan:
    """Return a run in which a worker dies while others call it."""
    crash = Fault(1.1 + 0.1 * (seed % 10), "crash", 1, 0, 0, 0.0)
    return Plan(seed, (0, 0, 1, 2), 0.01, Quality(0.002, 0.01), [crash], most_turns=60_000)


def host_asleep(seed: int) -> Plan:
    """Return a run in which a host sleeps, and loses its connections, until the others have gone on."""
    faults = [
        Fault(0.227, "stop", 1, 2, 0, 4.561),
        Fault(1.292, "stop", 0, 1, 0, 3.375),
        Fault(1.399, "reset", 4, 1, 0, 4.937),
    ]
    return growing.plan(1000514 + seed).with_faults(faults)
