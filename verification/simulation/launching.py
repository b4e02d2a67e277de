"""Simulate the launchers of one job on several hosts: ``torchestra run --nnodes``, and with ``--elastic``.

Each launcher meets the others (launcher/nodes.py), runs its ranks (launcher/job.py), tells of failures,
replaces ranks that die where the job is elastic, serves a replica of the job's store, takes a lost host's
place: all by the product's own code, on simulated ranks (launched.py). Meanwhile launchers crash or are
stopped, ranks die or raise errors, and the network is slow, cut, or resets connections. Checked are:

* every launcher ends, and leaves no rank behind;
* where nothing goes wrong, or no more than the job survives, the exit code of all is 0;
* where a rank fails that ends the job, all end with an error; where the network is well, each blames a rank,
  or its node, that has failed by itself, and not because of another;
* no launcher is blamed, nor is its place taken, that was in reach and ran;
* a place has one launcher at a time: it is taken from the last one that had it;
* one lost host costs nothing where there is a spare one: the job ends well, and its ranks were replaced.
"""

from __future__ import annotations

import contextlib
import random
import signal
import traceback
from functools import partial
from typing import Any, NamedTuple

from torchestra.errors import DistError
from torchestra.launcher.failure_report import conclude
from torchestra.launcher.flight_dumps import FlightDumps
from torchestra.launcher.job import Job
from torchestra.launcher.node_course import prepare, tell_others
from torchestra.launcher.nodes import Nodes
from torchestra.launcher.output import OutputSink
from torchestra.launcher.replacements import ElasticLimits
from torchestra.launcher.spec import JobSpec, Script
from verification.simulation.faults import Fault, drawn
from verification.simulation.groups import BOUND_S
from verification.simulation.launched import RankPrograms, SimulatedBackend
from verification.simulation.network import Network
from verification.simulation.scheduler import Killed, Process
from verification.simulation.world import PORT, Plan, World, draw_quality

_FAULTS_S, _LIMIT_S = 8.0, 1500.0
_MEETING_S = 3.0
"""When all have met at the latest, where nothing goes wrong."""
_ENDING_S = 60.0
"""How long a launcher may go on when its ranks were to end: it may wait for lost hosts."""
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV)


class Terms(NamedTuple):
    """What the launchers of a job were told.

    Attributes:
        nodes, spares: how many hosts it has, and how many wait for a lost one's place.
        ranks: how many ranks each node has.
        limits: of an elastic job.
        max_failures: how many failures another job survives.
        rendezvous: how many addresses --rendezvous has.
        starts: when each launcher is started.
        until: when the ranks end.
    """

    nodes: int
    spares: int
    ranks: tuple[int, ...]
    limits: ElasticLimits | None
    max_failures: int
    rendezvous: int
    starts: tuple[float, ...]
    until: float


def terms(seed: object) -> Terms:
    """Draw what the launchers of a run were told."""
    choices = random.Random(f"{seed} terms")
    nodes = choices.choice((2, 2, 3, 3, 4))
    is_elastic = choices.random() < 0.6
    spares = choices.choice((0, 1, 1, 2)) if is_elastic else 0
    ranks = tuple(choices.choice((1, 2, 2, 3)) for _ in range(nodes))
    least = choices.choice((1, 1, sum(ranks) // 2, sum(ranks)))
    limits = ElasticLimits(max(1, least), sum(ranks), choices.choice((None, None, 3))) if is_elastic else None
    max_failures = 0 if is_elastic else choices.choice((0, 0, 1, 2))
    replicas = nodes if nodes == 3 or (nodes == 2 and spares) else {2: 1, 4: 3}[nodes]
    starts = tuple(choices.choice((0.0, choices.uniform(0.0, 1.0))) for _ in range(nodes + spares))
    until = _FAULTS_S + choices.choice((-2.0, 4.0, 12.0))
    return Terms(nodes, spares, ranks, limits, max_failures, choices.randint(1, replicas), starts, until)


def plan(seed: int) -> Plan:
    """Draw a run. Two kinds of faults more than elsewhere: a rank's death, and an error that it raises."""
    choices = random.Random(f"{seed} plan")
    given = terms(seed)
    hosts = range(given.nodes + given.spares)
    faults = drawn(choices, hosts, len(hosts), BOUND_S, _FAULTS_S)
    for _ in range(choices.choice((0, 0, 1, 1, 2, 3))):
        kind, host = choices.choice(("death", "error")), choices.randrange(given.nodes)
        faults.append(Fault(choices.uniform(0.0, _FAULTS_S), kind, choices.randrange(3), host, -1, 0.0))
    return Plan(seed, hosts, choices.choice((0.0, 0.01)), draw_quality(choices), sorted(faults))


class _Screen:
    """A launcher's standard output and error: what it prints are events of the run."""

    def __init__(self, world: LaunchingWorld) -> None:
        self._run = world.run
        self.buffer = self

    def write(self, text: Any) -> None:
        shown = text.decode() if isinstance(text, bytes) else text
        if shown.strip() and not self._run.is_ending:
            self._run.note(f"prints: {shown.strip()}")

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        pass


class Outcome(NamedTuple):
    """How a launcher has ended.

    Attributes:
        code: its exit code.
        blamed: the ranks that it blames, or those of the node that it blames; None if it blames none.
        node_rank: the place that it had at last.
        at: when.
    """

    code: int
    blamed: tuple[int, ...] | None
    node_rank: int | None
    at: float = 0.0


class LaunchingWorld(World):
    """The launchers of one run.

    Args:
        given: what they were told, if it is not drawn.

    Attributes:
        terms: what they were told.
        outcomes: by launcher.
        holders: by node rank, the launchers that have had it, in order.
    """

    def __init__(self, plan: Plan, given: Terms | None = None) -> None:
        super().__init__(plan, _LIMIT_S)
        self.terms = given = given or terms(plan.seed)
        self.outcomes: dict[int, Outcome] = {}
        self.holders: list[list[int]] = [[] for _ in given.ranks]
        self.programs = RankPrograms(
            self.run,
            self.choices,
            is_elastic=given.limits is not None,
            survives=given.max_failures > 0,
            until=given.until,
        )
        self._backends: dict[int, SimulatedBackend] = {}
        self._first = [sum(given.ranks[:node]) for node in range(given.nodes)]
        for number, process in enumerate(self.ranks):
            process.name = f"launcher {number}"
            self.spawn(process, "launcher", partial(self._launch, number, process))
            process.on_crash.append(self._look_whether_over)

    def go(self) -> None:
        """See :class:`World`."""
        with contextlib.redirect_stderr(_Screen(self)):  # type: ignore[type-var]
            super().go()
        self._check_end()
        self.run.raise_failure()

    # -- a launcher

    def _launch(self, number: int, process: Process) -> None:
        try:
            self.programs.time.sleep(self.terms.starts[number])
            outcome = self._be_launcher(number, process)._replace(at=self.run.now)
            self.outcomes[number] = outcome
        except Killed:
            raise
        except BaseException:
            self.run.fail(f"launcher {number} ended with\n{traceback.format_exc()}")
            return
        left = [rank for launcher, rank in self.programs.alive.values() if launcher is process]
        if left:
            self.run.fail(f"launcher {number} has ended, and ranks {left} live")
        over = max(self.terms.until, *(fault.ends for fault in self.plan.faults), 0.0)
        if number in self._backends and self.run.now > over + _ENDING_S:
            self.run.fail(f"launcher {number} ended long after its ranks were to: {outcome}")
        self.run.crash(process, f"ends: {outcome}")

    def _be_launcher(self, number: int, process: Process) -> Outcome:
        given = self.terms
        rendezvous = ",".join(f"{Network.address(node)}:{PORT}" for node in range(given.rendezvous))
        least = None if given.limits is None else given.limits.least
        own = given.ranks[number] if number < given.nodes else 1
        try:
            nodes = Nodes(given.nodes, number, rendezvous, own, PORT + 1, least, given.spares)
        except DistError as error:
            self.run.note(f"launcher {number}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return Outcome(1, None, None)
        if nodes.node_rank is None:
            nodes.close()
            return Outcome(0 if nodes.other is None else nodes.other.code, self._blamed(nodes), None)
        self._note_place(number, nodes)
        spec = JobSpec(
            nproc=nodes.nproc,
            target=Script("simulated"),
            environment=nodes.environment({}),
            directory="/",
            first_rank=nodes.first_rank,
            world_size=nodes.world_size,
            joins=nodes.joins,
        )
        screen = OutputSink(_Screen(self))  # type: ignore[arg-type]
        backend = self._backends[number] = SimulatedBackend(self.programs, process)
        most = min(given.max_failures, nodes.world_size - 1)
        job = Job(backend, spec, (screen, screen), most)
        prepare(job, nodes, given.limits, most, screen, FlightDumps(None))
        job.run()
        job.close()
        tell_others(job, nodes, [])
        nodes.close()
        code = conclude(job, [], nodes.other)
        blamed = self._blamed(nodes)
        if nodes.other is None and job.cause is not None:
            blamed = (job.first_rank + job.cause.rank,)
        return Outcome(code, blamed, nodes.node_rank)

    def _blamed(self, nodes: Nodes) -> tuple[int, ...] | None:
        if nodes.other is None:
            return None
        node = nodes.other.node
        if node >= self.terms.nodes:  # a spare host's number: its own place is blamed
            taken = [place for place, holders in enumerate(self.holders) if node in holders]
            node = taken[0]
        first = self._first[node]
        return tuple(range(first, first + self.terms.ranks[node]))

    def _note_place(self, number: int, nodes: Nodes) -> None:
        """Note that a launcher has a place; it may take it only from one that may have seemed to be gone."""
        assert nodes.node_rank is not None
        holders = self.holders[nodes.node_rank]
        self.run.note(f"launcher {number} has the place {nodes.node_rank}")
        if holders and not self._is_guilty(holders[-1]):
            self.run.fail(f"launcher {number} takes the place of launcher {holders[-1]}, which is well")
        if not holders and nodes.joins and not self._is_guilty(nodes.node_rank):
            self.run.fail(f"launcher {number} takes place {nodes.node_rank}, whose launcher is well")
        if holders:
            repaired = max((fault.ends for fault in self.plan.faults), default=0.0)
            pause = max(0.0, repaired - self.run.now) + 3 * BOUND_S
            self.run.call_later(pause, partial(self._check_left, holders[-1], number))
        holders.append(number)

    def _check_left(self, number: int, other: int) -> None:
        left = [rank for launcher, rank in self.programs.alive.values() if launcher is self.ranks[number]]
        if left:
            self.run.fail(f"launcher {other} has the place of {number}, whose ranks {left} live on")

    # -- faults

    def _do(self, fault: Fault) -> None:
        if fault.kind in ("death", "error"):
            backend = self._backends.get(fault.host)
            if backend is not None and not self.ranks[fault.host].has_crashed:
                signum = self.choices.choice(_SIGNALS) if fault.kind == "death" else None
                backend.fail(fault.rank % self.terms.ranks[fault.host], signum)
        else:
            super()._do(fault)

    def _look_whether_over(self) -> None:
        if all(process.has_crashed for process in self.ranks):
            self.run.finish()

    # -- what is promised

    def _is_guilty(self, number: int) -> bool:
        """Return whether a launcher is gone, or may have seemed to be."""
        return self.ranks[number].has_crashed or self.disturbed(number, 0.5 * BOUND_S)

    def _lost(self) -> list[int]:
        """Return the launchers that have ended without a word."""
        return [number for number in range(len(self.ranks)) if number not in self.outcomes]

    def _any_disturbed(self) -> bool:
        """Return whether a launcher that has not ended may have seemed to be gone."""
        return any(self.disturbed(number, 0.5 * BOUND_S) for number in self.outcomes)

    def _check_end(self) -> None:
        if self._any_disturbed():
            return
        given, run = self.terms, self.run
        failed = [death for death in self.programs.deaths if death.has_failed]
        codes = {number: outcome.code for number, outcome in self.outcomes.items()}
        before = {fault.host for fault in self.plan.faults if fault.kind in ("crash", "power")}
        if not (self._lost() or failed or before) and any(codes.values()):
            run.fail(f"nothing went wrong, and the launchers' exit codes are {codes}")
        if self._lost() or before:
            if given.limits is not None:
                self._check_replaced(codes)
            return
        if given.limits is None:
            self._check_failures(len(failed), codes)
        elif not self._may_end_elastic(failed):
            if any(codes.values()):
                run.fail(f"a replaceable rank died, and the launchers' exit codes are {codes}")
            late = any(death.at > given.until - _MEETING_S for death in self.programs.deaths)
            if not late and len(self.programs.well) < sum(given.ranks):
                run.fail(f"only ranks {self.programs.well} have ended well")

    def _check_failures(self, failed: int, codes: dict[int, int]) -> None:
        """Check a job that replaces nobody, and has lost ranks alone."""
        most = min(self.terms.max_failures, sum(self.terms.ranks) - 1)
        if failed <= most and any(codes.values()):
            self.run.fail(f"{failed} ranks of {most} that may have failed, and the exit codes are {codes}")
        late = any(death.at > self.terms.until - 1.0 for death in self.programs.deaths if death.has_failed)
        if failed > most and not late and not all(codes[number] for number in self._ended_after(most)):
            self.run.fail(f"{failed} ranks failed, {most} may, and the launchers' exit codes are {codes}")
        network = any(fault.kind not in ("death", "error", "clock") for fault in self.plan.faults)
        culprits = {death.rank for death in self.programs.deaths if death.has_failed}
        if network or self.plan.quality.bursts or self.plan.quality.paths:
            return
        for number, outcome in self.outcomes.items():
            if outcome.blamed is not None and not culprits & {*outcome.blamed}:
                self.run.fail(f"launcher {number} blames ranks {outcome.blamed}, and {culprits} have failed")

    def _ended_after(self, count: int) -> list[int]:
        """Return the launchers that ended when more than ``count`` ranks had failed.

        One whose own ranks have all failed before, as they may, has ended well.
        """
        one_too_many = sorted(death.at for death in self.programs.deaths if death.has_failed)[count]
        return [number for number, outcome in self.outcomes.items() if outcome.at >= one_too_many]

    def _may_end_elastic(self, failed: list[Any]) -> bool:
        """Return whether an elastic job may end with an error, of the ranks that it has lost."""
        limits = self.terms.limits
        assert limits is not None
        early = min((death.at for death in failed), default=1e9) < _MEETING_S
        few = sum(self.terms.ranks) - len(failed) < limits.least
        return early or few or (limits.restarts is not None and len(failed) > limits.restarts)

    def _check_replaced(self, codes: dict[int, int]) -> None:
        """Check that a job with a spare host has got over the loss of one, if nothing else went wrong."""
        given, limits = self.terms, self.terms.limits
        assert limits is not None
        faults = self.plan.faults
        if len(faults) != 1 or faults[0].at < _MEETING_S or not given.spares or len(self._lost()) != 1:
            return
        lost = self._lost()[0]
        if lost >= given.nodes or given.until - faults[0].at < 6 * BOUND_S:
            return
        few = sum(given.ranks) - given.ranks[lost] < limits.least
        many = limits.restarts is not None
        if few or many:
            return
        if any(codes.values()) or len(self.holders[lost]) != 2:
            self.run.fail(f"launcher {lost} was lost, {self.holders} have had places, and codes are {codes}")
