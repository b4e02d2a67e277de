"""A simulated world: machines with processes, the network between them, and the faults of one run."""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from torchestra.store.tcp.server import TCPStoreServer
from verification.simulation import product, sockets
from verification.simulation.faults import Fault
from verification.simulation.network import Network, Quality
from verification.simulation.scheduler import Killed, Process, Runs, Scheduler
from verification.simulation.threads import SimulatedThread, SimulatedTime

PORT = 29500
_SLOW_SECONDS = 0.05
_SHOWN_LINES = 2  # of what is logged
_FLAPS = 4


class Plan:
    """What a seed has drawn, apart from the order of events: it can be made smaller.

    Attributes:
        hosts: by rank, the machine that it is on.
        preemption: see Scheduler.
        quality: of the network.
        faults: what goes wrong.
        most_turns: see Scheduler.
    """

    def __init__(
        self,
        seed: object,
        hosts: Sequence[int],
        preemption: float,
        quality: Quality,
        faults: list[Fault],
        most_turns: int = 400_000,
    ) -> None:
        self.seed, self.hosts, self.faults = seed, tuple(hosts), faults
        self.preemption, self.quality, self.most_turns = preemption, quality, most_turns

    def with_faults(self, faults: list[Fault]) -> Plan:
        """Return the same with other faults."""
        return Plan(self.seed, self.hosts, self.preemption, self.quality, faults, self.most_turns)

    def with_seed(self, seed: object) -> Plan:
        """Return the same with another order of events."""
        return Plan(seed, self.hosts, self.preemption, self.quality, self.faults, self.most_turns)

    def __str__(self) -> str:
        lines = [f"ranks on machines {list(self.hosts)}, {self.quality}, preemption {self.preemption}"]
        return "\n  ".join([*lines, *map(str, self.faults)])


def draw_quality(choices: random.Random) -> Quality:
    """Draw how good the network of a run is."""
    bursts = choices.choice((0.0, 0.0, 0.02, 0.2))
    return Quality(choices.choice((0.0001, 0.002)), choices.choice((0.0, 0.0005, 0.01)), 0.15, bursts)


class _Events(logging.Handler):
    """Keep what the product logs among the events of the run. An error that it logs is a defect of it."""

    def __init__(self, run: Scheduler) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        if self._run.is_ending:
            return
        self._run.note("log: " + " ".join(record.getMessage().splitlines()[:_SHOWN_LINES]))
        if record.levelno >= logging.ERROR:
            self._run.fail(self.format(record))


class World:
    """The processes of a run; ``machines`` counts those with ranks, and one for the store.

    Attributes:
        ranks: the processes of the ranks.
        server: the process that serves the store, on a machine of its own.
    """

    def __init__(self, plan: Plan, limit_s: float) -> None:
        self.plan = plan
        self.run = Scheduler(plan.seed, plan.preemption, limit_s, plan.most_turns)
        self.network = Network(self.run, plan.seed, plan.quality)
        self.choices = random.Random(f"{plan.seed} program")
        self.ranks = [
            Process(f"rank {rank}", host, 1000.0 + 777.0 * host) for rank, host in enumerate(plan.hosts)
        ]
        self.server_machine = max(plan.hosts) + 1
        self.server = Process("store", self.server_machine)
        self._threads: list[SimulatedThread] = []
        sockets.begin(self.run, self.network)
        product.begin(plan.seed)

    def spawn(self, process: Process, name: str, program: Callable[[], object]) -> SimulatedThread:
        """Give a process its first thread, before the run."""
        thread = SimulatedThread.of_process(self.run, self.run.new_task(process, name), program)
        self._threads.append(thread)
        return thread

    def go(self) -> None:
        """Run the world to its end.

        Raises:
            SimulationError: a promise was broken.
        """
        for fault in self.plan.faults:
            self.run.call_later(fault.at, partial(self._do, fault))
        log = logging.getLogger("torchestra")
        handler = _Events(self.run)
        log.addHandler(handler)
        Runs.active = self.run
        try:
            for thread in self._threads:
                thread.start()
            self.run.run()
        finally:
            Runs.active = None
            log.removeHandler(handler)

    def _pairs(self, fault: Fault) -> list[tuple[int, int]]:
        others = range(self.server_machine + 1) if fault.other < 0 else (fault.other,)
        pairs = [(fault.host, other) for other in others if other != fault.host]
        return pairs if fault.kind == "deaf" else pairs + [(other, host) for host, other in pairs]

    def _do(self, fault: Fault) -> None:
        run, network = self.run, self.network
        if fault.kind == "crash":
            run.crash(self.ranks[fault.rank])
        elif fault.kind == "stop":
            run.stop(self.ranks[fault.rank])
            run.call_later(fault.lasts, partial(run.go_on, self.ranks[fault.rank]))
        elif fault.kind == "power":
            network.lose_power(fault.host)
            for process in self.ranks:
                if process.host == fault.host:
                    run.crash(process)
        elif fault.kind in ("cut", "deaf"):
            network.cut(self._pairs(fault))
            run.call_later(fault.lasts, network.heal)
        elif fault.kind == "sleep":
            self._sleep(fault)
        elif fault.kind == "flap":
            for number in range(_FLAPS):
                run.call_later(fault.lasts * number / _FLAPS, partial(network.cut, self._pairs(fault)))
                run.call_later(fault.lasts * (number + 0.5) / _FLAPS, network.heal)
        elif fault.kind == "reset":
            for one, other in self._pairs(fault):
                if one < other:
                    network.reset(one, other)
        elif fault.kind == "slow":
            slow = dict.fromkeys(self._pairs(fault), _SLOW_SECONDS)
            network.slow |= slow
            run.call_later(fault.lasts, network.slow.clear)
        else:
            for process in (*self.ranks, self.server):
                if process.host == fault.host:
                    process.steps += self.choices.uniform(-3600.0, 3600.0)

    def _sleep(self, fault: Fault) -> None:
        """Stop a machine's processes and its part of the network for some time; its clock goes on."""
        self.network.cut(self._pairs(fault))
        self.run.call_later(fault.lasts, self.network.heal)
        for process in (*self.ranks, self.server):
            if process.host == fault.host:
                self.run.stop(process)
                self.run.call_later(fault.lasts, partial(self.run.go_on, process))

    def disturbed(self, rank: int, least_s: float) -> bool:
        """Return whether a rank's machine was out of reach, or a process of it stopped, for so long.

        Several short faults count as one if they are close to each other.
        """
        host = self.plan.hosts[rank]
        spans = sorted((fault.at, fault.ends) for fault in self.plan.faults if self._concerns(fault, host))
        lasted, end = 0.0, -1e9
        for begins, ends in spans:
            if begins - end > least_s * 2:
                lasted = 0.0
            lasted += ends - begins
            end = max(end, ends)
            if lasted >= least_s:
                return True
        return host in self.network.dark

    def _concerns(self, fault: Fault, host: int) -> bool:
        if fault.kind == "stop":
            return self.plan.hosts[fault.rank] == host
        if fault.kind == "sleep":
            return fault.host in (host, self.server_machine)
        if fault.kind in ("cut", "deaf", "flap"):
            return host in (fault.host, fault.other) or fault.other < 0
        return False


class JobWorld(World):
    """A world whose ranks run one program each, and meet over a TCPStore that the server serves.

    Args:
        bound_s: after how many seconds of silence the product gives up a rank.

    Attributes:
        outcomes: by rank, how its program has ended; ``"failed"`` ends its process.
        has_begun: a rank has met all others.
        time: the clock, for the programs.
    """

    def __init__(self, plan: Plan, limit_s: float, bound_s: float) -> None:
        super().__init__(plan, limit_s)
        self._bound_s = bound_s
        self.outcomes: dict[int, str] = {}
        self.has_begun = False
        self.time = SimulatedTime()
        self.spawn(self.server, "store", self._serve)
        for rank, process in enumerate(self.ranks):
            self.spawn(process, "program", partial(self._run_program, rank, process))
            process.on_crash.append(self._look_whether_over)

    def program(self, rank: int) -> str:
        """Run the program of a rank; return its outcome."""
        raise NotImplementedError

    def _serve(self) -> None:
        server = TCPStoreServer(self.network.address(self.server_machine), PORT)
        while not server.closed:
            self.time.sleep(1000.0)

    def _run_program(self, rank: int, process: Process) -> None:
        try:
            self.outcomes[rank] = self.program(rank)
        except Killed:
            raise
        except BaseException:
            self.run.fail(f"rank {rank} ended with\n{traceback.format_exc()}")
        self.run.note(f"rank {rank}: {self.outcomes.get(rank)}")
        if self.outcomes.get(rank) == "failed":
            self.run.crash(process)  # its process ends without a word
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        if all(process.has_crashed or rank in self.outcomes for rank, process in enumerate(self.ranks)):
            self.run.finish()

    def is_guilty(self, rank: int) -> bool:
        """Return whether a rank is gone, or may have seemed to be."""
        return (
            self.ranks[rank].has_crashed
            or self.outcomes.get(rank) is not None
            or self.disturbed(rank, 0.5 * self._bound_s)
        )

    def is_harmed(self) -> bool:
        """Return whether something lasted so long, or so ended, that ranks may be lost."""
        harm = any(fault.kind in ("crash", "power") for fault in self.plan.faults)
        return harm or any(self.disturbed(rank, 0.5 * self._bound_s) for rank in range(len(self.ranks)))
