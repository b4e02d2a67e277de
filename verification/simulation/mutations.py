"""Ways to break the product's protocols, each with a run that shows it.

Some are defects that the simulation has found, put back: the first eight, the first two of RPC, and the first
four of autograd.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch

from torchestra.autograd.contexts import Context, ContextContainer
from torchestra.autograd.graph_task import GraphTask, Key
from torchestra.autograd.send_recv import RecvRpc, SendRpc
from torchestra.engine.membership.agreement import Ballot, MembershipAgreement, State
from torchestra.engine.multihost import failure_detector, shrinking
from torchestra.engine.multihost.control_message import ControlMessage
from torchestra.engine.multihost.curve_bridge import CurveBridge
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.multihost.store_registers import StoreRegisters
from torchestra.engine.multihost.suspicion import SuspicionTimers
from torchestra.errors import WorkerFailedError
from torchestra.rpc import dynamic_group
from torchestra.rpc.dynamic_group import DynamicGroup, _Conflict
from torchestra.rpc.execution import CallExecutor
from torchestra.rpc.headers import ForkData, IncomingHeader, Reference
from torchestra.rpc.liveness import Liveness
from torchestra.rpc.rref_context import RRefContext
from torchestra.rpc.rref_state import OwnerRRef, UserRRef
from torchestra.rpc.termination import TerminationDetector
from torchestra.system.deadline import Deadline
from torchestra.transport.event_loop import EventLoop
from torchestra.transport.message import Message
from torchestra.transport.pair import PairConnection
from torchestra.transport.probing import ProbeResult
from verification.simulation import aimed, groups, joining_rpc, messages, rpc
from verification.simulation.aimed import (
    BriefWorld,
    CallsWorld,
    EnteringWorld,
    LateWorld,
    ReferencesWorld,
    SmallMessagesWorld,
)
from verification.simulation.autograd import AutogradWorld
from verification.simulation.faults import Fault
from verification.simulation.groups import GroupsWorld
from verification.simulation.growing import GrowingWorld
from verification.simulation.joining_rpc import JoiningWorld
from verification.simulation.messages import MessagesWorld
from verification.simulation.network import Quality
from verification.simulation.rpc import RpcWorld
from verification.simulation.scheduler import SimulationError
from verification.simulation.world import Plan, World

_SAME_FAULTS, _MAX_OTHER_SEEDS = 10, 40


class Mutation(NamedTuple):
    """One way to break a protocol.

    Attributes:
        owner, method, replacement: what is replaced, by what.
        world, plan: a run that has shown it; without the mutation it breaks nothing.
        says: a part of what the failure says.
    """

    owner: type | ModuleType
    method: str
    replacement: object
    world: Callable[[Plan], World]
    plan: Plan
    says: str

    def is_found(self) -> bool:
        """Return whether a run with the mutation fails as it says.

        After a change of the product, wherever, the plan may give another order of events, without a failure.
        So others are tried, until one has it: the same faults with other seeds, and then other faults.
        """
        with mock.patch.object(self.owner, self.method, self.replacement):
            return any(self._is_shown_by(plan) for plan in (self.plan, *self._others()))

    def _is_shown_by(self, plan: Plan) -> bool:
        try:
            self.world(plan).go()
        except SimulationError as failure:
            return self.says in str(failure)
        finally:
            gc.collect()
        return False

    def _others(self) -> Iterator[Plan]:
        for seed in range(_SAME_FAULTS):
            yield self.plan.with_seed(f"other {seed}")
        planners: dict[object, list[Callable[[int], Plan]]] = {
            GroupsWorld: [groups.plan, _reset_while_meeting],
            BriefWorld: [],
            GrowingWorld: [aimed.host_asleep],
            LateWorld: [aimed.two_deaths],
            EnteringWorld: [aimed.death],
            SmallMessagesWorld: [aimed.resets],
            MessagesWorld: [messages.plan, _death_while_meeting],
            RpcWorld: [rpc.plan, _late_goodbye],
            CallsWorld: [aimed.calls],
            ReferencesWorld: [aimed.lost_worker],
            AutogradWorld: [rpc.plan, _late_crash],
            JoiningWorld: [joining_rpc.plan, _death_alone],
        }
        for seed in range(_MAX_OTHER_SEEDS):
            yield from (planner(seed) for planner in planners[self.world])


def _void_as_an_outsider(self: MembershipAgreement, ballot: Ballot) -> bool:
    return True


def _watch_nobody(self: FailureDetector, hosts: Sequence[int]) -> None:
    pass


def _ping_the_dead(self: FailureDetector, host: int) -> int | None:
    there = [rank for rank in self.hosts.on(host) if rank not in self.dead | self.left]
    return next((rank for rank in there if rank not in self._unreachable), there[0] if there else None)


def _answer_nobody_while_meeting(
    self: FailureDetector, rank: int, what: ControlMessage, value: object
) -> None:
    if self.has_met:
        _say(self, rank, what, value)


def _take_any_message_for_the_next(self: CurveBridge, message: Message) -> None:
    message = message._replace(tag=self._received[self._ends[message.source]])
    _take_message(self, message)


def _accuse_nobody(self: StoreRegisters) -> set[int]:
    return set()


def _count_time_without_looks(self: SuspicionTimers, hosts: Iterable[int]) -> dict[int, float]:
    now = self._clock.elapsed()
    for host in self.heard:
        self._since[host] = self._heard_at[host] = now
    self.heard.clear()
    return {host: now - self._since.setdefault(host, now) for host in hosts}


def _take_messages_twice(self: PairConnection, sequence: int, size: int) -> bool:
    _note_received(self, sequence, size)
    return True


def _forget_what_is_not_confirmed(self: PairConnection) -> None:
    self._unconfirmed.clear()
    _break_off(self)


def _commit_what_is_not_ready(self: StoreRegisters, ballot: Ballot) -> set[int]:
    return _unacknowledged(self, ballot) if ballot.state is State.COMMITTED else set()


def _void_what_is_committed(self: StoreRegisters, ballot: Ballot, gone: Iterable[int] = ()) -> bool:
    self._store.set(f"verdict/{ballot.epoch}", b"void")
    return True


def _count_an_empty_flush(self: PairConnection, clock: float) -> None:
    _flush(self, clock)
    self.sent_at = clock


def _wait_for_one_connection_only(self: PairConnection, heartbeat: float | None) -> bool:
    return False


def _fork_to_the_lost(self: RRefContext, rref: Reference, to: int, forks: list[ForkData]) -> None:
    with mock.patch.object(self, "_lost", set()):
        _fork(self, rref, to, forks)


def _keep_nothing(self: RRefContext, rref: Reference, to: int, forks: list[ForkData]) -> None:
    _fork(self, rref, to, forks)
    self._kept.pop(forks[-1].fork_id, None)


def _leave_the_forks_of_the_lost(self: RRefContext, rank: int) -> None:
    with mock.patch.object(self, "_owners", {}):
        _remove_lost(self, rank)


def _free_what_has_forks(self: RRefContext, owned: OwnerRRef) -> None:
    if owned.created and owned.handles <= 0:
        self._owners.pop(owned.rref_id, None)


def _notice_nobody(self: Liveness) -> dict[int, str]:
    return {}


def _execute_twice(self: CallExecutor, message: Message, header: IncomingHeader | None) -> None:
    _execute(self, message, header)
    _execute(self, message, header)


def _end_with_calls_pending(self: TerminationDetector) -> None:
    pass


def _lose_what_came_too_late(self: Context, key: Key, peer: int, message: int) -> None:
    if key in self.tasks:
        _note_too_late(self, key, peer, message)


def _note_nothing(_: Context, __: int) -> None:
    """Those that were told of a pass, and not called, are not released."""


def _release_here_alone(self: ContextContainer, context_id: int) -> None:
    context = self._all.pop(context_id, None)
    if context is not None:
        context.release(context.end_note)


def _ask_nobody(self: ContextContainer, rank: int) -> None:
    with mock.patch.object(self, "tell", return_value=None):
        _remove_lost_from_contexts(self, rank)


def _take_any_loss_for_the_owners(self: RRefContext, user: UserRRef, error: Exception) -> None:
    if isinstance(error, WorkerFailedError):
        self.forget(user)
    _mark_unlisted(self, user, error)


def _answer_no_unused_message(
    self: GraphTask, recv: RecvRpc, gradients: Sequence[torch.Tensor | None] | None
) -> None:
    if gradients is not None:
        _send_gradients(self, recv, gradients)


def _start_no_peer(self: GraphTask, sends: Collection[SendRpc], received: Collection[RecvRpc]) -> list[int]:
    return []


def _await_the_gone(
    self: GraphTask, is_ready: Callable[[], bool], peers: Callable[[], Collection[int]], doing: str
) -> None:
    _await(self, is_ready, tuple, doing)


def _take_the_name_of_anybody(self: _Conflict, deadline: Deadline) -> str:
    return "had to go"


def _wait_for_no_member(self: DynamicGroup) -> list[int]:
    return []


def _take_any_for_alive(address: str) -> ProbeResult:
    return ProbeResult.LISTENING


def _forget_after_the_end(self: EventLoop, rank: int, how: str) -> None:
    with mock.patch.object(self, "closing", False):
        _forget(self, rank, how)


_take_message, _forget = CurveBridge._arrived, EventLoop.forget
_unacknowledged = StoreRegisters.unacknowledged
_say, _flush = FailureDetector._say, PairConnection.flush
_fork, _remove_lost, _execute = RRefContext.fork, RRefContext.remove_lost, CallExecutor.execute
_note_received, _break_off = PairConnection.note_received, PairConnection.break_off
_note_too_late = Context.note_too_late
_remove_lost_from_contexts, _mark_unlisted = ContextContainer.remove_lost, RRefContext.mark_unlisted
_send_gradients, _await = GraphTask._send, GraphTask._await


def _plan(hosts: Sequence[int], *faults: Fault, preemption: float = 0.0, most_turns: int = 20_000) -> Plan:
    return Plan(0, hosts, preemption, Quality(), [*faults], most_turns)


def _reset_while_meeting(seed: int) -> Plan:
    """Return a run in which the connections of a machine are reset, as a rule while the ranks meet."""
    reset = Fault(1.5 + 0.05 * seed, "reset", 0, 1, -1, 0.0)
    return Plan(seed, (0, 1, 2), 0.0, Quality(0.02, 0.02), [reset], most_turns=60_000)


def _death_while_meeting(seed: int) -> Plan:
    """Return a run in which a rank dies that some others have met, or all."""
    crash = Fault(1.05 + 0.005 * seed, "crash", 2, 0, 0, 0.0)
    return Plan(seed, range(8), 0.0, Quality(0.002, 0.01, 0.15, 0.02), [crash], most_turns=60_000)


def _late_goodbye(seed: int) -> Plan:
    """Return a run in which half of what is sent is late, as a rule some last words of a worker, too."""
    return Plan(seed, (0, 1, 2), 0.0, Quality(0.002, 0.0, 0.7, 0.5), [], most_turns=60_000)


def _late_crash(seed: int) -> Plan:
    """Return a run of three machines far from each other, so that much is under way when one crashes."""
    crash = Fault(1.0 + 0.1 * seed, "crash", 1, 0, 0, 0.0)
    return Plan(seed, (0, 1, 2), 0.01, Quality(0.05, 0.02), [crash], most_turns=40_000)


def _death_alone(seed: int) -> Plan:
    """Return a run in which the only RPC worker dies, and another process wants its name."""
    return Plan(seed, (0, 1), 0.0, Quality(), [Fault(1.5, "crash", 0, 0, 0, 0.0)], most_turns=60_000)


# In the first two, ranks shrink for the death of another before two hosts know that they are cut off.
# Without a mutation the first take up to 4,300 turns, the second up to 5,800.
_HALVES = _plan(
    (0, 0, 0, 1, 1, 1, 2),
    Fault(0.6, "cut", 0, 0, 1, 60.0),
    Fault(0.7, "crash", 6, 0, 0, 0.0),
    preemption=0.1,
    most_turns=9_000,
)
_TWO_OF_THREE = _plan(
    (0, 0, 1, 2),
    Fault(0.4, "cut", 0, 1, 2, 60.0),
    Fault(0.5, "crash", 1, 0, 0, 0.0),
    most_turns=9_000,
)
_TRIANGLE = _plan((0, 1, 2), Fault(1.0, "cut", 0, 1, 2, 60.0))
_CRASH = _plan((0, 0, 1, 1), Fault(1.0, "crash", 1, 0, 0, 0.0))


MUTATIONS: dict[str, Mutation] = {
    "void as an outsider": Mutation(
        MembershipAgreement, "_may_void", _void_as_an_outsider, BriefWorld, _HALVES, "no end after"
    ),
    "accuse nobody": Mutation(
        StoreRegisters, "accused", _accuse_nobody, BriefWorld, _TWO_OF_THREE, "no end after"
    ),
    "watch nobody": Mutation(
        FailureDetector, "watch", _watch_nobody, GroupsWorld, _TRIANGLE, "waited for its time-out"
    ),
    "ping the dead": Mutation(
        FailureDetector, "_contact", _ping_the_dead, LateWorld, aimed.two_deaths(0), "was left out"
    ),
    "enter only once": Mutation(
        shrinking, "_MOST_FAILURES", 0, EnteringWorld, aimed.death(1), "shrink() ended with"
    ),
    "answer nobody while meeting": Mutation(
        FailureDetector,
        "_say",
        _answer_nobody_while_meeting,
        MessagesWorld,
        _death_while_meeting(15),
        "which is well",
    ),
    "take any message for the next": Mutation(
        CurveBridge,
        "_arrived",
        _take_any_message_for_the_next,
        GroupsWorld,
        _reset_while_meeting(1),
        "UnicodeDecodeError",
    ),
    "count time without looks": Mutation(
        SuspicionTimers,
        "silent_seconds",
        _count_time_without_looks,
        MessagesWorld,
        messages.plan(27),
        "which is well",
    ),
    "take messages twice": Mutation(
        PairConnection,
        "note_received",
        _take_messages_twice,
        MessagesWorld,
        messages.plan(2),
        "lost messages",
    ),
    "forget what is not confirmed": Mutation(
        PairConnection,
        "break_off",
        _forget_what_is_not_confirmed,
        SmallMessagesWorld,
        aimed.resets(0),
        "timed out",
    ),
    "commit what is not ready": Mutation(
        StoreRegisters,
        "unacknowledged",
        _commit_what_is_not_ready,
        GroupsWorld,
        _CRASH,
        "ended with DistBackendError",
    ),
    "void what is committed": Mutation(
        StoreRegisters,
        "void",
        _void_what_is_committed,
        GroupsWorld,
        groups.plan(40).with_seed("other 7"),
        "split brain",
    ),
    "count an empty flush": Mutation(
        PairConnection, "flush", _count_an_empty_flush, RpcWorld, _late_goodbye(30), "which is well"
    ),
    "wait for one connection only": Mutation(
        PairConnection,
        "_may_be_heard",
        _wait_for_one_connection_only,
        RpcWorld,
        _late_goodbye(1),
        "died (its connection has ended)",
    ),
    "fork to the lost": Mutation(RRefContext, "fork", _fork_to_the_lost, RpcWorld, rpc.plan(42), "still has"),
    "keep nothing": Mutation(RRefContext, "fork", _keep_nothing, RpcWorld, _late_goodbye(8), "still has"),
    "leave the forks of the lost": Mutation(
        RRefContext,
        "remove_lost",
        _leave_the_forks_of_the_lost,
        ReferencesWorld,
        aimed.lost_worker(2),
        "still has",
    ),
    "free what has forks": Mutation(
        RRefContext, "_free", _free_what_has_forks, RpcWorld, rpc.plan(0), "was freed while"
    ),
    "end with calls pending": Mutation(
        TerminationDetector,
        "_await_own",
        _end_with_calls_pending,
        CallsWorld,
        aimed.calls(0),
        "before the call of",
    ),
    "notice nobody": Mutation(Liveness, "newly_lost", _notice_nobody, RpcWorld, rpc.plan(17), "still has"),
    "execute twice": Mutation(
        CallExecutor, "execute", _execute_twice, RpcWorld, rpc.plan(0), "is executed twice"
    ),
    "lose what came too late": Mutation(
        Context, "note_too_late", _lose_what_came_too_late, AutogradWorld, rpc.plan(23), "timed out"
    ),
    "ask nobody": Mutation(
        ContextContainer, "remove_lost", _ask_nobody, AutogradWorld, _late_crash(27), "still has"
    ),
    "take any loss for the owner's": Mutation(
        RRefContext,
        "mark_unlisted",
        _take_any_loss_for_the_owners,
        AutogradWorld,
        _late_crash(20),
        "still has",
    ),
    "release those called alone": Mutation(
        Context, "note_start", _note_nothing, AutogradWorld, rpc.plan(20003), "still has"
    ),
    "release here alone": Mutation(
        ContextContainer, "release", _release_here_alone, AutogradWorld, rpc.plan(0), "still has"
    ),
    "answer no unused message": Mutation(
        GraphTask, "_send", _answer_no_unused_message, AutogradWorld, rpc.plan(0), "timed out"
    ),
    "start no peer": Mutation(
        GraphTask, "_peers_to_start", _start_no_peer, AutogradWorld, rpc.plan(0), "timed out"
    ),
    "await the gone": Mutation(
        GraphTask, "_await", _await_the_gone, AutogradWorld, rpc.plan(42), "timed out"
    ),
    "take the name of anybody": Mutation(
        _Conflict, "end_reason", _take_the_name_of_anybody, JoiningWorld, joining_rpc.plan(0), "which is well"
    ),
    "wait for no member": Mutation(
        DynamicGroup,
        "_not_connected",
        _wait_for_no_member,
        JoiningWorld,
        joining_rpc.plan(2),
        "does not know",
    ),
    "take any for alive": Mutation(
        dynamic_group, "probe", _take_any_for_alive, JoiningWorld, _death_alone(0), "nobody has its name"
    ),
    "never left behind": Mutation(
        failure_detector,
        "left_behind",
        lambda *_: "",
        GrowingWorld,
        aimed.host_asleep(0),
        "which is well",
    ),
    "forget after the end": Mutation(
        EventLoop, "forget", _forget_after_the_end, JoiningWorld, joining_rpc.plan(408), "KeyError"
    ),
}
