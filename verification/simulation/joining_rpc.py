"""Simulate RPC workers that join and leave: `init_rpc` without `world_size`, calls, `shutdown()`.

The first workers have names of their own; each of the others comes later, and wants the name and rank of one
of them. Checked is what rpc.py names of calls, and besides:

* of the workers that have one name at most one is a member, and a name whose worker is well is refused;
* who wants the name of a worker that is gone gets it, if nothing else lasts long;
* when `init_rpc` returns, all that were workers before, and still are, know the new one;
* a worker that was removed, though it lives, is told so when it asks who is there;
* every wait ends.
"""

from __future__ import annotations

import random

from torchestra import rpc
from torchestra.errors import DistError, RpcError, WorkerFailedError
from torchestra.rpc.current import current_agent
from torchestra.store import PrefixStore, TCPStore
from torchestra.world.registry import thread_rank
from verification.simulation.faults import drawn
from verification.simulation.rpc import BOUND_S, RpcWorld, execute
from verification.simulation.sockets import Machine
from verification.simulation.world import PORT, Plan, draw_quality

_FAULTS_S, _LATEST_S, _TIMEOUT_S = 4.0, 6.0, 30.0
_NOTICED_S = 2.5  # after which a worker that has died does not seem to live
_SHAPES = ((0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 1), (0, 0, 0, 0))


def plan(seed: int) -> Plan:
    """Draw a run."""
    choices = random.Random(f"{seed} plan")
    hosts = choices.choice(_SHAPES)
    faults = drawn(choices, hosts, max(hosts) + 1, BOUND_S, _FAULTS_S)
    return Plan(seed, hosts, choices.choice((0.0, 0.01)), draw_quality(choices), faults)


class JoiningWorld(RpcWorld):
    """The workers of one run; the second half come later. Outcomes are also ``"refused"``.

    Attributes:
        members: by name, the ranks of this simulation that have joined and have not begun to leave.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._names = (len(plan.hosts) + 1) // 2
        self.members: dict[str, list[int]] = {}
        self._begun: set[int] = set()  # to join
        Machine.listens_at_once = True

    def name_of(self, rank: int) -> str:
        """Return the name that a process has or wants."""
        return f"worker-{rank % self._names}"

    def program(self, rank: int) -> str:
        """Join, call who is there, and leave."""
        choices = random.Random(f"{self.plan.seed} program {rank}")
        self.time.sleep(choices.uniform(0.0, 1.0 if rank < self._names else _LATEST_S))
        store = TCPStore(self.network.address(self.server_machine), PORT, timeout=_TIMEOUT_S)
        with thread_rank(rank, len(self.ranks), store, f"machine-{self.plan.hosts[rank]}"):
            outcome = self._join(rank, store)
            if not outcome:
                self._call(rank, choices)
                outcome = self._leave(rank)
        return outcome

    def _join(self, rank: int, store: TCPStore) -> str:
        """Join; return "" or how that has ended."""
        name = self.name_of(rank)
        self._begun.add(rank)
        before = {each for ranks in self.members.values() for each in ranks}
        options = rpc.RpcBackendOptions(
            rpc_timeout=_TIMEOUT_S,
            heartbeat_timeout=BOUND_S,
            num_worker_threads=2,
            store=PrefixStore("dynamic", store),
        )
        try:
            rpc.init_rpc(name, rank=rank % self._names, rpc_backend_options=options)
        except DistError as error:
            self.run.note(f"rank {rank} did not join: {type(error).__name__}: {str(error).splitlines()[0]}")
            if "that worker lives" in str(error):
                if not any(self._may_seem_to_live(each) for each in self._rivals(rank)):
                    self.run.fail(f"rank {rank} was refused, and nobody has its name: {error}")
                return "refused"
            if not self.is_harmed():
                self.run.fail(f"rank {rank} could not join: {error}")
            return "failed"
        self._see_that_it_is_known(rank, name, before)
        return ""

    def _see_that_it_is_known(self, rank: int, name: str, before: set[int]) -> None:
        self.agents[rank] = current_agent()
        self.run.note(f"rank {rank} has joined as {name}")
        mates = self.members.setdefault(name, [])
        for each in mates:
            if not self.is_guilty(each) and not self.disturbed(rank, 0.5 * BOUND_S):
                self.run.fail(f"rank {rank} has the name of rank {each}, which is well")
        mates.append(rank)
        number = self.agents[rank].number
        for each in sorted(before & {one for ranks in self.members.values() for one in ranks} - {rank}):
            if not self.is_guilty(each) and number >= len(self.agents[each].workers):
                self.run.fail(f"rank {rank} has joined, and rank {each} does not know it")

    def _call(self, rank: int, choices: random.Random) -> None:
        """Call workers that are there."""
        for _ in range(choices.randint(2, 12)):
            try:
                there = rpc.get_worker_infos()
            except RpcError:
                return  # it was removed
            if self.agents[rank].closed:
                self.run.fail(f"rank {rank} was removed, and is told that {there} are there")
            to = choices.choice(sorted(info.name for info in there))
            token = self.new_call(rank, -1, f"execute on {to}")
            try:
                rpc.rpc_sync(to, execute, (token, choices.choice((0.0, 0.05))), timeout=_TIMEOUT_S)
            except RpcError as error:
                self._judge_call(token, to, error)
            else:
                if self.calls[token].executed != 1:
                    self.run.fail(f"{self.calls[token]} was executed {self.calls[token].executed} times")
            finally:
                self.calls[token].ended += 1
            self.time.sleep(choices.choice((0.0, 0.05, 0.5)))

    def _judge_call(self, token: int, to: str, error: RpcError) -> None:
        """Check that a call may end so: its worker is gone, or has been."""
        call = self.calls[token]
        self.run.note(f"{call} ended: {type(error).__name__}: {str(error).splitlines()[0]}")
        gone = [each for each in range(len(self.ranks)) if self.name_of(each) == to and self.is_guilty(each)]
        left = gone or to not in self.members or self.is_guilty(call.by)
        if not left or (isinstance(error, WorkerFailedError) and error.worker not in (to, "")):
            self.run.fail(f"{call} of {to}, which is well, ended with {type(error).__name__}: {error}")

    def begin(self, token: int) -> None:
        """Note that a call is executed."""
        self.calls[token].executed += 1
        if self.calls[token].executed > 1:
            self.run.fail(f"{self.calls[token]} is executed twice")

    def is_guilty(self, rank: int) -> bool:
        """Return whether a rank is gone, leaves, or may have seemed to be gone."""
        return super().is_guilty(rank) or rank in self.ending

    def _leave(self, rank: int) -> str:
        self.ending.add(rank)
        self.members[self.name_of(rank)].remove(rank)
        try:
            rpc.shutdown(timeout=_TIMEOUT_S)
        except (RpcError, RuntimeWarning) as error:
            self.run.note(f"rank {rank}: shutdown(): {type(error).__name__}: {str(error).splitlines()[0]}")
            if not self.is_harmed():
                self.run.fail(f"shutdown() of rank {rank} ended with {type(error).__name__}: {error}")
        return "done"

    def go(self) -> None:
        """Run the world; each call ends."""
        super(RpcWorld, self).go()
        for call in self.calls:
            if call.ended != 1 and not self.ranks[call.by].has_crashed:
                self.run.fail(f"{call} has ended {call.ended} times")
        self.run.raise_failure()

    def _rivals(self, rank: int) -> list[int]:
        """Return the others that have the name of a rank, or want it."""
        mates = range(rank % self._names, len(self.ranks), self._names)
        return [each for each in mates if each != rank]

    def _may_seem_to_live(self, rank: int) -> bool:
        """Return whether a rank was a worker a moment ago, or joined."""
        if rank not in self._begun or not self.ranks[rank].has_crashed:
            return rank in self._begun
        host = self.plan.hosts[rank]
        ends = (
            fault.at
            for fault in self.plan.faults
            if (fault.kind, fault.rank) == ("crash", rank) or (fault.kind, fault.host) == ("power", host)
        )
        return self.run.now - min(ends, default=self.run.now) < _NOTICED_S
