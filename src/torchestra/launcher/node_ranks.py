"""Node ranks of an elastic job: which launcher holds which, and how a lost host's is taken.

A job with ``--nnodes N`` has the node ranks 0 to N-1, and each stands for certain ranks. The launchers that
began the job are named 0 to N-1 and hold the node ranks of these numbers. One that comes later, a spare or
one started again, has a name of its own. All is in the launchers' store (see nodes.py)::

    node_rank/K     the name of the launcher that has taken node rank K; missing while the first one holds it
    heartbeat/NAME  a count, and how many members of the job this launcher has: it lives
    done/NAME       this launcher has ended
    later           the names of those that came later
    ended           the ranks of some node have ended well: the job is at its end

A launcher without a node rank watches those that hold one, and takes that of one that has been silent for the
heartbeat bound: ``node_rank/K`` changes only by compare-and-set from the name that was silent. So of several
that want one, one gets it, and nobody takes it from a launcher that has just taken it. A launcher whose node
rank was taken while it was silent sees that with its next heartbeat, and ends its ranks. Until then they do
no harm: their group has gone on without them, and a member of an old group cannot act in a new one
(engine/membership).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.store import Store
from torchestra.store.replicated.sessions import FAILOVER_SECONDS
from torchestra.system.deadline import RunningClock
from torchestra.system.interrupts import Interrupts

REST_SECONDS = 0.2
_LONGEST_INTERVAL_S = 1.0


class LauncherDetector:
    """Tells which launchers have been silent for the heartbeat bound.

    Where that is short, for as long as a heartbeat may take that was sent to a replica of the store whose
    machine loses its power. Time in which this process was stopped does not count.

    Args:
        store: the launchers'.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bound = max(heartbeat_bound(), FAILOVER_SECONDS + _LONGEST_INTERVAL_S)
        self._clock = RunningClock(_LONGEST_INTERVAL_S)
        self._heartbeats: dict[str, bytes] = {}
        self._since: dict[str, float] = {}

    def heartbeat(self, name: str) -> bytes:
        """Look at a launcher's heartbeat, and return it; empty if it has had none yet."""
        key = f"heartbeat/{name}"
        heartbeat = self._store.get(key) if self._store.check([key]) else b""
        now = self._clock.elapsed()
        if name not in self._heartbeats or self._heartbeats[name] != heartbeat:
            self._heartbeats[name], self._since[name] = heartbeat, now
        return heartbeat

    def is_silent(self, name: str) -> bool:
        """Return whether the looks at this launcher, the first and the last long apart, saw one heartbeat."""
        self.heartbeat(name)
        return self._clock.elapsed() - self._since[name] > self._bound


class NodeRanks:
    """The node ranks of a job, for one launcher.

    Args:
        store: the launchers'.
        ranks: how many ranks each node has.
        name: this launcher's.
    """

    def __init__(self, store: Store, ranks: list[int], name: str) -> None:
        self._store, self._ranks, self._name = store, ranks, name
        self._detector = LauncherDetector(store)

    def wait(self, preferred: int, meanwhile: Callable[[], object] = lambda: None) -> int | None:
        """Wait until a launcher that holds a node rank is lost, and take it; None when the job has ended.

        Args:
            preferred: the node rank to look at first.
            meanwhile: called again and again.
        """
        self._store.append("later", f"{self._name} ")
        count = 0
        with Interrupts() as interrupts:
            while not (self._store.check(["ended"]) or self._store.check(["failed"])):
                count += 1
                self._store.set(f"heartbeat/{self._name}", f"{count} 0")
                for node_rank in sorted(range(len(self._ranks)), key=lambda each: each != preferred):
                    if self._take(node_rank):
                        return node_rank
                meanwhile()
                interrupts.wait(REST_SECONDS)
        return None

    def is_mine(self, node_rank: int) -> bool:
        """Return whether this launcher still holds a node rank."""
        return self._holder(node_rank) == self._name

    def is_first(self, node_rank: int) -> bool:
        """Return whether no launcher of a lower node rank lives; the first that does checks the limits."""
        return all(self._detector.is_silent(self._holder(lower)) for lower in range(node_rank))

    def members(self) -> int:
        """Return how many members the job has: as launchers said last, and none where one is silent."""
        return sum(self._members_at(node_rank) for node_rank in range(len(self._ranks)))

    def _members_at(self, node_rank: int) -> int:
        holder = self._holder(node_rank)
        if self._store.check([f"done/{holder}"]):
            return self._ranks[node_rank]
        if self._detector.is_silent(holder):
            return 0
        heartbeat = self._detector.heartbeat(holder)
        return int(heartbeat.split()[1]) if heartbeat else self._ranks[node_rank]

    def _holder(self, node_rank: int) -> str:
        key = f"node_rank/{node_rank}"
        return self._store.get(key).decode() if self._store.check([key]) else str(node_rank)

    def _take(self, node_rank: int) -> bool:
        """Take a node rank if its holder is silent; return whether this launcher has got it."""
        holder = self._holder(node_rank)
        if self._store.check([f"done/{holder}"]) or not self._detector.is_silent(holder):
            return False
        expected = holder if self._store.check([f"node_rank/{node_rank}"]) else ""
        return self._store.compare_set(f"node_rank/{node_rank}", expected, self._name).decode() == self._name


def later_launchers(store: Store) -> Iterator[str]:
    """Return the names of the launchers that came after the job had begun."""
    if store.check(["later"]):
        yield from store.get("later").decode().split()
