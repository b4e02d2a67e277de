"""Which values are referred to from other workers, and until when they must be kept.

The *owner* of a reference has its value, in an :class:`Entry`. Every :class:`~torchestra.rpc.RRef` elsewhere
is a *user* and has a *fork*: a number that no other has. An entry lists its forks, and by which worker each
is held. (Both are in rref_state.py; what messages say of them is in headers.py.)

The invariant: **a value is freed only when no user is left and none is on its way.** It rests on two rules.

1. A user is *confirmed* when it knows that the owner lists its fork. It asks the owner to strike the fork out
   only when it has been dropped and is confirmed. So the owner hears of every fork before it hears of its
   end.
2. Whoever passes a reference on keeps it until whoever gets it says that the owner lists the new fork
   (*acceptance*). So, at any moment, the owner lists the fork of a user or of one it came from.

How forks come to be::

    remote(to, f)       the call brings the creator's fork; the owner lists it before anything else that the
                        message says is done. Its answer confirms it.
    the owner passes    it lists the fork before it sends it, so the fork is born confirmed.
    a user passes to    the new user asks the owner to list its fork; the answer confirms it, and then the
    a third worker      new user accepts. Until then the passing user is kept.
    a user passes to    the owner has it back: a reference there counts as one of the entry's own, and the
    owner the owner           accepts at once.

All of these are calls, and none relies on any two of them arriving in order. A request that comes before the
call that creates the entry finds an entry without a value, which that call will fill.

*Lost workers.* When a worker is gone, its forks are struck out everywhere, what was kept for its acceptance
is dropped, and values that it was to create, and others wait for, fail. If all that was left of a reference
was a fork on its way from a worker that died, the value is freed; who still got the fork is told so.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.futures import Future

from torchestra.errors import CallLostError, RemoteReferenceError, WorkerFailedError
from torchestra.rpc.current import takes_agent
from torchestra.rpc.functions import async_execution
from torchestra.rpc.headers import Envelope, Inbound, Outbound, Passed
from torchestra.rpc.rref_state import Entry, Number, User

if TYPE_CHECKING:
    from torchestra.autograd.send_recv import Sending
    from torchestra.rpc.agent import Agent
    from torchestra.rpc.rref import RRef


class References:
    """All references of one worker, owned and used."""

    def __init__(self, agent: Agent) -> None:
        from torchestra.rpc.rref import RRef

        self.rref_class: type[RRef] = RRef
        self._agent = agent
        self._rank = agent.rank
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._entries: dict[Number, Entry] = {}
        self._users: dict[Number, User] = {}  # by fork, until it is struck out
        self._kept: dict[Number, tuple[RRef, int]] = {}  # by the fork that is to be accepted, and by whom
        self._freed_by_loss: set[Number] = set()
        self.dropped: deque[User | Entry] = deque()
        self._closed = False
        self._telling = 0  # how much there is to tell other workers that is no pending call yet

    @property
    def is_telling(self) -> bool:
        """Whether other workers are still to be told something, beside what pending calls tell them."""
        return self._telling > 0

    def _expect_telling(self, change: int) -> None:
        with self._lock:
            self._telling += change

    def new_number(self) -> Number:
        """A number that no reference or fork has."""
        return (self._rank, next(self._numbers))

    # -- references of this worker

    def own(self, value: Any) -> Entry:
        """A new value of this worker, with one handle."""
        entry = Entry(self.new_number())
        entry.created = True
        entry.handles = 1
        entry.set(value)
        self._entries[entry.number] = entry
        return entry

    def entry_to_fill(self) -> Entry:
        """An entry of this worker, with one handle, whose value will come."""
        with self._lock:
            entry = self._entry(self.new_number())
            entry.handles = 1
        return entry

    def use(self, user: User) -> User:
        """Enter a user."""
        self._users[user.fork] = user
        return user

    def drop(self, held: User | Entry) -> None:
        """A reference on this worker is gone.

        May be called at any moment, by the garbage collector, on a thread that holds any lock: so all else is
        left to :meth:`clear_dropped`, which the next call, or a thread of the crew within 50 ms, calls.
        """
        self.dropped.append(held)

    def clear_dropped(self) -> None:
        """Do what :meth:`drop` has left."""
        while self.dropped:
            released: list[User] = []
            self._expect_telling(1)
            try:
                with self._lock:
                    while self.dropped:
                        held = self.dropped.popleft()
                        if isinstance(held, Entry):
                            held.handles -= 1
                            self._free(held)
                        else:
                            held.dropped = True
                            released.append(held)
                for user in released:
                    self._release(user)
            finally:
                self._expect_telling(-1)

    def _release(self, user: User) -> None:
        """Have the fork of a dropped user struck out, if that may be done by now."""
        with self._lock:
            if not (user.dropped and user.confirmed) or user.released or self._closed:
                return
            user.released = True
        self._users.pop(user.fork, None)
        self._tell(user.owner, _strike_out, user.reference, user.fork)

    def confirm(self, user: User) -> None:
        """The owner lists its fork."""
        user.confirmed = True
        self._release(user)

    def forget(self, user: User) -> None:
        """It was never told of."""
        self._users.pop(user.fork, None)
        user.released = True

    def disown(self, user: User, error: Exception) -> None:
        """The owner will never list its fork."""
        user.error = error
        if isinstance(error, (WorkerFailedError, CallLostError)):
            self._users.pop(user.fork, None)
        else:
            self.confirm(user)

    def _free(self, entry: Entry) -> None:
        if entry.created and not entry.forks and entry.handles <= 0:
            self._entries.pop(entry.number, None)

    def _entry(self, number: Number) -> Entry:
        with self._lock:
            entry = self._entries.get(number)
            if entry is None:
                entry = self._entries[number] = Entry(number)
                if number in self._freed_by_loss:
                    entry.fail(self._freed())
                    entry.created = True
            return entry

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

    def outbound(
        self,
        to: int,
        creates: tuple[Number, Number | None] | None = None,
        sending: Sending | None = None,
    ) -> Outbound:
        """For the references in a message to a worker."""
        return Outbound(self, to, creates, sending)

    def fork(self, rref: RRef, to: int) -> Passed:
        """Make a fork for a worker that a reference is passed to."""
        held = rref._held
        if held is None:
            raise RemoteReferenceError("an RRef that was deleted at shutdown cannot be passed on")
        if held.error is not None:
            raise held.error
        fork = self.new_number()
        if isinstance(held, Entry):
            with self._lock:
                held.forks[fork] = to
            return Passed(held.number, self._rank, fork, True)
        rref._check_not_deleted("fork an UserRRef")
        with self._lock:
            self._kept[fork] = (rref, to)
        return Passed(held.reference, held.owner, fork, False)

    def take_back(self, passed: Passed) -> None:
        """A fork was made for a message that is not sent."""
        with self._lock:
            if passed.listed:
                self._strike_out(passed.reference, passed.fork)
            self._kept.pop(passed.fork, None)

    def inbound(self, source: int, envelope: tuple[Any, ...] | None) -> Inbound | None:
        """Enter what a message tells of references. In the order of messages, with the lead: it sends
        nothing."""
        if envelope is None:
            return None
        creates, passed, context, attached = envelope
        entry = None
        with self._lock:
            if creates is not None:
                entry = self._entry(creates[0])
                entry.created = True
                if creates[1] is not None:
                    entry.forks[creates[1]] = source
            unconfirmed: list[User] = []
            rrefs = [self._receive(source, Passed(*each), unconfirmed) for each in passed]
        inbound = Inbound(Envelope(creates, passed, context, attached), entry, rrefs, unconfirmed)
        for user in unconfirmed:
            self._later(partial(self._ask_to_list, user, source))
        return inbound

    def _receive(self, source: int, passed: Passed, unconfirmed: list[User]) -> RRef:
        if passed.owner == self._rank:
            entry = self._entry(passed.reference)
            entry.handles += 1
            if passed.listed:
                entry.forks.pop(passed.fork, None)
            else:
                self._later(lambda: self._tell(source, _accept, passed.fork))
            return self.rref_class._of(self._agent, entry)
        user = self.use(User(passed.reference, passed.fork, passed.owner, passed.listed))
        if not passed.listed:
            unconfirmed.append(user)
        return self.rref_class._of(self._agent, user)

    def _later(self, tell: Callable[[], Any]) -> None:
        """Have a thread of the crew tell another worker something."""

        def job() -> None:
            try:
                tell()
            finally:
                self._expect_telling(-1)

        self._expect_telling(1)
        self._agent.crew.give(job)

    def _ask_to_list(self, user: User, parent: int) -> None:
        def answered(future: Future[Any]) -> None:
            try:
                future.value()
            except Exception as error:
                self.disown(user, error)
            else:
                self.confirm(user)
            self._tell(parent, _accept, user.fork)
            inbound, user.inbound = user.inbound, None
            if inbound is not None:
                inbound.confirmed_one()

        future = self._tell(user.owner, _list, user.reference, user.fork, self._rank)
        if future is not None:
            future.add_done_callback(answered)

    # -- what other workers ask for

    def enlist(self, reference: Number, fork: Number, holder: int) -> None:
        """List a fork."""
        with self._lock:
            if reference in self._freed_by_loss:
                raise self._freed()
            self._entry(reference).forks[fork] = holder

    def strike_out(self, reference: Number, fork: Number) -> None:
        """Strike a fork out."""
        with self._lock:
            self._strike_out(reference, fork)

    def _strike_out(self, reference: Number, fork: Number) -> None:
        entry = self._entries.get(reference)
        if entry is not None and entry.forks.pop(fork, None) is not None:
            self._free(entry)

    def accept(self, fork: Number) -> None:
        """Keep no longer what was passed on with this fork."""
        with self._lock:
            self._kept.pop(fork, None)

    def value(self, reference: Number) -> Future[Any]:
        """The value of a reference that this worker owns."""
        return self._entry(reference).future

    # -- ends

    def lost(self, rank: int) -> None:
        """A worker is gone."""
        never_created: list[Entry] = []
        with self._lock:
            kept = [self._kept.pop(fork) for fork, (_, to) in self._kept.copy().items() if to == rank]
            for entry in tuple(self._entries.values()):
                struck = [fork for fork, holder in entry.forks.items() if holder == rank]
                for fork in struck:
                    del entry.forks[fork]
                if not entry.created and entry.number[0] == rank:
                    entry.created = True
                    never_created.append(entry)
                self._free(entry)
                if struck and entry.number not in self._entries:
                    self._freed_by_loss.add(entry.number)
            for user in tuple(self._users.values()):
                if user.owner == rank:
                    del self._users[user.fork]
                    user.confirmed, user.released = True, True
        del kept
        name = self._agent.workers[rank].name
        for entry in never_created:  # without the lock, because this calls whoever waits for the value
            entry.fail(
                WorkerFailedError(
                    f"worker {name!r}, which was to create the value of this reference, is gone", name
                )
            )

    def delete_users(self) -> list[str]:
        """Drop all users of this worker, whether or not somebody refers to them; which those were."""
        self.clear_dropped()
        left = [user for user in tuple(self._users.values()) if not user.dropped]
        for user in left:
            user.dropped = True
            self._release(user)
        return [f"{user.reference} of worker {self._agent.workers[user.owner].name!r}" for user in left]

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._users.clear()
            self._kept.clear()
            self.dropped.clear()

    def counts(self) -> dict[str, int]:
        """How many there are, by the names of torch.distributed.rpc.

        There an owned value counts while others refer to it or wait for it; ``num_values`` has all.
        """
        self.clear_dropped()
        with self._lock:
            return {
                "num_values": len(self._entries),
                "num_owner_rrefs": sum(
                    bool(entry.forks) or not entry.future.done() for entry in self._entries.values()
                ),
                "num_pending_futures": sum(not entry.future.done() for entry in self._entries.values()),
                "num_pending_users": sum(not user.confirmed for user in self._users.values()),
                "num_forks": sum(len(entry.forks) for entry in self._entries.values()),
                "num_users": len(self._users),
                "num_kept": len(self._kept),
            }


# What workers call on each other.


@takes_agent
def _list(agent: Agent, reference: Number, fork: Number, holder: int) -> None:
    agent.references.enlist(reference, fork, holder)


@takes_agent
def _strike_out(agent: Agent, reference: Number, fork: Number) -> None:
    agent.references.strike_out(reference, fork)


@takes_agent
def _accept(agent: Agent, fork: Number) -> None:
    agent.references.accept(fork)


@async_execution
@takes_agent
def fetch(agent: Agent, reference: Number) -> Future[Any]:
    """The value of a reference of the worker called."""
    return agent.references.value(reference)
