"""A worker: makes calls, answers those of others, and knows who lives.

A message is one of five kinds. A *call* has the function and its arguments; its envelope may have the number
of a distributed autograd context, and tells of the remote references within (rref_context.py), which must
be known in the order in which messages come. An *answer* or a *failure* has the number of the call.
*Gathered* values are what the workers agree by when they shut down (termination.py). What distributed
autograd has to tell is a kind of its own (autograd/contexts.py).

Every call goes through :meth:`Agent.call`, and every one that comes through :meth:`Agent.perform`: what has
to be done around calls is done there.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from torchestra.arguments.annotations import refuse_type
from torchestra.engine.p2p import Message
from torchestra.errors import RpcError, shown
from torchestra.rpc import remote_errors
from torchestra.rpc.calls import Call, Named, Pauses, name_of
from torchestra.rpc.current import is_given_agent
from torchestra.rpc.encoding import (
    Outgoing,
    decode,
    encode,
    encode_alone,
    encode_plain,
    in_own_memory,
    is_plain,
    is_plain_value,
    open_envelope,
)
from torchestra.rpc.functions import is_async
from torchestra.rpc.headers import Outbound
from torchestra.rpc.leader_followers import Crew, Job
from torchestra.rpc.router import Roads
from torchestra.rpc.rref_context import References
from torchestra.rpc.thread_state import here
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.system.forking import forget_in_children, refusal

if TYPE_CHECKING:
    from torchestra.autograd.contexts import Context

CALL, ANSWER, FAILURE, GATHER, AUTOGRAD = range(1, 6)

_log = logging.getLogger(__name__)


class Agent:
    """One worker among those that met in ``init_rpc``.

    Args:
        roads: what leads to the others.
        names: of all workers, by rank.
        timeout: of calls that are given none, in seconds; 0 is without end.
        kept, limit: how many threads, see :class:`Crew`.
    """

    def __init__(self, roads: Roads, names: list[str], timeout: float, kept: int, limit: int) -> None:
        self.roads = roads
        self.rank = roads.rank
        self.workers = [WorkerInfo(name, rank) for rank, name in enumerate(names)]
        self.info = self.workers[self.rank]
        self.by_name = {info.name: info for info in self.workers}
        self.timeout = timeout
        self.closed = self.inherited = False
        self.pending: dict[int, Call] = {}
        self.waits: dict[int, Call] = {}
        self.gathered: dict[int, dict[int, Any]] = {}
        self.rounds = itertools.count()  # of what the workers gather: each of them counts the same
        self.references = References(self)
        from torchestra.autograd.contexts import Contexts

        self.contexts = Contexts(self)
        self.watchers: set[Callable[[], None]] = set()  # called some 20 times a second
        self._numbers = itertools.count(1)
        self._ending: set[int] = set()  # calls whose answer is here, and not yet told of
        self.calls_made = 0
        self._gone: dict[int, str] = {}
        self._unreadable: dict[int, str] = {}
        self._pauses = Pauses()
        self.office = roads.office(self._is_lost)
        self.crew = Crew(self.info.name, self.office, self._sort, self._look, kept, limit)
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child, which has none of the worker's threads, and whose locks may stay locked."""
        self.closed = self.inherited = True

    def start(self) -> None:
        """Begin to answer."""
        self.crew.start()

    # -- who is who

    def find(self, to: Any) -> WorkerInfo:
        """The worker that a name, a rank or a WorkerInfo means.

        Raises:
            RpcError: there is none.
        """
        if isinstance(to, (str, WorkerInfo)):
            found = self.by_name.get(to if isinstance(to, str) else to.name)
        elif isinstance(to, int) and not isinstance(to, bool):
            found = self.workers[to] if 0 <= to < len(self.workers) else None
        else:
            refuse_type("Cannot get WorkerInfo", "to", "a name, rank or WorkerInfo", to)
        if found is None:
            raise RpcError(
                f"could not find destination worker {shown(to)}: the workers are"
                f" {', '.join(f'{info.name!r} (rank {info.id})' for info in self.workers)}"
            )
        return found

    def is_gone(self, rank: int) -> bool:
        """Whether a worker has died or shut down, and all that it had sent has been received."""
        return rank in self._gone

    def _is_lost(self, rank: int) -> bool:
        """Whether a worker has died or shut down."""
        return rank in self._gone or rank in self._lost()

    def _lost(self) -> dict[int, str]:
        """What has become of workers that are gone."""
        return {**self.roads.lost(self._gone), **self._unreadable}

    @property
    def is_quiet(self) -> bool:
        """Whether no call of this worker is pending or about to be made, and none waits for a thread.

        A call that is about to be made becomes pending, and a pending one ends: checked in this order, none
        is missed.
        """
        return not (self.references.is_telling or self.crew.todo or self.pending or self._ending)

    def how_gone(self, rank: int) -> str:
        """What has become of a worker that is gone."""
        return self._gone[rank]

    # -- calling

    def call(
        self,
        to: int,
        function: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = -1.0,
        creates: tuple[Any, Any] | None = None,
        keep: object = None,
        context: Context | None = None,
        doing: Any = None,
    ) -> Future[Any]:
        """Have a worker call a function; a future of what it returns.

        Args:
            to: the rank of the worker.
            timeout: in seconds; 0 without end, -1 the agent's.
            creates: the reference that the result is to be kept under, instead of being sent back: the
                numbers of the reference and of the caller's fork of it.
            keep: what must live until the answer is there.
            context: the distributed autograd context that the call belongs to.
            doing: what to call it in messages; default: the function's name.

        Raises:
            RpcError: the worker has shut down, here.
            Exception: what pickling raised. Nothing was sent.
        """
        if self.inherited:
            raise RpcError(str(refusal(f"worker {self.info.name!r} cannot make calls")))
        if self.closed:
            raise RpcError(f"worker {self.info.name!r} has shut down: no calls can be made any more")
        if self.references.dropped:
            self.references.clear_dropped()
        seconds = self.timeout if timeout < 0 else timeout
        sending = None
        if context is not None:
            sending = context.outgoing(to, (args, kwargs), is_call=True)
        if creates is None and sending is None and is_plain(function, args, kwargs):
            outgoing = self._pickled(to, function, args, kwargs, None)
        else:
            outbound = self.references.outbound(to, creates, sending)
            outgoing = self._pickled(to, function, args, kwargs, outbound)
        now = time.monotonic()
        number = self.calls_made = next(self._numbers)
        deadline = now + seconds if seconds else None
        what = function if doing is None else doing
        call = Call(to, what, now, deadline, (outgoing, keep), self.crew.wait)
        future: Future[Any] = call.future
        self.pending[number] = call
        if to in self._gone:
            self._fail(number, remote_errors.gone(call, self))
        else:
            self._post(to, CALL, number, outgoing)
            if sending is not None:
                sending.has_gone()
        return future

    def _pickled(
        self,
        to: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        outbound: Outbound | None,
    ) -> Outgoing:
        """A call, ready to be sent."""
        try:
            if outbound is None:
                return encode_plain((function, args, kwargs))
            lender = self.roads.lender_to(to)
            message = (function, args, kwargs)
            return encode(message, outbound.reducers, outbound.envelope, lender, outbound.takes)
        except BaseException as error:
            if outbound is not None:
                outbound.take_back()
            if isinstance(error, (pickle.PicklingError, AttributeError)):
                raise type(error)(
                    f"{error} (in a call of {name_of(function)} on worker {self.workers[to].name!r}:"
                    " functions and classes are sent by name, so they must be at the top level of a module)"
                ) from error
            raise

    def await_future(self, future: Future[Any], timeout: float, doing: str) -> Any:
        """Wait for a future that something on this worker will complete; its value.

        Raises:
            RpcTimeoutError: that took too long.
        """
        seconds = self.timeout if timeout < 0 else timeout
        now = time.monotonic()
        if not future.done():
            what = Named(doing)
            call = Call(self.rank, what, now, now + seconds if seconds else None, None, self.crew.wait)
            over = call.future
            number = next(self._numbers)
            self.waits[number] = call
            future.add_done_callback(lambda _: self._end_wait(number))
            self.crew.wait(call)
            if not future.done():
                over.wait()  # raises
        return future.wait()

    def _end_wait(self, number: int) -> None:
        call = self.waits.pop(number, None)
        if call is not None:
            self._end(call, None, None)

    def _post(self, to: int, kind: int, number: int, outgoing: Outgoing) -> None:
        if to == self.rank:
            text, storages = in_own_memory(outgoing)
            is_call, job = self._sort(Message(to, kind, number, text, storages))
            if is_call:
                self.crew.give(job)
            else:
                job()
        else:
            assert self.office is not None
            self.office.send(to, kind, number, outgoing.parts, outgoing)

    # -- what comes

    def _sort(self, message: Message) -> tuple[bool, Job]:
        """What to do about a message. One that cannot be read ends who sent it, and nobody else."""
        try:
            return self._sorted(message)
        except Exception as error:
            self._give_up(message.source, error)
            return False, _nothing

    def _give_up(self, source: int, error: Exception) -> None:
        """Take a worker for gone that sends what cannot be read."""
        _log.exception("worker %r gives up worker %r", self.info.name, self.workers[source].name)
        self._unreadable[source] = f"sent a message that cannot be read ({type(error).__name__}: {error})"

    def _sorted(self, message: Message) -> tuple[bool, Job]:
        if message.lost is not None and not len(message.text):
            if message.kind == CALL:
                return True, partial(self.perform, message, None)
            if message.kind in (ANSWER, FAILURE):
                return False, partial(self._finish, message, None)
            raise message.lost
        if message.kind == GATHER:
            values = self.gathered.setdefault(message.tag, {})
            values[message.source] = pickle.loads(bytes(message.text))
            return False, _nothing
        if message.kind == AUTOGRAD:
            return False, partial(self._autograd_told, message)
        inbound = self.references.inbound(message.source, open_envelope(message.text))
        if inbound is not None and (number := inbound.envelope.context) is not None:
            find = self.contexts.enter if message.kind == CALL else self.contexts.find
            inbound.context = find(number, message.source)
        if message.kind == CALL:
            job = partial(self.perform, message, inbound)
            if inbound is not None and inbound.defer(partial(self.crew.give, job)):
                return False, _nothing
            return True, job
        return False, partial(self._finish, message, inbound)

    def _finish(self, message: Message, inbound: Any) -> None:
        self._ending.add(message.tag)
        try:
            call = self.pending.pop(message.tag, None)
            if call is not None:
                self._finish_call(call, message, inbound)
            elif inbound is not None:  # it has timed out
                self.contexts.read(inbound, message.source)
        finally:
            self._ending.discard(message.tag)

    def _finish_call(self, call: Call, message: Message, inbound: Any) -> None:
        try:
            value = self._read(message, inbound)
            error = remote_errors.rebuild(*value) if message.kind == FAILURE else None
        except Exception as unreadable:
            value = None
            error = RpcError(
                f"the result of {name_of(call.doing)}, called on worker {self.workers[call.peer].name!r},"
                f" cannot be unpickled on worker {self.info.name!r}: {type(unreadable).__name__}:"
                f" {unreadable}"
            )
            error.__cause__ = unreadable
        self._end(call, value, error)

    def _read(self, message: Message, inbound: Any) -> Any:
        borrow = partial(self.roads.borrow, message.source)
        try:
            if message.lost is not None:
                raise message.lost
            return decode(message.text, message.storages, inbound, borrow)
        finally:
            if inbound is not None:
                self.contexts.read(inbound, message.source)

    def _autograd_told(self, message: Message) -> None:
        try:
            note = self._read(message, None)
        except Exception as error:
            self._give_up(message.source, error)
            return
        self.contexts.told(message.source, note)

    def tell_autograd(self, to: int, note: object) -> None:
        """Let the distributed autograd of a worker know something."""
        lender = self.roads.lender_to(to)
        self._post(to, AUTOGRAD, 0, encode(note, lender=lender))

    def _end(self, call: Call, value: Any, error: BaseException | None) -> None:
        # The future knows the call: what it has shall die with it, and not wait for the garbage collector.
        future, call.future, call.keep = call.future, None, None
        call.done = True  # before callbacks of the future ask it
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)
        self.crew.nudge(call)

    def _fail(self, number: int, error: Exception) -> None:
        call = self.pending.pop(number, None)
        if call is not None:
            self._end(call, None, error)

    def perform(self, message: Message, inbound: Any) -> None:
        """Answer a call, on a thread of the crew."""
        source, number = message.source, message.tag
        entry, context = (inbound.entry, inbound.context) if inbound is not None else (None, None)
        here.context = context
        try:
            try:
                function, args, kwargs = self._read(message, inbound)
            except Exception as error:
                raise remote_errors.unreadable(error, self.workers[source].name, self.info.name) from error
            if is_given_agent(function):
                args = (self, *args)
            result = function(*args, **kwargs) if kwargs else function(*args)
            if is_async(function):
                if not isinstance(result, torch._C.Future):
                    raise RpcError(
                        "Functions decorated with @rpc.async_function must return a torch.futures.Future"
                        f" object, but got {type(result)}"
                    )
                result.then(partial(self._answer_later, source, number, entry, context))
                return
        except BaseException as error:
            self._answer_failure(source, number, entry, error)
            return
        finally:
            here.context = None
        self._answer(source, number, entry, context, result)

    def _answer_later(
        self, source: int, number: int, entry: Any, context: Context | None, future: Future[Any]
    ) -> None:
        try:
            value = future.value()
        except BaseException as error:
            self._answer_failure(source, number, entry, error)
            return
        self._answer(source, number, entry, context, value)

    def _answer(self, source: int, number: int, entry: Any, context: Context | None, result: Any) -> None:
        if entry is not None:
            entry.set(result)
            result = None
        if is_plain_value(result):
            self._post(source, ANSWER, number, encode_plain(result))
            return
        sending = context.outgoing(source, result, is_call=False) if context is not None else None
        outbound = self.references.outbound(source, None, sending)
        lender = self.roads.lender_to(source)
        try:
            outgoing = encode(result, outbound.reducers, outbound.envelope, lender, outbound.takes)
        except BaseException as error:
            outbound.take_back()
            self._answer_failure(source, number, None, error)
            return
        self._post(source, ANSWER, number, outgoing)

    def _answer_failure(self, source: int, number: int, entry: Any, error: BaseException) -> None:
        described = remote_errors.describe(error, f"worker {self.info.name!r} (rank {self.rank})")
        if entry is not None:
            entry.fail(error)
        self._post(source, FAILURE, number, encode(described))

    # -- what goes wrong

    def _look(self) -> None:
        """Fail calls whose time is over or whose worker is gone.

        Other threads add and remove calls meanwhile. Copying a dictionary is one step; making a tuple of its
        items is many, and the garbage collector may run between them.
        """
        if self.closed:
            return
        if not self.roads.member.program.is_alive():
            self.close()  # a rank that is a thread has ended without shutdown()
            return
        now = time.monotonic()
        self._pauses.look(now, self.pending, self.waits)
        if any(call.deadline is not None and now > call.deadline for call in self.pending.copy().values()):
            self.crew.drain()  # the answer may be here, and nobody have had the time to read it
        for number, call in self.pending.copy().items():
            if call.deadline is not None and now > call.deadline:
                self._fail(number, remote_errors.too_late(call, now, self))
        for number, call in self.waits.copy().items():
            if call.deadline is not None and now > call.deadline and number in self.waits:
                self.waits.pop(number)
                self._end(call, None, remote_errors.too_late(call, now, self))
        self.references.clear_dropped()
        self._see_who_is_gone()
        for watcher in tuple(self.watchers):
            watcher()
        for number, call in self.pending.copy().items():
            if call.peer in self._gone:
                self._fail(number, remote_errors.gone(call, self))

    def _see_who_is_gone(self) -> None:
        """Note who is gone, when what it had sent, answers among it, has been received."""
        lost = {rank: how for rank, how in self._lost().items() if rank not in self._gone}
        if lost and self.crew.drain():
            self._gone.update(lost)
            for rank in lost:
                self.crew.give(partial(self.references.lost, rank))
                self.crew.give(partial(self.contexts.lost, rank))

    # -- the end

    def tell(self, to: int, number: int, value: object) -> None:
        """Let a worker have a value, for :attr:`gathered`."""
        if to == self.rank:
            self.gathered.setdefault(number, {})[to] = value
        else:
            assert self.office is not None
            outgoing = encode_alone(value)
            self.office.send(to, GATHER, number, outgoing.parts, outgoing)

    def close(self) -> None:
        """Stop answering, fail what is pending, and leave the others."""
        if self.closed:
            return
        self.closed = True
        self.roads.leave()
        self.crew.close()
        ended = RpcError(f"worker {self.info.name!r} has shut down before the answer came")
        for number in tuple(self.pending):
            self._fail(number, ended)
        for number in tuple(self.waits):
            self._end(self.waits.pop(number), None, ended)
        self.references.close()
        self.contexts.close()


def _nothing() -> None:
    pass
