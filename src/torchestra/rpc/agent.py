"""A worker: makes calls, and dispatches the messages that come.

A message is one of five kinds. A *call* has the function and its arguments; its header has the remote
references within (rref_context.py), which the receiver must enter in the order of messages, and the scope of
the call (message_scope.py). An *answer* or a *failure* has the id of the call. By *termination* values the
workers agree to shut down (termination.py). *Scope* notes go from the scope of a worker to that of another.

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
from torchestra.rpc.calls import Label, PendingCall, name_of
from torchestra.rpc.execution import CallExecutor
from torchestra.rpc.headers import Creation, IncomingHeader, OutgoingHeader
from torchestra.rpc.leader_followers import Job, LeaderFollowersPool
from torchestra.rpc.liveness import Liveness
from torchestra.rpc.message_scope import CallScope, MessageScope, TensorRecorder, new_scope
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
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.system.deadline import RunningClock
from torchestra.system.forking import forget_in_children, refusal
from torchestra.transport.message import Message

_set_result = torch._C.Future.set_result


class Agent:
    """One worker among those that met in ``init_rpc``.

    Args:
        router: what leads to the others.
        names: of all workers, by rank.
        timeout_s: of calls that are given none; 0 is without end.
        max_idle, max_threads: how many threads, see :class:`LeaderFollowersPool`.
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
        self._finishing: set[int] = set()  # calls whose answer is here, and whose future does not know it yet
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
        """In a forked child, which has none of the worker's threads, and whose locks may stay locked."""
        self.closed = self.inherited = True

    def start(self) -> None:
        """Begin to answer."""
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

        A call that is about to be made becomes pending, and a pending one ends: checked in this order, none
        is missed.
        """
        return not (self.rrefs.is_telling or self.pool.queue or self.pending or self._finishing)

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
            timeout: in seconds; 0 without end, -1 the agent's.
            creates: the reference that the result is to be kept under, instead of being sent back.
            keep: what must live until the answer is there.
            scope: the scope that the call belongs to.
            label: what to call it in messages; default: the function.

        Raises:
            RpcError: the worker has shut down, here.
            Exception: what pickling raised. Nothing was sent.
        """
        if self.closed:
            raise self._closed_error()
        if self.rrefs.dropped:
            self.rrefs.clear_dropped()
        encoded = recorder = None
        try:
            if scope is None and creates is None:
                encoded = encode_plain_call(function, args, kwargs)
            if encoded is None:
                if scope is not None:
                    recorder = scope.outgoing(to, (args, kwargs), is_call=True)
                encoded = self.encode(to, (function, args, kwargs), creates, recorder)
        except (pickle.PicklingError, AttributeError) as error:
            raise self._pickling_error(error, to, function) from error
        call_id = self.calls_made = next(self._call_ids)
        call = PendingCall(
            to,
            function if label is None else label,
            self.clock.elapsed(),
            self.timeout if timeout < 0 else timeout,
            (encoded, keep),
            self.pool.wait,
        )
        self.pending[call_id] = call
        if to in self.liveness.gone:
            self.fail(call_id, remote_errors.gone(call, self))
            return call
        if to == self.rank or self.endpoint is None:
            self._send_to_self(CALL, call_id, encoded)
        else:
            self.endpoint.send(to, CALL, call_id, encoded.parts, encoded)
        if recorder is not None:
            recorder.sent()
        return call

    def _closed_error(self) -> RpcError:
        if self.inherited:
            return RpcError(str(refusal(f"worker {self.info.name!r} cannot make calls")))
        return RpcError(f"worker {self.info.name!r} has shut down: no calls can be made any more")

    def _pickling_error(self, error: Exception, to: int, function: Any) -> Exception:
        return type(error)(
            f"{error} (in a call of {name_of(function)} on worker {self.workers[to].name!r}:"
            " functions and classes are sent by name, so they must be at the top level of a module)"
        )

    def encode(
        self, to: int, item: object, creates: Creation | None = None, recorder: TensorRecorder | None = None
    ) -> Encoded:
        """Serialize the content of a call or an answer, with its header.

        Raises:
            Exception: what pickling raised; then nothing is to be sent.
        """
        header, buffers = OutgoingHeader(self.rrefs, to, creates, recorder), self.router.buffers_to(to)
        try:
            return encode(
                item, reducers=header.reducers, takes=header.takes, header=header.content, buffers=buffers
            )
        except BaseException:
            header.withdraw()
            raise

    def await_future(self, future: Future[Any], timeout: float, what: str) -> Any:
        """Wait for a future that something on this worker will complete; return its value.

        Raises:
            RpcTimeoutError: that took too long.
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
        """Send a message to a worker; this one too."""
        if to == self.rank or self.endpoint is None:
            self._send_to_self(kind, call_id, encoded)
        else:
            self.endpoint.send(to, kind, call_id, encoded.parts, encoded)

    def _send_to_self(self, kind: int, call_id: int, encoded: Encoded) -> None:
        is_call, job = self._dispatch(to_self(self.rank, kind, call_id, encoded))
        if is_call:
            self.pool.submit(job)
        else:
            job()

    def send_scope_message(self, to: int, note: object) -> None:
        """Send a note to the scope of a worker."""
        self.send(to, SCOPE, 0, encode(note, buffers=self.router.buffers_to(to)))

    # -- what comes

    def _dispatch(self, message: Message) -> tuple[bool, Job]:
        """Return whether a message is a call, and a job for it. An unreadable one ends its sender only."""
        try:
            if message.kind > FAILURE or (message.lost is not None and not len(message.text)):
                return self._dispatch_other(message)
            header: IncomingHeader | None = None
            is_call = message.kind == CALL
            if HEADER_LENGTH.unpack_from(message.text)[0]:  # type: ignore[arg-type]
                header = self.rrefs.receive_header(message.source, header_of(message))
                if header.mark is not None:
                    header.scope = self.scope.enter(header.mark, message.source, is_call=is_call)
            if not is_call:
                return False, partial(self._finish_call, message, header)
            job = partial(self.executor.execute, message, header)
            if header is not None and header.defer(partial(self.pool.submit, job)):
                return False, _nothing
            return True, job
        except Exception as error:
            self.liveness.give_up(message.source, error)
            return False, _nothing

    def _dispatch_other(self, message: Message) -> tuple[bool, Job]:
        """Return a job for a message that is of no call, or that there was no memory for."""
        if message.kind == SCOPE:
            return False, partial(self._read_scope_message, message)
        if message.lost is not None and message.kind == TERMINATION:
            raise message.lost
        if message.kind == TERMINATION:
            values = self.termination.setdefault(message.tag, {})
            values[message.source] = pickle.loads(bytes(message.text))
            return False, _nothing
        if message.kind == CALL:
            return True, partial(self.executor.execute, message, None)
        return False, partial(self._finish_call, message, None)

    def read(self, message: Message, header: IncomingHeader) -> Any:
        """Return the content of a message that has a header, and let the scope have the tensors within.

        Raises:
            Exception: there is no memory for it, or it cannot be unpickled.
        """
        try:
            return decode(message, header, self.router.borrow)
        finally:
            self._read_scope(message, header)

    def _read_scope(self, message: Message, header: IncomingHeader) -> None:
        if header.mark is not None:
            self.scope.read(header.scope, header.mark, header.attached, message.source)

    def _finish_call(self, message: Message, header: IncomingHeader | None) -> None:
        try:
            self._finishing.add(message.tag)
            call = self.pending.pop(message.tag, None)
            if call is None:  # it took too long
                if header is not None:
                    self._read_scope(message, header)
                return
            value, error = None, None
            try:
                borrow = self.router.borrow
                value = decode(message, None, borrow) if header is None else self.read(message, header)
                if message.kind == FAILURE:
                    error = remote_errors.rebuild(*value)
            except Exception as unreadable:
                error = remote_errors.unreadable_result(unreadable, call, self)
            self.finish(call, value, error)
        finally:
            self._finishing.discard(message.tag)

    def finish(self, call: PendingCall, value: Any, error: BaseException | None) -> None:
        """Complete a call, which is pending no more, with its result."""
        call.keep = None
        call.finished = True  # before callbacks of the future ask it
        if error is None:
            _set_result(call, value)
        else:
            call.set_exception(error)
        if call.latch is not None or call.leading:
            self.pool.wake(call)

    def fail(self, call_id: int, error: Exception) -> None:
        """End a call, if it is pending, by an error."""
        call = self.pending.pop(call_id, None)
        if call is not None:
            self.finish(call, None, error)

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


def _nothing() -> None:
    pass
