"""The faults of the machine. Each is prepared before the ranks start, begins, and may end.

The class says what a rank does to itself before it meets the others (:meth:`Fault.in_rank`, called in the
rank's process), and what the tool does to it meanwhile (:meth:`Fault.begin`, :meth:`Fault.tick`,
:meth:`Fault.end`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from typing import Any

from tools.chaos import cgroups, namespaces
from tools.chaos.network import Network, why_not
from tools.chaos.rounds import Round, World

LOSSY = "loss and delay"
LONG = ("long", "cut for long")
"""Variants that last longer than the time-out and the heartbeat bound."""

_SHAPES = {LOSSY: "netem delay 40ms 20ms loss 2%", "slow": "tbf rate 2mbit burst 4kb latency 20ms"}
_MIB = 1 << 20


class Fault:
    """What does nothing: a round without a fault shows that the rest is right.

    Args:
        round_: the round that it is for.

    Attributes:
        ends: it is taken back after a while.
    """

    name = "none"
    ends = False

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.pids: list[int] = []
        self.network: Network | None = None

    @staticmethod
    def why_not() -> str:
        """Return why it cannot be made on this machine; empty if it can."""
        return ""

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether there is such a fault in a world."""
        return world.size < 16

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return the forms that it has in a world."""
        return ("",)

    def prepare(self) -> None:
        """Do what comes before the ranks are started."""

    def in_rank(self, rank: int) -> None:
        """Do what the process of a rank does to itself, before anything else; its rank, for threads 0."""

    def begin(self) -> None:
        """Begin, with the processes of the ranks in ``self.pids``."""

    def tick(self) -> None:
        """Go on; called every few milliseconds while the fault lasts."""

    def end(self) -> None:
        """Take it back."""

    def close(self) -> None:
        """Leave nothing."""

    @property
    def victim(self) -> int:
        """The process of the rank that it is for."""
        return self.pids[0] if self.round.world.ranks == "threads" else self.pids[self.round.victim]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.victim, number)


class Kill(Fault):
    """A rank's process gets SIGKILL."""

    name = "kill"

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether ranks have processes of their own."""
        return world.ranks == "processes" and world.size < 16

    def begin(self) -> None:
        """Kill it."""
        self._signal(signal.SIGKILL)


class Stop(Fault):
    """A rank's process gets SIGSTOP, and SIGCONT after a while."""

    name, ends = "stop", True

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return: shorter than all limits, or longer."""
        return ("short", "long")

    def begin(self) -> None:
        """Stop it."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)


class SharedMemory(Fault):
    """/dev/shm of each rank is a tmpfs of its own, small and full."""

    name = "shm"

    @staticmethod
    def why_not() -> str:
        """Return why there are no mount namespaces, if so."""
        return namespaces.why_not(namespaces.MOUNTS)

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether the ranks are started by us."""
        return world.bridge != "mpi" and world.size < 16

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return: full; the same without memfd_create, as under gVisor; filled later, without it."""
        return ("full", "full, no memfd", "filled later, no memfd")

    def in_rank(self, rank: int) -> None:
        """Mount it."""
        namespaces.small_shm(64 * _MIB if self._later else _MIB >> 4)
        if "no memfd" in self.round.variant:
            os.memfd_create = _no_memfd
        if not self._later:
            namespaces.fill("/dev/shm")

    @property
    def _later(self) -> bool:
        return "later" in self.round.variant

    def begin(self) -> None:
        """Fill it."""
        if self._later:
            for pid in self.pids:
                namespaces.fill(f"/proc/{pid}/root/dev/shm")


def _no_memfd(*_: Any) -> int:
    raise OSError(38, "Function not implemented")


class Memory(Fault):
    """A rank can have no more memory than it has (RLIMIT_AS, RLIMIT_DATA), or 4 MiB more (cgroup)."""

    name = "memory"

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return those that the machine has."""
        limits = ("RLIMIT_AS", "RLIMIT_DATA")
        return limits if cgroups.why_not("memory") else (*limits, "cgroup")

    def begin(self) -> None:
        """Set the limit."""
        if self.round.variant == "cgroup":
            self._group = cgroups.Cgroup("memory")
            self._group.limit_memory(4 * _MIB)
            self._group.add(self.victim)
            return
        with contextlib.suppress(OSError):
            status = _status(self.victim)
            kind, has = (
                (resource.RLIMIT_AS, status["VmSize"])
                if self.round.variant == "RLIMIT_AS"
                else (resource.RLIMIT_DATA, status["VmData"])
            )
            _, hard = resource.prlimit(self.victim, kind)
            resource.prlimit(self.victim, kind, (has, hard))

    def close(self) -> None:
        """Remove the cgroup."""
        if self.round.variant == "cgroup" and hasattr(self, "_group"):
            self._group.close()


def _status(pid: int) -> dict[str, int]:
    """Return the sizes in /proc/PID/status, in bytes."""
    found = {}
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if value.endswith("kB\n"):
                found[name] = int(value.split()[0]) << 10
    return found


class Link(Fault):
    """The cable between two hosts is cut, or loses or delays packets, for a while."""

    name, ends = "link", True

    @staticmethod
    def why_not() -> str:
        """Return why there are no hosts with cables, if so."""
        return why_not()

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether there is a cable."""
        return world.namespaces

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return: shorter than all limits or longer; packets lost and late; so slow that some are dropped."""
        return ("cut", "cut for long", LOSSY, "slow")

    def begin(self) -> None:
        """Disturb the cable of the host of the rank."""
        assert self.network is not None
        host = self.round.world.host_of(self.round.victim)
        if self.round.variant in _SHAPES:
            self.network.shape(host, _SHAPES[self.round.variant])
        else:
            self.network.cut(host)

    def end(self) -> None:
        """Repair it."""
        assert self.network is not None
        host = self.round.world.host_of(self.round.victim)
        if self.round.variant in _SHAPES:
            self.network.unshape(host)
        else:
            self.network.restore(host)


class Clock(Fault):
    """A rank's clock differs.

    No kernel gives a process a wall clock of its own, so ``time.time`` of the rank is replaced, which steps
    to and fro by hours. Its monotonic clock is that of a time namespace, if there are any: a day ahead.
    """

    name = "clock"

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether the ranks are started by us."""
        return world.bridge != "mpi" and world.size < 16

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return: time.time replaced, and the monotonic clock of a time namespace."""
        monotonic = world.ranks == "processes" and not namespaces.why_not(namespaces.TIME)
        return ("time.time replaced", "monotonic, time namespace") if monotonic else ("time.time replaced",)

    def in_rank(self, rank: int) -> None:
        """Have another clock."""
        if self.round.world.ranks == "processes" and rank != self.round.victim:
            return
        if self.round.variant.startswith("monotonic"):
            namespaces.live_in(namespaces.TIME)
            return
        real, real_ns, started = time.time, time.time_ns, time.monotonic()

        def step() -> float:
            return 7200.0 * (int((time.monotonic() - started) * 3) % 3 - 1)

        time.time = lambda: real() + step()
        time.time_ns = lambda: real_ns() + int(step() * 1e9)


class PidNamespace(Fault):
    """A rank is in a PID namespace of its own with its own /proc, as in a container."""

    name = "pidns"

    @staticmethod
    def why_not() -> str:
        """Return why there are none, if so."""
        return namespaces.why_not(namespaces.PIDS | namespaces.MOUNTS)

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether ranks have processes of their own, which we start."""
        return world.ranks == "processes" and world.bridge != "mpi" and world.size < 16

    def in_rank(self, rank: int) -> None:
        """Go into one."""
        if rank == self.round.victim:
            namespaces.live_in(namespaces.PIDS | namespaces.MOUNTS)


class Quota(Fault):
    """A rank gets a fifth of a core: by a cgroup, or by SIGSTOP and SIGCONT in turns."""

    name, ends = "quota", True

    @staticmethod
    def variants(world: World) -> tuple[str, ...]:
        """Return what the machine has."""
        return ("SIGSTOP in turns",) if cgroups.why_not("cpu") else ("SIGSTOP in turns", "cgroup")

    def begin(self) -> None:
        """Limit it."""
        self._stopped, self._next = False, 0.0
        if self.round.variant == "cgroup":
            self._group = cgroups.Cgroup("cpu")
            self._group.limit_cpu(0.2)
            self._group.add(self.victim)

    def tick(self) -> None:
        """Stop the rank for 80 of 100 ms, without a cgroup."""
        if self.round.variant != "cgroup" and time.monotonic() > self._next:
            self._stopped = not self._stopped
            self._signal(signal.SIGSTOP if self._stopped else signal.SIGCONT)
            self._next = time.monotonic() + (0.08 if self._stopped else 0.02)

    def end(self) -> None:
        """Give it all again."""
        if self.round.variant == "cgroup":
            self._group.release()
        else:
            self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Remove the cgroup."""
        if hasattr(self, "_group"):
            self._group.close()


class Oversubscribe(Fault):
    """Sixteen ranks share two cores."""

    name = "oversubscribe"

    @staticmethod
    def fits(world: World) -> bool:
        """Return whether there are sixteen ranks."""
        return world.size == 16

    def in_rank(self, rank: int) -> None:
        """Be on two cores only."""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


class Neighbour(Fault):
    """Another job spins on all cores."""

    name, ends = "neighbour", True

    def begin(self) -> None:
        """Start it."""
        self._others = []
        for _ in os.sched_getaffinity(0):
            pid = os.fork()
            if pid == 0:
                while True:
                    pass
            self._others.append(pid)

    def end(self) -> None:
        """End it."""
        for pid in self._others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._others.clear()

    def close(self) -> None:
        """End it, if the round ended before."""
        if hasattr(self, "_others"):
            self.end()


FAULTS: dict[str, type[Fault]] = {
    each.name: each
    for each in (
        Kill,
        Stop,
        SharedMemory,
        Memory,
        Link,
        Clock,
        PidNamespace,
        Quota,
        Oversubscribe,
        Neighbour,
        Fault,
    )
}
"""All faults by name; the last is none at all."""
