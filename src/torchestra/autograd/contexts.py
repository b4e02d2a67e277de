"""Contexts: each worker's autograd state for one iteration of a program that spans workers.

A worker makes its part of a context at the first call within it, and removes it when the worker that made the
context releases it: every worker passes the release on to those it has called within the context, or told of
a pass. Where a worker is gone, those that it may have called are told by the worker that made the context.

A worker that loses the maker of a context ends its part, and tells its neighbours so. Others may have their
connection still: these end their passes in the context, which lack that part, and keep the rest of it.

The contexts of a worker are the scope of its messages (rpc/message_scope.py), which this module installs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchestra.autograd import orphans
from torchestra.autograd.gradients import Gradients
from torchestra.autograd.graph import check_roots
from torchestra.autograd.graph_task import GraphTask, Key, Note
from torchestra.autograd.send_recv import RecvRpc, SendRpc, record_recv, record_send
from torchestra.errors import RpcError, WorkerFailedError
from torchestra.rpc.agent import Agent, install_scope
from torchestra.rpc.message_scope import MessageScope

_POLL_SECONDS = 0.1


class Context:
    """A context on one worker.

    Attributes:
        context_id: in the upper 16 of 64 bits the rank of the worker that made it; below, a counter there.
        gradients: the gradients accumulated on this worker.
        called: the ranks that this worker has called within it.
        started: the ranks that this worker has told of a pass, which made the context there if it had ended.
        neighbours: the ranks called, and those that have called this worker.
        sends, received: by the number of the message, in the order in which they were made.
        tasks: the backward passes that run here.
        too_late: by pass that this worker does not know of yet, its messages that take no part in it; each
            after its receiver.
        released: whether it has ended; end_note: what those called are told of that.
        turn: held by the thread that runs a pass that begins here.
    """

    def __init__(self, contexts: ContextContainer, context_id: int) -> None:
        self.contexts = contexts
        self.context_id = context_id
        self.gradients = Gradients()
        self.called: set[int] = set()
        self.started: set[int] = set()
        self.neighbours: set[int] = set()
        self.sends: dict[int, SendRpc] = {}
        self.received: dict[int, RecvRpc] = {}
        self.tasks: dict[Key, GraphTask] = {}
        self.finished: dict[Key, None] = {}
        self.too_late: dict[Key, list[tuple[int, int]]] = {}
        self.released = False
        self.end_note = Note(context_id, "release")
        self.turn = threading.Lock()
        self.lock = threading.Lock()
        self.seen = 0

    # -- messages

    def outgoing(self, to: int, content: object, *, is_call: bool) -> SendRecorder | None:
        """See :class:`~torchestra.rpc.call_scope.CallScope`."""
        with self.lock:
            if self.released:
                return None
            self.neighbours.add(to)
            if is_call and to != self.contexts.rank:
                self.called.add(to)
        return SendRecorder(self, to, content, is_call)

    def note_send(self, to: int, tensors: Sequence[torch.Tensor]) -> int:
        """Record tensors that go to a worker; return the number of the message."""
        message = self.contexts.new_message()
        with self.lock:
            order, self.seen = self.seen, self.seen + 1
        send = record_send(message, to, order, tensors)
        with self.lock:
            if not self.released:
                self.sends[message] = send
        return message

    def note_start(self, to: int) -> None:
        """Note that a worker is about to be told of a pass."""
        with self.lock:
            self.started.add(to)

    def tell_release(self, to: int) -> None:
        """Tell a worker that was called or started if the context was released meanwhile."""
        if self.released:
            self.contexts.tell(to, self.end_note)

    def note_recv(self, source: int, message: int, tensors: list[torch.Tensor]) -> None:
        """Record tensors received from a worker; an empty list if they could not be read."""
        with self.lock:
            order, self.seen = self.seen, self.seen + 1
        if tensors:
            recv = record_recv(message, source, order, tensors)
        else:
            recv = RecvRpc(message, source, order, None)
        with self.lock:
            if self.released:
                return
            self.received[message] = recv
            self.neighbours.add(source)
            late = [*self.tasks, *list(self.finished)[-1:]]
        for key in late:
            # The sender may be waiting for the gradients already.
            self.contexts.tell(source, Note(self.context_id, "late", key, (message,)))

    # -- backward passes

    def task_of(self, key: Key, retain: bool, informer: int) -> GraphTask | None:
        """Return the task of a pass, after starting it if it is new here; None if it is over."""
        with self.lock:
            task = self.tasks.get(key)
            if task is not None:
                return task
            if key in self.finished or self.released:
                return None
            task = self.tasks[key] = GraphTask(self, key, retain, informer)
            for peer, message in self.too_late.pop(key, ()):
                task.gradients_came(peer, message, None)
        if key[0] != self.contexts.rank:
            self.contexts.agent.pool.submit(task.run_here)
        return task

    def note_too_late(self, key: Key, peer: int, message: int) -> None:
        """Note that a message to a peer takes no part in a pass, which this worker may not know of yet."""
        with self.lock:
            task = self.tasks.get(key)
            if task is None and key not in self.finished:
                self.too_late.setdefault(key, []).append((peer, message))
        if task is not None:
            task.gradients_came(peer, message, None)

    def end_task(self, key: Key) -> GraphTask | None:
        """End a pass here; return its task if it was running."""
        with self.lock:
            self.finished[key] = None
            self.too_late.pop(key, None)
            return self.tasks.pop(key, None)

    def retire(self, sends: Sequence[SendRpc], received: Sequence[RecvRpc]) -> None:
        """Forget messages whose graph has been freed: they take no part in other passes."""
        with self.lock:
            for send in sends:
                self.sends.pop(send.message, None)
            for recv in received:
                self.received.pop(recv.message, None)

    def adopt(self, rank: int) -> bool:
        """Have the context released on a worker, as if called from here; return False if it has ended."""
        with self.lock:
            if self.released:
                return False
            self.called.add(rank)
            self.neighbours.add(rank)
            return True

    def release(self, note: Note) -> bool:
        """End the context, of which those called are told by a note; return False if it had ended before."""
        with self.lock:
            if self.released:
                return False
            self.released, self.end_note = True, note
            tasks = tuple(self.tasks.values())
            sends = tuple(self.sends.values())
            self.sends.clear()
            self.received.clear()
            self.gradients = Gradients()
        for task in tasks:
            task.fail(self.contexts.not_found(self.context_id))
        del sends
        return True

    def fail_passes(self, error: WorkerFailedError) -> None:
        """End the passes that run here with an error."""
        with self.lock:
            tasks = tuple(self.tasks.values())
        for task in tasks:
            task.fail(WorkerFailedError(str(error), error.worker))

    # Users of torch.distributed inspect contexts by these names.

    def _context_id(self) -> int:
        return self.context_id

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.called)

    def _send_functions(self) -> dict[int, Any]:
        with self.lock:
            return {message: send.token.grad_fn for message, send in self.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        with self.lock:
            return {context_id: recv.node for context_id, recv in self.received.items() if recv.node}


class ContextMark(NamedTuple):
    """A message's mark: its context, and its own number if it holds tensors that are part of the graph."""

    context: int
    message: int | None


class SendRecorder:
    """Records the tensors in a message that is being pickled within a context.

    A parameter takes part if it is itself an argument or result, or in a list, tuple or dict that is one; the
    parameters of a module that is sent are copied with it.
    """

    __slots__ = ("_content", "_context", "_direct", "_is_call", "_tensors", "_to")

    def __init__(self, context: Context, to: int, content: object, is_call: bool) -> None:
        self._context = context
        self._to = to
        self._content = content
        self._is_call = is_call
        self._tensors: list[torch.Tensor] = []
        self._direct: set[int] | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that requires gradients takes part; if so, record it."""
        if isinstance(tensor, torch.nn.Parameter):
            if self._direct is None:
                self._direct = {id(each) for each in _parameters(self._content)}
            if id(tensor) not in self._direct:
                return False
        self._tensors.append(tensor)
        return True

    def close(self) -> ContextMark | None:
        """End the recording after pickling; return the message's mark, None if it needs none."""
        tensors, self._tensors, self._content = self._tensors, [], None
        if not tensors:
            return ContextMark(self._context.context_id, None) if self._is_call else None
        return ContextMark(self._context.context_id, self._context.note_send(self._to, tensors))

    def sent(self) -> None:
        """Note that the message was sent."""
        self._context.tell_release(self._to)


def _parameters(content: object) -> Iterator[torch.nn.Parameter]:
    if isinstance(content, torch.nn.Parameter):
        yield content
    elif isinstance(content, (tuple, list)):
        for each in content:
            yield from _parameters(each)
    elif isinstance(content, dict):
        yield from _parameters(list(content.values()))


class ContextContainer(MessageScope):
    """All contexts of one worker."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent.info)
        self.agent = agent
        self.rank = agent.number
        self._first = agent.number << orphans.COUNT_BITS
        self._numbers = itertools.count(self._first)
        self._messages = itertools.count(self._first)
        self._passes = itertools.count()
        self._all: dict[int, Context] = {}
        self._lock = threading.Lock()

    @property
    def max_number(self) -> int:
        """Return the greatest number that a context made here can have."""
        return self._first + orphans.MAX_COUNT

    def new(self) -> Context:
        """Make a context on this worker, and return it."""
        context = Context(self, next(self._numbers))
        self._all[context.context_id] = context
        return context

    def new_message(self) -> int:
        """Return a number for a message."""
        return next(self._messages)

    def new_pass(self) -> Key:
        """Return a name for a backward pass."""
        return (self.rank, next(self._passes))

    def find(self, context_id: int) -> Context | None:
        """Return the context with a number, if this worker has it."""
        return self._all.get(context_id)

    def get(self, context_id: int) -> Context:
        """Return the context with a number.

        Raises:
            RpcError: this worker does not have it, or not the whole of it: a call may have made it anew.
        """
        context = self._all.get(context_id)
        if context is None or orphans.is_orphan(self.agent, context_id):
            raise self.not_found(context_id)
        return context

    def not_found(self, scope_id: int) -> RpcError:
        """See :class:`~torchestra.rpc.message_scope.MessageScope`."""
        return orphans.not_found(self.agent, scope_id) or super().not_found(scope_id)

    def enter(self, mark: ContextMark, source: int, *, is_call: bool) -> Context | None:
        """Return the context of a received message; make it here if the message is a call."""
        if not is_call:
            return self.find(mark.context)
        with self._lock:
            context = self._all.get(mark.context)
            if context is None:
                context = self._all[mark.context] = Context(self, mark.context)
        context.neighbours.add(source)
        return context

    def read(
        self, scope: Context | None, mark: ContextMark, tensors: list[torch.Tensor], source: int
    ) -> None:
        """Record the tensors in a message that has been unpickled."""
        if mark.message is None:
            return
        if scope is not None and not scope.released:
            scope.note_recv(source, mark.message, tensors)
        else:
            for tensor in tensors:
                tensor.requires_grad_()

    def release(self, context_id: int) -> None:
        """End a context, here and on all workers that this one has called, or told of a pass, within it."""
        self._end(Note(context_id, "release"))

    def _end(self, note: Note) -> None:
        with self._lock:
            context = self._all.pop(note.context, None)
        if context is not None and context.release(note):
            waiting = tuple(context.neighbours) if note.what == "lost" else ()
            for rank in (context.called | context.started).union(waiting) - {self.rank}:
                self.tell(rank, note)

    def backward(self, scope_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a backward pass that begins here; see :func:`torchestra.autograd.backward`."""
        context = self.get(scope_id)
        check_roots(roots)
        if torch._C._autograd._profiler_enabled():
            with torch.autograd.profiler.record_function("torch::distributed::autograd::backward"):
                self._run(context, roots, retain_graph)
        else:
            self._run(context, roots, retain_graph)

    def _run(self, context: Context, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        key = self.new_pass()
        while not context.turn.acquire(timeout=_POLL_SECONDS):
            pass
        try:
            task = context.task_of(key, bool(retain_graph), key[0])
            if task is None:
                raise self.not_found(context.context_id)
            task.run_at_origin(roots)
        finally:
            context.turn.release()

    # -- what workers tell each other

    def tell(self, to: int, note: Note) -> None:
        """Send a note to a worker, unless the worker is gone."""
        agent = self.agent
        if not agent.closed and to not in agent.liveness.gone:
            agent.send_scope_message(to, note)

    def checked(self, note: Any) -> Any:
        """See :class:`~torchestra.rpc.message_scope.MessageScope`."""
        if not isinstance(note, Note):
            raise ValueError(f"not a note of an autograd context: {note!r:.100}")
        return note

    def receive(self, source: int, note: Note) -> None:
        """See :class:`~torchestra.rpc.message_scope.MessageScope`."""
        context_id, what, key, content = note
        if what == "orphaned":
            self._adopt(source, context_id)
        elif what == "lost":
            self._lose_part(source, context_id, *content)
        elif key is None:
            self.release(context_id)
        elif what in ("gradients", "start") and orphans.is_orphan(self.agent, context_id):
            self.tell(source, orphans.lost_note(self.agent, context_id))
        else:
            self._receive_of_pass(source, context_id, what, key, content)

    def _receive_of_pass(
        self, source: int, context_id: int, what: str, key: Key, content: tuple[Any, ...]
    ) -> None:
        context = self._all.get(context_id)
        if what == "start" and context is None:
            # The call by which the sender knows this worker may come later: it is noted before it is sent.
            context = self.enter(ContextMark(context_id, None), source, is_call=True)
        if what in ("gradients", "start"):
            self._join_pass(source, context_id, context, key, *content)
        elif context is not None and what == "abort":
            self._abort(context, source, key, *content)
        elif context is not None and what == "late":
            context.note_too_late(key, source, *content)
        elif context is not None and (task := context.tasks.get(key)) is not None:
            task.peer_done(source, *content)

    def _join_pass(
        self,
        source: int,
        context_id: int,
        context: Context | None,
        key: Key,
        retain: bool,
        message: int | None = None,
        gradients: Any = None,
    ) -> None:
        if context is None:
            error = (self.rank, str(self.not_found(context_id)), None, "")
            self.tell(key[0], Note(context_id, "done", key, ((), error)))
            return
        task = context.task_of(key, retain, source)
        if task is not None and message is not None:
            task.gradients_came(source, message, gradients)

    def _abort(self, context: Context, source: int, key: Key, text: str) -> None:
        if key in context.finished:
            return
        task = context.end_task(key)
        if task is not None:
            task.fail(RpcError(text))
        for rank in tuple(context.neighbours):
            if rank not in (source, self.rank):
                self.tell(rank, Note(context.context_id, "abort", key, (text,)))

    # -- ends

    def remove_lost(self, rank: int) -> None:
        """End the contexts made by a worker that is gone.

        It releases none any more on those that it has called: so these ask the worker that made the context.
        """
        for context_id, context in self._all.copy().items():
            if rank == orphans.made_by(context_id) or rank in context.neighbours:
                self._end_or_ask(context_id)

    def _end_or_ask(self, context_id: int) -> None:
        """End a context if its maker is gone; else ask that one to release it here too."""
        if orphans.is_orphan(self.agent, context_id):
            self._end(orphans.lost_note(self.agent, context_id))
        elif (maker := orphans.made_by(context_id)) != self.rank:
            self.tell(maker, Note(context_id, "orphaned"))

    def _lose_part(self, source: int, context_id: int, how: str) -> None:
        """Note that another worker has ended its part, as the worker that made the context is gone for it."""
        context = self._all.get(context_id)
        if context is not None:
            context.fail_passes(orphans.part_is_lost(self.agent, source, context_id, how))
            self._end_or_ask(context_id)

    def _adopt(self, rank: int, context_id: int) -> None:
        """Release a context made here, when it ends, on a worker that nobody else tells."""
        context = self._all.get(context_id)
        if context is None or not context.adopt(rank):
            self.tell(rank, Note(context_id, "release"))

    def close(self) -> None:
        """End all contexts."""
        for context_id in tuple(self._all):
            self.release(context_id)

    def counts(self) -> dict[str, int]:
        """Return how many contexts and running backward passes there are, by torch.distributed's names."""
        contexts = tuple(self._all.values())
        return {
            "num_current_backward_passes": sum(len(context.tasks) for context in contexts),
            "num_autograd_contexts": len(contexts),
        }


def contexts_of(agent: Agent) -> ContextContainer:
    """Return the contexts of a worker."""
    scope = agent.scope
    assert isinstance(scope, ContextContainer)
    return scope


install_scope(ContextContainer)
