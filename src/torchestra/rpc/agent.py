"""A worker: makes calls, and dispatches the messages that come.

A message is one of seven kinds. A *call* has the function and its arguments; its header has the remote
references within (rref_context.py), which the receiver must enter in the order of messages, and the scope of
the call (message_scope.py). An *answer* or a *failure* has the id of the call. *Plain* calls and answers have
no header, and nothing but numbers and texts (messages.py). By *termination* values the workers agree to shut
down (termination.py). *Scope* notes go from one worker's scope to another's.

Every call goes through :meth:`Agent.call`, every one that comes through :meth:`CallExecutor.execute`
(execution.py), and every answer through :class:`~torchestra.rpc.answers.AnswerHandler`.
:meth:`Agent.check` fails calls that are late, or whose worker is gone (liveness.py).
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.futures import Future

from torchestra.engine.p2p.gil_waits import GilWaits
from torchestra.errors import (
    DistBackendError,
    InvalidArgumentError,
    RpcError,
    RpcTimeoutError,
    WorkerFailedError,
)
from torchestra.rpc import plain, remote_errors
from torchestra.rpc.answers import AnswerHandler
from torchestra.rpc.call_scope import CallScope
from torchestra.rpc.calls import FutureCall, Label, PendingCall, name_of
from torchestra.rpc.execution import CallExecutor
from torchestra.rpc.headers import Creation, IncomingHeader, OutgoingCall, OutgoingHeader, Reference
from torchestra.rpc.leader_followers import ONCE, QUEUED, REPEATABLE, Job, LeaderFollowersPool
from torchestra.rpc.liveness import Liveness
from torchestra.rpc.message_scope import MessageScope
from torchestra.rpc.messages import (
    CALL,
    FAILURE,
    HEADER_LENGTH,
    PLAIN_ANSWER,
    PLAIN_CALL,
    SCOPE,
    TENSOR_ANSWER,
    TENSOR_CALL,
    TERMINATION,
    Encoded,
    decode,
    encode,
    header_of,
    part_length,
    to_self,
)
from torchestra.rpc.options import RpcBackendOptions
from torchestra.rpc.router import Router
from torchestra.rpc.rref_context import RRefContext
from torchestra.rpc.shared_buffers import OpenedBuffers
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.rpc.workers import Workers
from torchestra.system.deadline import RunningClock
from torchestra.system.forking import forget_in_children, refusal
from torchestra.transport.message import Message

_SERIALIZATION_ERRORS = (pickle.PicklingError, AttributeError, DistBackendError, InvalidArgumentError)


class Agent:
    """One worker among those that met in ``init_rpc``.

    Args:
        router: the connections to the others.
        workers: all workers so far, this one included.
        options: the default time-out of calls, and the limits on threads.
        rref_class: the class of references.

    Attributes:
        number, end_reason: of this worker, see :class:`Workers`; how it ends, for messages.
        checks: functions that :meth:`check` calls.
        calls_made, sent_bytes: for the flight record; of messages that threads send at once some may be left
            out of the bytes.
        gil_waits: how long its threads wait for the GIL when a message has come, while that is measured.
    """

    def __init__(
        self, router: Router, workers: Workers, options: RpcBackendOptions, rref_class: type[Reference]
    ) -> None:
        self.router = router
        self.number = router.number
        self.workers = workers
        self.info = workers[self.number]
        self.end_reason = "has shut down"
        self.timeout = options.rpc_timeout
        self.closed = self.inherited = False
        self.clock = RunningClock()
        self.pending: dict[int, PendingCall] = {}
        self.waits: dict[int, PendingCall] = {}
        self.termination: dict[int, dict[int, Any]] = {}  # by round, the values of the workers
        self.rounds = itertools.count()
        self.calls_made = self.sent_bytes = 0
        self._call_ids = itertools.count(1)
        self._wait_ids = itertools.count(1)
        self._entering: tuple[Message, IncomingHeader] | None = None
        self._null_scope = MessageScope(self.info)
        self._scope: MessageScope | None = None
        self._scope_lock = threading.Lock()
        self.checks: set[Callable[[], None]] = set()
        self.rrefs = RRefContext(self, rref_class)
        self.liveness = Liveness(router, self.workers)
        self.executor = CallExecutor(self)
        self.answers = AnswerHandler(self)
        self.endpoint = router.endpoint(self.liveness.is_lost)
        self.gil_waits = GilWaits() if self.endpoint is None else self.endpoint.gil_waits
        limits = options.num_worker_threads, options.max_worker_threads
        self.pool = LeaderFollowersPool(self.info.name, self.endpoint, self._dispatch, self.check, *limits)
        forget_in_children(self)

    def forget(self) -> None:
        """Disable a forked child's copy, which has none of the threads, and whose locks may stay locked."""
        self.closed = self.inherited = True

    def start(self) -> None:
        """Begin to answer calls."""
        self.pool.start()

    def find(self, to: Any) -> WorkerInfo:
        """Return the worker that a name, a rank or a WorkerInfo means; errors as for :meth:`number_of`."""
        return self.workers[self.number_of(to)]

    def number_of(self, to: Any) -> int:
        """Return the number of the worker that a name, a rank or a WorkerInfo means.

        Raises:
            WorkerFailedError: it has been one, and is gone.
            RpcError: there is none, or this worker is itself none any more.
        """
        if (number := self.workers.number_of(to)) is not None:
            return number
        if self.closed:
            raise self._closed_error()
        if (former := self.workers.former_number_of(to)) is not None:
            raise self.liveness.failure_of(former, "and no other has come in its place")
        raise self.workers.nobody(to)

    def current_workers(self) -> list[WorkerInfo]:
        """Return those that are workers now, by number; where they join and leave, without the lost ones.

        Raises:
            RpcError: this worker was removed from its group, of which it hears no more.
        """
        joins = self.router.members is not None
        if joins and self.closed:
            raise self._closed_error()
        gone = self.liveness.gone if joins else ()
        return [self.workers[number] for number in self.workers.current() if number not in gone]

    @property
    def scope(self) -> MessageScope:
        """Return the installed scope of messages, or one that does nothing."""
        if self._scope is None:
            with self._scope_lock:
                if self._scope is None and _scope_factory is not None:
                    self._scope = _scope_factory(self)
        return self._scope or self._null_scope

    @property
    def is_quiet(self) -> bool:
        """Return whether no call of this worker is pending or about to be made, and none waits for a thread.

        A call that is about to be made becomes pending, and a pending one ends when its future is done:
        checked in this order, none is missed.
        """
        return not (self.rrefs.is_telling or self.pool.queue or self.pool.left or self.pending)

    # -- calling

    def call(
        self,
        to: int,
        function: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = -1.0,
        creates: Creation | None = None,
        keep: object = None,
        scope: CallScope | None = None,
        label: Any = None,
        waits: bool = False,
    ) -> Any:
        """Have a worker call a function; return a future of the result.

        Args:
            timeout: in seconds; 0 for no limit, -1 for the agent's.
            creates: the reference that the result is to be kept under, instead of being sent back.
            keep: an object to keep alive until the answer is there.
            scope, label: the scope that it belongs to; what errors name as called, by default the function.
            waits: the caller waits for the result at once, by ``wait()``, so that no future is needed.

        Raises:
            RpcError: this worker has shut down.
            DistBackendError, InvalidArgumentError: workers' shared memory has no room for its tensors.
            Exception: what pickling raised. Nothing was sent.
        """
        if self.closed:
            raise self._closed_error()
        if self.rrefs.dropped:
            self.pool.leave(self.rrefs.clear_dropped)
        call_id, call, outgoing = 0, None, OutgoingCall()
        try:
            encoded = plain.encode_call(function, args, kwargs) if scope is None and creates is None else None
            encoded = encoded or self._encode_call(outgoing, to, function, args, kwargs, scope, creates)
            call_id = self.calls_made = next(self._call_ids)
            timeout_s = self.timeout if timeout < 0 else timeout
            make = PendingCall if waits else FutureCall
            call = make(to, label or function, self.clock.elapsed(), timeout_s, (encoded, keep), self.pool)
            self.pending[call_id] = call
            if to >= len(self.workers):
                self.workers.known(to)
            if to in self.liveness.gone:
                self.answers.fail(call_id, self.liveness.failure_of_call(call))
                return call
            if to == self.number or self.endpoint is None:
                call.is_sent = True
                self._send_to_self(outgoing.kind, call_id, encoded)
            else:
                self.endpoint.send(to, outgoing.kind, call_id, encoded.parts, encoded, call)
                self.sent_bytes += sum(map(part_length, encoded.parts))
            if outgoing.header is not None and outgoing.header.recorder is not None:
                outgoing.header.recorder.sent()
            return call
        except BaseException as error:
            self._take_back(call_id, call, outgoing)
            if not call_id and isinstance(error, _SERIALIZATION_ERRORS):
                raise self._serialization_error(error, to, label or function) from error
            raise

    def _encode_call(
        self,
        outgoing: OutgoingCall,
        to: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        scope: CallScope | None,
        creates: Creation | None,
    ) -> Encoded:
        """Serialize a call that is not of numbers and texts only."""
        buffers = self.router.buffers_to(to)
        if scope is None and creates is None:
            taken: dict[int, None] = {}
            outgoing.kind, outgoing.taken = TENSOR_CALL, taken
            encoded = plain.encode_tensor_call(function, args, kwargs, buffers, taken)
            if encoded is not None:
                return encoded
        header = OutgoingHeader(self.rrefs, to, buffers, scope, (args, kwargs), creates)
        outgoing.kind, outgoing.header = CALL, header
        return header.encode((function, args, kwargs))

    def _take_back(self, call_id: int, call: PendingCall | None, outgoing: OutgoingCall) -> None:
        """Forget a call that could not be made: nobody has its future."""
        self.pending.pop(call_id, None)
        if call is None or not call.is_sent:
            self.router.shared_buffers.withdraw(outgoing.taken)
            if outgoing.header is not None:
                outgoing.header.withdraw()

    def _closed_error(self) -> RpcError:
        if self.inherited:
            return RpcError(str(refusal(f"worker {self.info.name!r} cannot make calls")))
        return RpcError(f"worker {self.info.name!r} {self.end_reason}: no calls can be made any more")

    def _serialization_error(self, error: Exception, to: int, function: Any) -> Exception:
        where = f"in a call of {name_of(function)} on worker {self.workers[to].name!r}"
        if isinstance(error, (pickle.PicklingError, AttributeError)):
            where += ": functions and classes are sent by name, so they must be at the top level of a module"
        return type(error)(f"{error} ({where})")

    def await_future(self, future: Future[Any], timeout: float, what: str) -> Any:
        """Wait for a future that something on this worker will complete; return its value.

        Raises:
            RpcTimeoutError: it took too long.
        """
        if not future.done():
            timeout_s = self.timeout if timeout < 0 else timeout
            wait = PendingCall(self.number, Label(what), self.clock.elapsed(), timeout_s, None, self.pool)
            wait_id = next(self._wait_ids)
            self.waits[wait_id] = wait
            future.add_done_callback(lambda _: self._end_wait(wait_id))
            self.pool.wait(wait)
            if not future.done():
                wait.wait()  # raises
        try:
            return future.wait()
        finally:
            del future  # as in PendingCall.wait

    def _end_wait(self, wait_id: int) -> None:
        wait = self.waits.pop(wait_id, None)
        if wait is not None:
            wait.complete(None, None)

    def send(self, to: int, kind: int, call_id: int, encoded: Encoded) -> None:
        """Send a message to a worker, which may be this one."""
        if to == self.number or self.endpoint is None:
            self._send_to_self(kind, call_id, encoded)
        else:
            self.workers.known(to)
            self.endpoint.send(to, kind, call_id, encoded.parts, encoded)
            self.sent_bytes += sum(map(part_length, encoded.parts))

    def _send_to_self(self, kind: int, call_id: int, encoded: Encoded) -> None:
        kind, job = self._dispatch(to_self(self.number, kind, call_id, encoded))
        if job is None:
            return
        if kind == QUEUED:
            self.pool.submit(job)
        else:
            job()

    def send_scope_message(self, to: int, note: object) -> None:
        """Send a note to the scope of a worker."""
        buffers = self.router.buffers_to(to)
        self.send(to, SCOPE, 0, encode(note, share=None if buffers is None else buffers.sharer({})))

    # -- what comes

    def _dispatch(self, message: Message) -> tuple[int, Job | None]:
        """Return how the pool is to do the job of a message, and the job. An unreadable one ends its sender.

        May be called again for a message if an interrupt came before it was over.
        """
        try:
            if message.kind == PLAIN_ANSWER:
                return self.answers.dispatch_plain(message)
            if message.kind in (PLAIN_CALL, TENSOR_CALL):
                return QUEUED, partial(self.executor.execute, message, None)
            if message.kind == TENSOR_ANSWER:
                return self.answers.dispatch(message, None)
            if message.kind > FAILURE or (message.lost is not None and not len(message.text)):
                return self._dispatch_other(message)
            header: IncomingHeader | None = None
            is_call = message.kind == CALL
            if HEADER_LENGTH.unpack_from(message.text)[0]:  # type: ignore[arg-type]
                header = self._enter_header(message, is_call=is_call)
            if not is_call:
                return self.answers.dispatch(message, header)
            job = partial(self.executor.execute, message, header)
            if header is not None and header.defer(partial(self.pool.submit, job)):
                return REPEATABLE, None
            return QUEUED, job
        except Exception as error:
            self.liveness.give_up(message.source, error)
            return REPEATABLE, None

    def _enter_header(self, message: Message, *, is_call: bool) -> IncomingHeader:
        """Enter the header of a message, and return it. After an interrupt, the next call goes on with it."""
        entering = self._entering
        if entering is None or entering[0] is not message:
            header = IncomingHeader()
            self._entering = message, header
        else:
            header = entering[1]
        self.rrefs.receive_header(message.source, header_of(message), header)
        if header.mark is not None:
            header.scope = self.scope.enter(header.mark, message.source, is_call=is_call)
        return header

    def _dispatch_other(self, message: Message) -> tuple[int, Job | None]:
        """Return a job for a message that belongs to no call, or for which there was no memory."""
        if message.kind == SCOPE:
            return ONCE, partial(self._read_scope_message, message)
        if message.lost is not None and message.kind == TERMINATION:
            raise message.lost
        if message.kind == TERMINATION:
            values = self.termination.setdefault(message.tag, {})
            values[message.source] = pickle.loads(bytes(message.text))
            return REPEATABLE, None
        if message.kind == CALL:
            return QUEUED, partial(self.executor.execute, message, None)
        return self.answers.dispatch(message, None)

    def read(self, message: Message, header: IncomingHeader, opened: OpenedBuffers | None = None) -> Any:
        """Return the content of a message that has a header, and give the tensors within to the scope.

        Args:
            opened: see :meth:`SharedBufferPool.open`; needed if this is done again after an interrupt.

        Raises:
            Exception: there is no memory for it, or it cannot be unpickled.
        """
        if self._entering is not None and self._entering[1] is header:
            self._entering = None
        header.attached = []
        try:
            value = decode(message, header, self.router.borrow, opened)
        except Exception:
            self.read_scope(message, header)
            raise
        self.read_scope(message, header)
        return value

    def read_scope(self, message: Message, header: IncomingHeader) -> None:
        """Give the tensors in a message that has a header to the scope."""
        if header.mark is not None:
            self.scope.read(header.scope, header.mark, header.attached, message.source)

    def _read_scope_message(self, message: Message) -> None:
        try:
            note = self.scope.checked(decode(message, None, self.router.borrow))
        except Exception as error:
            self.liveness.give_up(message.source, error)
            return
        self.scope.receive(message.source, note)

    # -- calls that take too long, and workers that are gone

    def check(self) -> None:
        """Fail calls that have taken too long or whose worker is gone; a thread does it 20 times a second.

        Other threads add and remove calls meanwhile. Copying a dictionary is one step; making a tuple of its
        items is many, and the garbage collector may run between them.
        """
        if self.closed:
            return
        if self.router.has_ended():
            self.close()  # a rank that is a thread has ended without shutdown()
            return
        now = self.clock.elapsed()
        if any(call.is_late(now) for call in self.pending.copy().values()):
            self.pool.drain()  # the answer may be here, but no thread has had the time to read it
        for call_id, call in self.pending.copy().items():
            if call.is_late(now):
                self.answers.fail(call_id, self._too_late(call, now))
        for call_id, wait in self.waits.copy().items():
            if wait.is_late(now) and self.waits.pop(call_id, None) is not None:
                wait.complete(None, self._too_late(wait, now))
        self.rrefs.clear_dropped()
        self._note_gone()
        for check in tuple(self.checks):
            check()
        for call_id, call in self.pending.copy().items():
            if call.peer in self.liveness.gone:
                self.answers.fail(call_id, self.liveness.failure_of_call(call))

    def _too_late(self, call: PendingCall, now: float) -> RpcTimeoutError:
        return remote_errors.too_late(call, now - call.began, self.workers[call.peer], self.info, self.pool)

    def _note_gone(self) -> None:
        """Note workers as gone, once all that they had sent, answers included, has been received."""
        lost = self.liveness.newly_lost()
        if lost and self.pool.drain():
            self.liveness.gone.update(lost)
            members = self.router.members
            for rank, how in lost.items():
                if members is not None:
                    self.pool.submit(partial(members.remove_lost, rank, how))
                self.pool.submit(partial(self.rrefs.remove_lost, rank))
                self.pool.submit(partial(self.scope.remove_lost, rank))

    # -- the end

    def close(self, failure: WorkerFailedError | None = None) -> None:
        """Stop answering, fail what is pending, because of a failure or without, and leave the others."""
        if self.closed:
            return
        self.closed = True
        self.executor.executed.write()
        self.router.leave()
        self.pool.close()
        # An error each: it comes to refer to frames where it is raised.
        unanswered = partial(remote_errors.unanswered, self.info, self.end_reason, failure)
        for call_id in tuple(self.pending):
            self.answers.fail(call_id, unanswered())
        for call_id in tuple(self.waits):
            self.waits.pop(call_id).complete(None, unanswered())
        self.rrefs.close()
        self.scope.close()


_scope_factory: Callable[[Agent], MessageScope] | None = None


def install_scope(factory: Callable[[Agent], MessageScope]) -> None:
    """Give every worker of this process a scope made by ``factory``, those already running included."""
    global _scope_factory
    _scope_factory = factory
