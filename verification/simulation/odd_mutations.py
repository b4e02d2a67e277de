"""Ways to break the product that show in odd networks: defects that the simulation has found, put back."""

from __future__ import annotations

import contextlib
import itertools

from torchestra.errors import DistError
from torchestra.launcher.nodes import Nodes
from torchestra.rpc.agent import Agent
from torchestra.rpc.worker_info import WorkerInfo
from verification.simulation import joining_rpc, launching, odd
from verification.simulation.faults import Fault
from verification.simulation.joining_rpc import JoiningWorld
from verification.simulation.launching import LaunchingWorld
from verification.simulation.launching_mutations import Mutation


def _list_whom_it_knew(self: Agent) -> list[WorkerInfo]:
    return [self.workers[number] for number in self.workers.current() if number not in self.liveness.gone]


def _send_heartbeats_among_requests(self: Nodes) -> None:
    store = self._store.clone()
    for count in itertools.count():
        if self._closed.is_set():
            return
        with contextlib.suppress(DistError, OSError):
            store.set(f"heartbeat/{self._name}", f"{count} {self.members}")
            for _ in range(20):
                store.check(["failed"])
        self._closed.wait(0.5)


def _far_launchers(seed: int) -> LaunchingWorld:
    """Return a run of launchers between which a request takes up to a second."""
    plan = odd.plan(206).with_faults([]).with_seed(f"far {seed}")
    return LaunchingWorld(plan, launching.terms(206))


def _worker_asleep(seed: int) -> JoiningWorld:
    """Return a run in which a machine sleeps, so that its workers are removed, until the others have left."""
    sleep = Fault(1.86, "sleep", 0, 1, -1, 4.5)
    return JoiningWorld(joining_rpc.plan(96 + seed).with_faults([sleep]))


MUTATIONS: dict[str, Mutation] = {
    "send heartbeats among requests": Mutation(
        Nodes, "_send_heartbeats", _send_heartbeats_among_requests, _far_launchers, "nothing went wrong"
    ),
    "list whom it knew": Mutation(
        Agent, "current_workers", _list_whom_it_knew, _worker_asleep, "was removed, and"
    ),
}
