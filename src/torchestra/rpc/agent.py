"""A worker: makes calls, and dispatches the messages that come.

A message is one of five kinds. A *call* has the function and its arguments; its header has the remote
references within (rref_context.py), which the receiver must enter in the order of messages, and the scope of
the call (message_scope.py). An *answer* or a *failure* has the id of the call. By *termination* values the
workers agree to shut down (termination.py). *Scope* notes go from one worker's scope to another's.

Every call goes through :meth:`Agent.call`, and every one that comes through :meth:`CallExecutor.execute`
(execution.py). :class:`Liveness` (liveness.py) finds workers that are gone and calls that are late.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from torchestra.arguments.annotations import refuse_type
from torchestra.errors import RpcError, shown
from torchestra.rpc import remote_errors
from torchestra.rpc.call_scope import CallScope
from torchestra.rpc.calls import Label, PendingCall, name_of
from torchestra.rpc.execution import CallExecutor
from torchestra.rpc.headers import Creation, IncomingHeader, OutgoingHeader
from torchestra.rpc.leader_followers import ONCE, QUEUED, REPEATABLE, Job, LeaderFollowersPool
from torchestra.rpc.liveness import Liveness
from torchestra.rpc.message_scope import MessageScope, new_scope
from torchestra.rpc.messages import (
    CALL,
    FAILURE,
    HEADER_LENGTH,
    SCOPE,
    TERMINATION,
    Encoded,
    decode,
    encode,
    encode_plain_call,
    header_of,
    to_self,
)
from torchestra.rpc.router import Router
from torchestra.rpc.rref import RRef
from torchestra.rpc.rref_context import RRefContext
from torchestra.rpc.shared_buffers import OpenedBuffers
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.system.deadline import RunningClock
from torchestra.system.forking import forget_in_children, refusal
from torchestra.transport.message import Message

_set_result = torch._C.Future.set_result


class Agent:
    """One worker among those that met in ``init_rpc``.

    Args:
        router: the connections to the others.
        names: the names of all workers, by rank.
        timeout_s: the default time-out of calls; 0 for no limit.
        max_idle, max_threads: limits on the threads, see :class:`LeaderFollowersPool`.
    """

    def __init__(
        self, router: Router, names: list[str], timeout_s: float, max_idle: int, max_threads: int
    ) -> None:
        self.router = router
        self.rank = router.rank
        self.workers = [WorkerInfo(name, rank) for rank, name in enumerate(names)]
        self.info = self.workers[self.rank]
        self.by_name = {info.name: info for info in self.workers}
        self.timeout = timeout_s
        self.closed = self.inherited = False
        self.clock = RunningClock()
        self.pending: dict[int, PendingCall] = {}
        self.waits: dict[int, PendingCall] = {}
        self.termination: dict[int, dict[int, Any]] = {}  # by round, the values of the workers
        self.rounds = itertools.count()
        self.calls_made = 0
        self._call_ids = itertools.count(1)
        self._entering: tuple[Message, IncomingHeader] | None = None
        self._null_scope = MessageScope(self)
        self._scope: MessageScope | None = None
        self._scope_lock = threading.Lock()
        self.rrefs = RRefContext(self, RRef)
        self.liveness = Liveness(self)
        self.executor = CallExecutor(self)
        self.endpoint = router.endpoint(self.liveness.is_lost)
        self.pool = LeaderFollowersPool(
            self.info.name, self.endpoint, self._dispatch, self.liveness.check, max_idle, max_threads
        )
        forget_in_children(self)

    def forget(self) -> None:
        """Disable a forked child's copy, which has none of the threads, and whose locks may stay locked."""
        self.closed = self.inherited = True

    def start(self) -> None:
        """Begin to answer calls."""
        self.pool.start()

    def find(self, to: Any) -> WorkerInfo:
        """Return the worker that a name, a rank or a WorkerInfo means.

        Raises:
            RpcError: there is none.
        """
        if isinstance(to, (str, WorkerInfo)):
            worker = self.by_name.get(to if isinstance(to, str) else to.name)
        elif isinstance(to, int) and not isinstance(to, bool):
            worker = self.workers[to] if 0 <= to < len(self.workers) else None
        else:
            refuse_type("Cannot get WorkerInfo", "to", "a name, rank or WorkerInfo", to)
        if worker is None:
            raise RpcError(
                f"could not find destination worker {shown(to)}: the workers are"
                f" {', '.join(f'{info.name!r} (rank {info.id})' for info in self.workers)}"
            )
        return worker

    @property
    def scope(self) -> MessageScope:
        """Return the installed scope of messages, or one that does nothing."""
        if self._scope is None:
            with self._scope_lock:
                if self._scope is None:
                    self._scope = new_scope(self)
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
    ) -> Future[Any]:
        """Have a worker call a function; return a future of the result.

        Args:
            timeout: in seconds; 0 for no limit, -1 for the agent's.
            creates: the reference that the result is to be kept under, instead of being sent back.
            keep: an object to keep alive until the answer is there.
            scope: the scope that the call belongs to.
            label: what error messages name as called; default: the function.

        Raises:
            RpcError: this worker has shut down.
            Exception: what pickling raised. Nothing was sent.
        """
        if self.closed:
            raise self._closed_error()
        if self.rrefs.dropped:
            self.pool.leave(self.rrefs.clear_dropped)
        encoded = header = recorder = call = None
        call_id = 0
        try:
            if scope is None and creates is None:
                encoded = encode_plain_call(function, args, kwargs)
            if encoded is None:
                if scope is not None:
                    recorder = scope.outgoing(to, (args, kwargs), is_call=True)
                header = OutgoingHeader(self.rrefs, to, creates, recorder, self.router.buffers_to(to))
                encoded = header.encode((function, args, kwargs))
            call_id = self.calls_made = next(self._call_ids)
            what = function if label is None else label
            timeout_s = self.timeout if timeout < 0 else timeout
            call = PendingCall(to, what, self.clock.elapsed(), timeout_s, (encoded, keep), self.pool.wait)
            self.pending[call_id] = call
            if to in self.liveness.gone:
                self.fail(call_id, remote_errors.gone(call, self))
                return call
            if to == self.rank or self.endpoint is None:
                call.is_sent = True
                self._send_to_self(CALL, call_id, encoded)
            else:
                self.endpoint.send(to, CALL, call_id, encoded.parts, encoded, call)
            if recorder is not None:
                recorder.sent()
            return call
        except BaseException as error:
            self._take_back(call_id, call, header)
            if not call_id and isinstance(error, (pickle.PicklingError, AttributeError)):
                raise self._pickling_error(error, to, function) from error
            raise

    def _take_back(self, call_id: int, call: PendingCall | None, header: OutgoingHeader | None) -> None:
        """Forget a call that could not be made: nobody has its future."""
        self.pending.pop(call_id, None)
        if header is not None and not (call is not None and call.is_sent):
            header.withdraw()

    def _closed_error(self) -> RpcError:
        if self.inherited:
            return RpcError(str(refusal(f"worker {self.info.name!r} cannot make calls")))
        return RpcError(f"worker {self.info.name!r} has shut down: no calls can be made any more")

    def _pickling_error(self, error: Exception, to: int, function: Any) -> Exception:
        return type(error)(
            f"{error} (in a call of {name_of(function)} on worker {self.workers[to].name!r}:"
            " functions and classes are sent by name, so they must be at the top level of a module)"
        )

    def await_future(self, future: Future[Any], timeout: float, what: str) -> Any:
        """Wait for a future that something on this worker will complete; return its value.

        Raises:
            RpcTimeoutError: it took too long.
        """
        if not future.done():
            timeout_s = self.timeout if timeout < 0 else timeout
            wait = PendingCall(self.rank, Label(what), self.clock.elapsed(), timeout_s, None, self.pool.wait)
            call_id = next(self._call_ids)
            self.waits[call_id] = wait
            future.add_done_callback(lambda _: self._end_wait(call_id))
            self.pool.wait(wait)
            if not future.done():
                wait.wait()  # raises
        return future.wait()

    def _end_wait(self, call_id: int) -> None:
        wait = self.waits.pop(call_id, None)
        if wait is not None:
            self.finish(wait, None, None)

    def send(self, to: int, kind: int, call_id: int, encoded: Encoded) -> None:
        """Send a message to a worker, which may be this one."""
        if to == self.rank or self.endpoint is None:
            self._send_to_self(kind, call_id, encoded)
        else:
            self.endpoint.send(to, kind, call_id, encoded.parts, encoded)

    def _send_to_self(self, kind: int, call_id: int, encoded: Encoded) -> None:
        kind, job = self._dispatch(to_self(self.rank, kind, call_id, encoded))
        if kind == QUEUED:
            self.pool.submit(job)
        else:
            job()

    def send_scope_message(self, to: int, note: object) -> None:
        """Send a note to the scope of a worker."""
        buffers = self.router.buffers_to(to)
        self.send(to, SCOPE, 0, encode(note, share=None if buffers is None else buffers.noting({})))

    # -- what comes

    def _dispatch(self, message: Message) -> tuple[int, Job]:
        """Return how the pool is to do the job of a message, and the job. An unreadable one ends its sender.

        May be called again for a message if an interrupt came before it was over.
        """
        try:
            if message.kind > FAILURE or (message.lost is not None and not len(message.text)):
                return self._dispatch_other(message)
            header: IncomingHeader | None = None
            is_call = message.kind == CALL
            if HEADER_LENGTH.unpack_from(message.text)[0]:  # type: ignore[arg-type]
                header = self._enter_header(message, is_call=is_call)
            if not is_call:
                call = self.pending.get(message.tag)
                kind = ONCE if call is not None and call.has_callbacks else REPEATABLE
                return kind, partial(self._finish_call, message, header, _Answer())
            job = partial(self.executor.execute, message, header)
            if header is not None and header.defer(partial(self.pool.submit, job)):
                return REPEATABLE, _nothing
            return QUEUED, job
        except Exception as error:
            self.liveness.give_up(message.source, error)
            return REPEATABLE, _nothing

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

    def _dispatch_other(self, message: Message) -> tuple[int, Job]:
        """Return a job for a message that belongs to no call, or for which there was no memory."""
        if message.kind == SCOPE:
            return ONCE, partial(self._read_scope_message, message)
        if message.lost is not None and message.kind == TERMINATION:
            raise message.lost
        if message.kind == TERMINATION:
            values = self.termination.setdefault(message.tag, {})
            values[message.source] = pickle.loads(bytes(message.text))
            return REPEATABLE, _nothing
        if message.kind == CALL:
            return QUEUED, partial(self.executor.execute, message, None)
        return REPEATABLE, partial(self._finish_call, message, None, _Answer())

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
            self._read_scope(message, header)
            raise
        self._read_scope(message, header)
        return value

    def _read_scope(self, message: Message, header: IncomingHeader) -> None:
        if header.mark is not None:
            self.scope.read(header.scope, header.mark, header.attached, message.source)

    def _finish_call(self, message: Message, header: IncomingHeader | None, answer: _Answer) -> None:
        """Complete the call that a message answers. May be called again after an interrupt."""
        call = self.pending.get(message.tag)
        # As is_settled_by(), whose call would cost as much as the rest.
        if call is None or call.__dict__.setdefault("settler", answer) is not answer:  # it took too long
            if header is not None and not answer.finished:
                self._read_scope(message, header)
            return
        if answer.result is None:
            value, error = None, None
            opened = answer.opened
            if opened is None:
                opened = answer.opened = {}
            try:
                if header is None:
                    value = decode(message, None, self.router.borrow, opened)
                else:
                    value = self.read(message, header, opened)
                if message.kind == FAILURE:
                    error = remote_errors.rebuild(*value)
            except Exception as unreadable:
                error = remote_errors.unreadable_result(unreadable, call, self)
            answer.result = value, error
            self.finish(call, value, error)
        elif not call.finished or not call.done():
            self.finish(call, *answer.result)
        answer.finished = True
        answer.result = answer.opened = None
        self.pending.pop(message.tag, None)

    def finish(self, call: PendingCall, value: Any, error: BaseException | None) -> None:
        """Complete a call with its result."""
        call.keep = None
        call.finished = True  # before callbacks of the future ask it
        if error is None:
            _set_result(call, value)
        else:
            call.set_exception(error)
        if call.latch is not None or call.leading:
            self.pool.wake(call)

    def fail(self, call_id: int, error: Exception) -> None:
        """End a call, if it is pending, with an error."""
        call = self.pending.get(call_id)
        if call is not None and call.is_settled_by(error):
            self.finish(call, None, error)
            self.pending.pop(call_id, None)

    def _read_scope_message(self, message: Message) -> None:
        try:
            note = decode(message, None, self.router.borrow)
        except Exception as error:
            self.liveness.give_up(message.source, error)
            return
        self.scope.receive(message.source, note)

    # -- the end

    def close(self) -> None:
        """Stop answering, fail what is pending, and leave the others."""
        if self.closed:
            return
        self.closed = True
        self.router.leave()
        self.pool.close()
        ended = RpcError(f"worker {self.info.name!r} has shut down before the answer came")
        for call_id in tuple(self.pending):
            self.fail(call_id, ended)
        for call_id in tuple(self.waits):
            self.finish(self.waits.pop(call_id), None, ended)
        self.rrefs.close()
        self.scope.close()


class _Answer:
    """The progress with an answer, for the next attempt if an interrupt stops this one.

    Attributes:
        result: the value and the error of the call.
        opened: see :meth:`SharedBufferPool.open`.
        finished: the call is done.
    """

    result: tuple[Any, BaseException | None] | None = None
    opened: OpenedBuffers | None = None
    finished = False


def _nothing() -> None:
    pass
