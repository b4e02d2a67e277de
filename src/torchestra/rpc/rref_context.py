"""Reference counting of remote references: which values a worker keeps for others, and until when.

The *owner* of a reference has its value, in an :class:`OwnerRRef`. Every :class:`~torchestra.rpc.RRef`
on another worker is a *user* and has a *fork*: a number that no other has. An owner lists the forks of a
value, and by which worker each is held. (Both are in rref_state.py; their form in messages is in headers.py.)

The invariant: **a value is freed only when no user is left and none is on its way.** It rests on two rules.

1. A user is *confirmed* when it knows that the owner lists its fork. It asks the owner to remove the fork
   only when it has been dropped and is confirmed. So the owner hears of every fork before it hears of its
   end.
2. A worker that passes a reference on keeps it until the receiver says that the owner lists the new fork
   (*acceptance*). So, at any moment, the owner lists the fork of a user or of one it came from.

How forks come to be::

    remote(to, f)       the call brings the creator's fork; the owner lists it before anything else that the
                        message says is done. Its answer confirms it.
    the owner passes    it lists the fork before it sends it, so the fork is born confirmed.
    a user passes to    the new user asks the owner to list its fork; the answer confirms it, and then the
    a third worker      new user accepts. Until then the passing user is kept.
    a user passes to    the owner has it back: a reference there counts as one of the owner's own, and the
    the owner           owner accepts at once.

All of these are calls, and none relies on any two of them arriving in order. A request that comes before the
call that creates the value finds an OwnerRRef without a value, which that call will fill.

*Lost workers.* When a worker is gone, its forks are removed everywhere, what was kept for its acceptance is
dropped, and values that it was to create, and others wait for, fail. If all that was left of a reference was
a fork on its way from a worker that died, the value is freed; whoever still got the fork is told so.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.futures import Future

from torchestra.errors import CallLostError, RemoteReferenceError, WorkerFailedError
from torchestra.rpc.functions import async_execution
from torchestra.rpc.headers import ForkData, IncomingHeader, Reference
from torchestra.rpc.leader_followers import LeaderFollowersPool
from torchestra.rpc.package_functions import takes_agent
from torchestra.rpc.rref_state import GlobalId, OwnerRRef, UserRRef
from torchestra.rpc.workers import Workers
from torchestra.system.kept_errors import fresh, without_frames


class Losses(Protocol):
    """The workers that are gone, see :class:`~torchestra.rpc.liveness.Liveness`."""

    gone: dict[int, str]


class Worker(Protocol):
    """What the references of a worker ask of it; an :class:`~torchestra.rpc.agent.Agent`."""

    number: int
    workers: Workers
    closed: bool
    pool: LeaderFollowersPool
    rrefs: RRefContext

    @property
    def liveness(self) -> Losses: ...

    def call(
        self, to: int, function: Any, args: tuple[Any, ...] = (), *, timeout: float = -1.0
    ) -> Future[Any]:
        """Have a worker call a function; return a future of the result."""


class RRefContext:
    """All references of one worker, owned and used."""

    def __init__(self, agent: Worker, rref_class: type[Reference]) -> None:
        self.rref_class = rref_class
        self._agent = agent
        self._rank = agent.number
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._owners: dict[GlobalId, OwnerRRef] = {}
        self._users: dict[GlobalId, UserRRef] = {}  # by fork, until it is removed
        self._kept: dict[GlobalId, tuple[Reference, int]] = {}  # by the fork to be accepted, and by whom
        self._freed_by_loss: set[GlobalId] = set()
        self._lost: set[int] = set()
        self.dropped: deque[UserRRef | OwnerRRef] = deque()
        self._closed = False
        self._to_tell: dict[object, None] = {}  # what there is to tell other workers that is no call yet

    @property
    def is_telling(self) -> bool:
        """Return whether other workers are still to be told something, besides what pending calls tell."""
        return bool(self._to_tell)

    def new_id(self) -> GlobalId:
        """Return a number that no reference or fork has."""
        return (self._rank, next(self._numbers))

    # -- references of this worker

    def own(self, value: Any) -> OwnerRRef:
        """Return a new value of this worker, with one handle."""
        owned = self.own_later()
        owned.created = True
        owned.set(value)
        return owned

    def own_later(self) -> OwnerRRef:
        """Return a reference of this worker, with one handle, whose value will come."""
        with self._lock:
            owned = self._owner_rref(self.new_id())
            owned.handles = 1
        return owned

    def use(self, user: UserRRef) -> UserRRef:
        """Enter a user."""
        self._users[user.fork_id] = user
        return user

    def drop(self, state: UserRRef | OwnerRRef) -> None:
        """Note that a reference on this worker is gone.

        May be called at any moment, by the garbage collector, on a thread that holds any lock: so all else is
        left to :meth:`clear_dropped`, which the next call, or a thread of the pool within 50 ms, calls.
        """
        self.dropped.append(state)

    def clear_dropped(self) -> None:
        """Do what :meth:`drop` has left."""
        while self.dropped:
            released: list[UserRRef] = []
            key = id(released)
            try:
                self._to_tell[key] = None
                with self._lock:
                    while self.dropped:
                        state = self.dropped.popleft()
                        if isinstance(state, OwnerRRef):
                            state.handles -= 1
                            self._free(state)
                        else:
                            state.dropped = True
                            released.append(state)
                for user in released:
                    self._release(user)
            finally:
                del self._to_tell[key]

    def _release(self, user: UserRRef) -> None:
        """Have the fork of a dropped user removed, if that may be done by now."""
        with self._lock:
            if not (user.dropped and user.confirmed) or user.released or self._closed:
                return
            user.released = True
        self._users.pop(user.fork_id, None)
        self._tell(user.owner, _remove_fork, user.rref_id, user.fork_id)

    def confirm(self, user: UserRRef) -> None:
        """Note that the owner lists its fork."""
        user.confirmed = True
        self._release(user)

    def forget(self, user: UserRRef) -> None:
        """Forget a user that no other worker was told of."""
        self._users.pop(user.fork_id, None)
        user.released = True

    def mark_unlisted(self, user: UserRRef, error: Exception) -> None:
        """Note that the owner will never list its fork."""
        user.error = without_frames(error)
        # A function may raise of a third worker what is raised here where the owner is gone.
        if user.owner in self._agent.liveness.gone or isinstance(error, CallLostError):
            self._users.pop(user.fork_id, None)
        else:
            self.confirm(user)

    def _free(self, owned: OwnerRRef) -> None:
        if owned.created and not owned.forks and owned.handles <= 0:
            self._owners.pop(owned.rref_id, None)

    def _owner_rref(self, rref_id: GlobalId) -> OwnerRRef:
        with self._lock:
            owned = self._owners.get(rref_id)
            if owned is None:
                owned = self._owners[rref_id] = OwnerRRef(rref_id)
                if rref_id in self._freed_by_loss:
                    owned.fail(self._freed())
                    owned.created = True
                elif rref_id[0] in self._lost:  # whose messages have all been received
                    owned.fail(self._never_created(rref_id[0]))
                    owned.created = True
            return owned

    def _never_created(self, rank: int) -> WorkerFailedError:
        name = self._agent.workers[rank].name
        return WorkerFailedError(
            f"worker {name!r}, which was to create the value of this reference, is gone", name
        )

    @staticmethod
    def _freed() -> RemoteReferenceError:
        return RemoteReferenceError(
            "the owner has freed this reference: the worker that passed it on died before the owner knew"
        )

    def _tell(self, rank: int, function: Callable[..., Any], *args: Any) -> Future[Any] | None:
        agent = self._agent
        if self._closed or agent.closed:
            return None
        return agent.call(rank, function, args, timeout=0)

    # -- messages

    def fork(self, rref: Reference, to: int, forks: list[ForkData]) -> None:
        """Make a fork for a worker that a reference is passed to, and add it to those of its message.

        It is made and added, or neither: nothing is called between the assignments, so no interrupt comes.
        """
        state = rref._state
        if state.error is not None:
            raise fresh(state.error)
        fork_id = self.new_id()
        if isinstance(state, OwnerRRef):
            fork = ForkData(state.rref_id, self._rank, fork_id, True)
            with self._lock:
                if to not in self._lost:  # or nobody would ever remove it
                    state.forks[fork_id] = to
                forks += (fork,)
            return
        rref._check_not_deleted("fork an UserRRef")
        fork = ForkData(state.rref_id, state.owner, fork_id, False)
        with self._lock:
            if to not in self._lost:
                self._kept[fork_id] = (rref, to)
            forks += (fork,)

    def withdraw_fork(self, fork: ForkData) -> None:
        """Undo :meth:`fork`, for a message that is not sent."""
        with self._lock:
            if fork.listed:
                self.remove_fork(fork.rref_id, fork.fork_id)
            self._kept.pop(fork.fork_id, None)

    def receive_header(self, source: int, content: tuple[Any, ...], header: IncomingHeader) -> None:
        """Enter what a message tells of references: as the leader, in the order of messages; send nothing.

        After an interrupt this is called again with the same header, and goes on.
        """
        creation, forks, header.mark = content
        data = [ForkData(*each) for each in forks]
        with self._lock:
            if creation is not None:
                header.owned = owned = self._owner_rref(creation[0])
                owned.created = True
                if creation[1] is not None:
                    owned.forks[creation[1]] = source
            for number, fork in enumerate(data):
                if number not in header.rrefs:
                    self._receive(fork, header, number)
                if fork.listed and fork.owner == self._rank:
                    self._owner_rref(fork.rref_id).forks.pop(fork.fork_id, None)
        for number, fork in enumerate(data):
            state = header.rrefs[number]._state
            if fork.listed:
                continue
            if isinstance(state, UserRRef):
                self._later(fork.fork_id, partial(self._ask_to_list, state, source))
            else:
                self._later(fork.fork_id, partial(self._tell, source, _accept, fork.fork_id))

    def _receive(self, fork: ForkData, header: IncomingHeader, number: int) -> None:
        """Enter a reference. The assignments are all done or none: nothing is called between them."""
        rref = self.rref_class._of(self._agent, None)
        if fork.owner == self._rank:
            owned = self._owner_rref(fork.rref_id)
            owned.handles += 1
            rref._state = owned
        else:
            user = UserRRef(fork.rref_id, fork.fork_id, fork.owner, fork.listed)
            self._users[fork.fork_id] = user
            rref._state = user
            if not fork.listed:
                user.incoming = header
                header.unconfirmed += 1
        header.rrefs[number] = rref

    def _later(self, key: object, tell: Callable[[], Any]) -> None:
        """Have a thread of the pool tell another worker something; maybe twice, after an interrupt."""

        def job() -> None:
            try:
                tell()
            finally:
                self._to_tell.pop(key, None)

        self._to_tell[key] = None
        self._agent.pool.submit(job)

    def _ask_to_list(self, user: UserRRef, parent: int) -> None:
        if user.is_asked:
            return
        user.is_asked = True

        def answered(future: Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:
                self.mark_unlisted(user, error)
            else:
                self.confirm(user)
            self._tell(parent, _accept, user.fork_id)
            header, user.incoming = user.incoming, None
            if header is not None:
                header.confirmed_one()

        future = self._tell(user.owner, _list, user.rref_id, user.fork_id, self._rank)
        if future is not None:
            future.add_done_callback(answered)

    # -- what other workers ask for

    def list_fork(self, rref_id: GlobalId, fork_id: GlobalId, holder: int) -> None:
        with self._lock:
            if rref_id in self._freed_by_loss:
                raise self._freed()
            self._owner_rref(rref_id).forks[fork_id] = holder

    def remove_fork(self, rref_id: GlobalId, fork_id: GlobalId) -> None:
        with self._lock:
            owned = self._owners.get(rref_id)
            if owned is not None and owned.forks.pop(fork_id, None) is not None:
                self._free(owned)

    def accept(self, fork_id: GlobalId) -> None:
        """Keep no longer what was passed on with this fork."""
        with self._lock:
            self._kept.pop(fork_id, None)

    def value(self, rref_id: GlobalId) -> Future[Any]:
        """Return the value of a reference that this worker owns."""
        return self._owner_rref(rref_id).future

    # -- ends

    def remove_lost(self, rank: int) -> None:
        """Clean up after a worker that is gone."""
        never_created: list[OwnerRRef] = []
        with self._lock:
            self._lost.add(rank)
            kept = [self._kept.pop(fork) for fork, (_, to) in self._kept.copy().items() if to == rank]
            for owned in tuple(self._owners.values()):
                removed = [fork for fork, holder in owned.forks.items() if holder == rank]
                for fork in removed:
                    del owned.forks[fork]
                if not owned.created and owned.rref_id[0] == rank:
                    owned.created = True
                    never_created.append(owned)
                self._free(owned)
                if removed and owned.rref_id not in self._owners:
                    self._freed_by_loss.add(owned.rref_id)
            for user in tuple(self._users.values()):
                if user.owner == rank:
                    del self._users[user.fork_id]
                    user.confirmed, user.released = True, True
        del kept
        for owned in never_created:  # without the lock, because this calls whoever waits for the value
            owned.fail(self._never_created(rank))

    def delete_users(self) -> list[str]:
        """Drop all users of this worker, even those in use; return the numbers and owners of those."""
        self.clear_dropped()
        left = [user for user in tuple(self._users.values()) if not user.dropped]
        for user in left:
            user.dropped = True
            self._release(user)
        return [f"{user.rref_id} of worker {self._agent.workers.known(user.owner).name!r}" for user in left]

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._owners.clear()
            self._users.clear()
            self._kept.clear()
            self.dropped.clear()

    def alive(self) -> tuple[int, int]:
        """Return how many values this worker keeps, and how many references it has to values of others."""
        return len(self._owners), len(self._users)

    def counts(self) -> dict[str, int]:
        """Return how many references there are, by the names of torch.distributed.rpc.

        There an owned value counts while others refer to it or wait for it; ``num_values`` counts all.
        """
        self.clear_dropped()
        with self._lock:
            return {
                "num_values": len(self._owners),
                "num_owner_rrefs": sum(
                    bool(owned.forks) or not owned.future.done() for owned in self._owners.values()
                ),
                "num_pending_futures": sum(not owned.future.done() for owned in self._owners.values()),
                "num_pending_users": sum(not user.confirmed for user in self._users.values()),
                "num_forks": sum(len(owned.forks) for owned in self._owners.values()),
                "num_users": len(self._users),
                "num_kept": len(self._kept),
            }


# Functions that workers call on each other.


@takes_agent
def _list(agent: Worker, rref_id: GlobalId, fork_id: GlobalId, holder: int) -> None:
    agent.rrefs.list_fork(rref_id, fork_id, holder)


@takes_agent
def _remove_fork(agent: Worker, rref_id: GlobalId, fork_id: GlobalId) -> None:
    agent.rrefs.remove_fork(rref_id, fork_id)


@takes_agent
def _accept(agent: Worker, fork_id: GlobalId) -> None:
    agent.rrefs.accept(fork_id)


@async_execution
@takes_agent
def fetch(agent: Worker, rref_id: GlobalId) -> Future[Any]:
    """Return the value of a reference of the worker called."""
    return agent.rrefs.value(rref_id)
