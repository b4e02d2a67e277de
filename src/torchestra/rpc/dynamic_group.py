"""A group whose workers join and leave: one worker's part in it.

What the members are is in the log (membership.py); a thread reads it. *Joining*, a worker

    1. listens at a port, and takes connections from then on;
    2. appends itself to the log, once nobody who lives has its name or rank;
    3. waits until every member before it has let it in, or is removed; then it begins to answer calls.

Members connect to it as soon as they have read of it. So when it has joined, every member knows it: those
before it have let it in, and those after it have read of it before they joined. If it is killed in 1, nothing
has happened; in 2 or 3, whoever has read of it finds that nobody listens there, and removes it. Two that join
at the same moment are in the log one after the other: the second waits for the first's members, and for it.

*Leaving* (departing.py), a worker first has all others strike it out and finish their calls to it, and then
appends that it has left. *Dead* workers are removed by whoever notices, by an event in the log: a connection
has ended, or nothing was heard for the heartbeat's time. One that was removed though it lives, as it was cut
off, reads so, and ends.

A member takes nothing from one that was removed: its key is admitted no more. The replacement has another key
and another number, and references and calls are by number; so nobody takes the one for the other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from torchestra.errors import DistError, RpcError, RpcTimeoutError, StoreTimeoutError
from torchestra.rpc.agent import Agent
from torchestra.rpc.membership import Membership, MembershipLog, WorkerJoined, WorkerLeft
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.rpc.workers import Workers
from torchestra.store.process import ProcessIdentity
from torchestra.system.deadline import Deadline
from torchestra.system.limits import start_thread
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.probing import ProbeResult, probe
from torchestra.transport.transport import Transport

_POLL_SECONDS = 0.5  # the longest wait for one event; an event ends it
_PAUSE_SECONDS = 0.002
_PROBE_PAUSE_SECONDS = 0.05
_CONNECT_SECONDS = 0.5  # members connect to a new one; after so long it tries itself
_DETECTION_SECONDS = 1.0  # in which others notice a death, mostly

_log = logging.getLogger(__name__)


class DynamicGroup:
    """One worker's part in a group whose workers join and leave.

    Args:
        log: the events.
        transport: reaches the other members.
        name: of this worker.
        heartbeat_s: after how many seconds without a sign of life a member is removed.

    Attributes:
        number: of this worker, once it is in the log; -1 before.
    """

    def __init__(self, log: MembershipLog, transport: Transport, name: str, heartbeat_s: float) -> None:
        self.number = -1
        self._log = log
        self._transport = transport
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._membership = Membership()
        self._agent: Agent | None = None
        self._reading = threading.RLock()  # guards _membership
        self._leaving = self._ended = False

    @property
    def left(self) -> dict[int, str]:
        """Return how those ended that are gone, by number."""
        return self._membership.left.copy()

    @property
    def workers(self) -> Workers:
        """Return all that have ever joined; those that are gone are struck out."""
        workers = Workers(())
        for each in self._membership.joined:
            workers.admit(WorkerInfo(each.name, each.rank))
        for number in self._membership.left:
            workers.mark_gone(number)
        return workers

    # -- joining

    def enter(self, own: WorkerJoined, deadline: Deadline, check: Callable[[WorkerJoined], None]) -> None:
        """Append this worker to the log.

        Args:
            check: called with each member; raises if this worker cannot be with it in a group.

        Raises:
            RpcError: a worker that lives has this name or rank.
        """
        conflict = None
        while True:
            self._read_new()
            holder = self._membership.holder(own.name, own.rank)
            if holder is not None:
                if conflict is None or conflict.number != holder:
                    conflict = _Conflict(holder, self._membership.joined[holder], own, self._heartbeat_s)
                if how := conflict.end_reason(deadline):
                    self._append(WorkerLeft(holder, how))
                continue
            for number, each in enumerate(self._membership.joined):
                if number not in self._membership.left:
                    check(each)
            position = self._membership.position
            if self._log.append(position, own):
                self.number = len(self._membership.joined)
                self._read_new()
                return

    def start(self, agent: Agent) -> None:
        """Let the members connect to this worker, which ``agent`` is, and read the log from now on."""
        self._agent = agent
        agent.liveness.gone.update(self.left)
        self._transport.expect({})
        for number, each in enumerate(self._membership.joined):
            self._expect(number, each, connect=number > self.number)
        for number, how in self.left.items():
            if number != self.number:  # then the others have removed this worker meanwhile
                self._transport.forget(number, how)
        thread = threading.Thread(target=self._watch, daemon=True, name=f"membership of {self._name}")
        start_thread(thread)

    def await_admitted(self, deadline: Deadline) -> None:
        """Wait until every member before this one has let it in; remove those that are gone.

        Raises:
            RpcTimeoutError: it took too long.
            RpcError: this worker was removed meanwhile.
        """
        waited = Deadline(self._heartbeat_s)
        while True:
            if self.number in self._membership.left:
                raise RpcError(
                    f"worker {self._name!r} was removed while it joined: {self._membership.left[self.number]}"
                )
            if not (missing := self._not_connected()):
                return
            passed = waited.elapsed()
            lost = self._transport.lost()
            for number in missing:
                how = lost.get(number) or (
                    f"has not let worker {self._name!r} in within {passed:.1f} s" if waited.expired() else ""
                )
                if how:
                    self._append(WorkerLeft(number, how))
            if passed > _CONNECT_SECONDS:
                self._transport.connect(missing)
            if deadline.expired():
                names = ", ".join(repr(self._membership.joined[number].name) for number in missing)
                raise RpcTimeoutError(
                    f"worker {self._name!r} could not join within {deadline.timeout_s:g} s: {names} did not"
                    " let it in"
                )
            time.sleep(_PAUSE_SECONDS)

    def _not_connected(self) -> list[int]:
        left = self._membership.left
        return [each for each in range(self.number) if each not in left and not self._transport.is_met(each)]

    # -- members that are gone

    def remove_lost(self, number: int, how: str) -> None:
        """Remove a member that this worker has lost."""
        if number not in self._membership.left and not self._ended:
            with contextlib.suppress(DistError, OSError):  # without a store nobody joins, so it need not know
                self._append(WorkerLeft(number, how))

    def leave(self) -> None:
        """Append that this worker has left, if the store is still there; read the log no more."""
        if self._ended or self.number < 0:
            return
        self._leaving = True
        try:
            if self.number not in self._membership.left:
                self._append(WorkerLeft(self.number, "has shut down"))
        except (DistError, OSError) as error:
            _log.debug("worker %r left, but could not write so: %s", self._name, error)
        self._ended = True

    # -- the log

    def _append(self, event: WorkerLeft) -> None:
        """Append that a member is gone, unless the log says so already."""
        while True:
            self._read_new()
            with self._reading:
                position = self._membership.position
                if event.number in self._membership.left:
                    return
            if self._log.append(position, event):
                self._read_new()
                return

    def _read_new(self) -> None:
        """Read all new events, and act on them."""
        while self._log.has(position := self._membership.position):
            event = self._log.read(position)
            with self._reading:
                if position != self._membership.position:
                    continue  # another thread has read it
                if event is None:
                    _log.warning("event %d of the group of worker %r is not trusted", position, self._name)
                if self._membership.apply(event) and self._agent is not None:
                    self._act(self._agent, event)

    def _act(self, agent: Agent, event: WorkerJoined | WorkerLeft | None) -> None:
        if isinstance(event, WorkerJoined):
            agent.workers.admit(WorkerInfo(event.name, event.rank))
            self._expect(len(agent.workers) - 1, event, connect=True)
        elif event is not None and event.number != self.number:
            agent.workers.mark_gone(event.number)
            self._transport.forget(event.number, event.end_reason)
        elif event is not None and not self._leaving:
            _log.warning("worker %r was removed from its group: %s", self._name, event.end_reason)
            agent.end_reason = f"was removed from its group ({event.end_reason})"
            self._ended = True
            start_thread(threading.Thread(target=agent.close, daemon=True, name=f"end of {self._name}"))

    def _expect(self, number: int, member: WorkerJoined, *, connect: bool) -> None:
        if number != self.number:
            endpoint = EndpointRecord(member.address, member.key.encode())
            with contextlib.suppress(DistError):  # this end was closed
                self._transport.expect({number: endpoint}, connect=connect)

    def _watch(self) -> None:
        """Read the log until this worker has left."""
        while not self._ended:
            try:
                self._log.await_event(self._membership.position, _POLL_SECONDS)
                self._read_new()
            except StoreTimeoutError:
                continue
            except (DistError, OSError) as error:
                if not self._ended:
                    _log.warning(
                        "worker %r will not learn of workers that join from now on: its store is gone (%s)",
                        self._name,
                        error,
                    )
                return


class _Conflict:
    """A member that has the name or the rank of a worker that joins.

    Raises:
        RpcError: from :meth:`end_reason`, when it is clear that it lives.
    """

    def __init__(self, number: int, member: WorkerJoined, own: WorkerJoined, heartbeat_s: float) -> None:
        self.number = number
        self._member, self._own = member, own
        self._detection_deadline = Deadline(_DETECTION_SECONDS)
        self._heard = Deadline(heartbeat_s)

    def end_reason(self, deadline: Deadline) -> str:
        """Return how the member ended, "" if that is not clear yet."""
        if ProcessIdentity.decode(self._member.process).is_dead():
            return "died (its process has ended)"
        found = probe(self._member.address)
        if found is ProbeResult.NOT_LISTENING:
            return "died (nobody listens at its address)"
        if found is ProbeResult.LISTENING and self._detection_deadline.expired():
            raise self._error("that worker lives")
        if self._heard.expired():
            return f"cannot be reached (for {self._heard.elapsed():.1f} s)"
        if deadline.expired():
            raise self._error(f"whether that worker lives could not be found out in {deadline.timeout_s:g} s")
        time.sleep(_PROBE_PAUSE_SECONDS)
        return ""

    def _error(self, why: str) -> RpcError:
        member, own = self._member, self._own
        what = (
            f"RPC worker name {own.name!r} is not unique: rank {member.rank} has it, which"
            if member.name == own.name
            else f"rank {own.rank} is taken by worker {member.name!r}, which"
        )
        process = ProcessIdentity.decode(member.process)
        return RpcError(f"{what} is {process}; {why}, so worker {own.name!r} cannot join in its place")
