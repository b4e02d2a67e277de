"""Graph tasks: one worker's part in a backward pass, and how the workers end the pass together.

The worker where ``backward()`` was called is the *origin*. Every worker takes part once, from the first
message about the pass: it runs torch's own engine once, over everything its roots and its sends lead to.

*Sends* are sources of that graph. Their nodes run after everything else that is ready, the one made last
first; it waits until its gradients have come. *Receipts* send gradients back as soon as they run. For a
receive that nothing leads to, the worker says so at once: its message was not used, and its send has no
gradient to wait for. So every message with tensors in it gets exactly one answer.

*No worker waits for ever.* Say that a worker's send or receive is older than another's if it was made
earlier, by one clock for all. Let s be the youngest send that waits. Its message was received after s was
made, in a receive r, and all nodes that use r's tensors were made later still: the sends among them are
younger than s, so none waits. So everything that leads to r has run, on a worker that takes part; r has run
or was found unused, and has sent the answer that s waits for. Each worker takes part: it gets gradients of
a younger message; or, where the last message between two of them was sent by one that takes part, that one
tells the other to *start*.

*The end.* A worker that has run its graph tells the origin so, with the ranks it has sent to. The origin is
done when all workers that it knows of are. Workers report errors to the origin too; it tells all to stop.

(torch.distributed's FAST mode also has every message of the context take part, but waits for ever for one
that was not used.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from torchestra.autograd import graph
from torchestra.autograd.errors import ErrorRecord, describe, located, rebuild
from torchestra.autograd.gradients import Gradients
from torchestra.autograd.send_recv import RecvRpc, SendRpc
from torchestra.errors import RpcTimeoutError, WorkerFailedError
from torchestra.rpc.agent import Agent
from torchestra.rpc.thread_state import thread_state
from torchestra.system.deadline import RunningClock

Key: TypeAlias = tuple[int, int]
"""The key of a pass: the rank of its origin, and the number of passes begun there before."""

_ONE = torch.ones(())


class Note(NamedTuple):
    """A message about a context between two workers.

    Attributes:
        what: "release", "orphaned", "lost", or of a backward pass "start", "gradients", "late", "done" or
            "abort".
        content: its arguments.
    """

    context: int
    what: str
    key: Key | None = None
    content: tuple[Any, ...] = ()


class _Wait:
    """Something that a thread waits for; see rpc/leader_followers.py."""

    __slots__ = ("finished", "latch", "leading")

    def __init__(self) -> None:
        self.finished = False
        self.leading = False
        self.latch: threading.Lock | None = None


class Contexts(Protocol):
    """The contexts of this worker, as a pass uses them."""

    agent: Agent

    def tell(self, rank: int, note: Note) -> None:
        """Send a note to a worker."""


class Context(Protocol):
    """A context, as a pass uses it; :class:`torchestra.autograd.contexts.Context` is one."""

    @property
    def contexts(self) -> Contexts: ...

    context_id: int
    lock: threading.Lock
    sends: dict[int, SendRpc]
    received: dict[int, RecvRpc]
    seen: int
    neighbours: set[int]
    gradients: Gradients

    def end_task(self, key: Key) -> object:
        """End a pass here."""

    def note_start(self, to: int) -> None:
        """Note that a worker is about to be told of a pass."""

    def tell_release(self, to: int) -> None:
        """Tell a worker if the context was released meanwhile."""

    def retire(self, sends: Sequence[SendRpc], received: Sequence[RecvRpc]) -> None:
        """Forget messages whose graph has been freed."""


class GraphTask:
    """One worker's part in one backward pass.

    Args:
        context: the pass's context.
        retain: keep the graph for further passes.
        informer: the rank that told this one of the pass.
    """

    def __init__(self, context: Context, key: Key, retain: bool, informer: int) -> None:
        self.context = context
        self._contexts = context.contexts
        self._agent = context.contexts.agent
        self._key = key
        self._retain = retain
        self._informer = informer
        self._lock = threading.Lock()
        self._sends: dict[int, SendRpc] | None = None
        self._arrived: dict[int, list[torch.Tensor | None] | None] = {}
        self._informed: set[int] = set()  # the ranks that know of the pass from here
        self._awaited: set[int] = set()  # at the origin: the ranks that take part and are not done
        self._done: set[int] = set()
        self._failure: BaseException | None = None
        self._wait: _Wait | None = None
        self._is_ready: Callable[[], bool] = bool
        self._storages: set[int] = set()

    # -- running

    def run_at_origin(self, roots: Sequence[torch.Tensor]) -> None:
        """Run the whole pass. Called by the origin's thread.

        Raises:
            Exception: the pass has failed, on any worker.
        """
        try:
            self._run(roots)
            with self._lock:
                self._awaited |= self._informed - self._done
            self._await(lambda: not self._awaited, lambda: self._awaited, "the end of the backward pass")
        except BaseException as error:
            self._give_up(error)
            if isinstance(error, Exception) and error is not self._failure:
                raise located(self._agent.number, str(error) or type(error).__name__, error) from error
            raise
        self.context.end_task(self._key)

    def _give_up(self, error: BaseException) -> None:
        """Stop all workers that take part. Called at the origin."""
        self.context.end_task(self._key)
        why = (str(error) or type(error).__name__).partition("\n")[0]
        for rank in tuple(self.context.neighbours - {self._agent.number}):
            self._tell(rank, "abort", f"the backward pass was given up, for: {why}")

    def run_here(self) -> None:
        """Run this worker's task, on a thread of the pool."""
        failed: ErrorRecord | None = None
        try:
            self._run(())
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            failed = describe(self._agent, error)
        self.context.end_task(self._key)
        self._tell(self._key[0], "done", tuple(self._informed), failed)

    def _run(self, roots: Sequence[torch.Tensor]) -> None:
        context = self.context
        with context.lock:
            sends = dict(context.sends)
            received = tuple(context.received.values())
            seen = context.seen
        with self._lock:
            self._sends = sends
        tokens = [send.token for send in sends.values()]
        starts = {tensor.grad_fn for tensor in (*roots, *tokens)}
        reached = graph.prepare(starts, seen)
        for recv in received:
            if recv.node not in reached.received:
                self._send(recv, None)
        for rank in self._peers_to_start(sends.values(), received):
            self._informed.add(rank)
            context.note_start(rank)
            self._tell(rank, "start", self._retain)
            context.tell_release(rank)
        if not starts:
            return
        try:
            with self._tracking_task(reached.reentrant):
                torch.autograd.backward(
                    [*roots, *tokens], [None] * len(roots) + [_ONE] * len(tokens), retain_graph=self._retain
                )
        finally:
            with self._lock:
                self._sends = {}
            if not self._retain:
                context.retire(tuple(sends.values()), received)
        context.gradients.own_views()

    @contextlib.contextmanager
    def _tracking_task(self, reentrant: bool) -> Iterator[None]:
        before, thread_state.graph_task = thread_state.graph_task, self
        try:
            with graph.ParameterTracker() if reentrant else contextlib.nullcontext():
                yield
        finally:
            thread_state.graph_task = before

    def _peers_to_start(self, sends: Collection[SendRpc], received: Collection[RecvRpc]) -> list[int]:
        """Return the ranks to tell of the pass, because they may not learn of it in another way."""
        last: dict[int, tuple[int, bool]] = {}
        for is_send, messages in ((True, sends), (False, received)):
            for message in messages:
                if message.peer not in last or last[message.peer][0] < message.order:
                    last[message.peer] = (message.order, is_send)
        know = (self._agent.number, self._key[0], self._informer)
        return [rank for rank, (_, is_send) in last.items() if is_send and rank not in know]

    # -- called by the nodes of the graph

    def gradients_for(self, message: int) -> list[torch.Tensor | None]:
        """Wait for the gradients of the tensors sent in a message; return them.

        Raises:
            Exception: the pass has failed, or they did not come.
        """
        assert self._sends is not None
        send = self._sends[message]
        peer = self._agent.workers[send.peer].name
        self._await(
            lambda: message in self._arrived,
            lambda: (send.peer,),
            f"the gradients of a message to worker {peer!r}",
        )
        gradients = self._arrived.pop(message)
        if gradients is None:
            return [None] * len(send.kinds)
        return [send.zeros(slot) if each is None else each for slot, each in enumerate(gradients)]

    def send_back(self, message: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send back the gradients of the tensors received in a message.

        Raises:
            RuntimeError: the message takes no part in this pass.
        """
        recv = self.context.received.get(message)
        if recv is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, or through what was received in another"
                " context: a backward() of this context without retain_graph=True has freed the graph of a"
                " message, or a tensor has been kept from an earlier context (detach() it)"
            )
        self._send(recv, gradients)

    def is_first_use_of(self, tensor: torch.Tensor) -> bool:
        """Return whether no tensor sent, and no gradient of another parameter, has used this memory."""
        memory = tensor._values() if tensor.is_sparse else tensor
        address = memory.untyped_storage().data_ptr() if memory.layout is torch.strided else id(tensor)
        is_first = address not in self._storages
        self._storages.add(address)
        return is_first

    def _send(self, recv: RecvRpc, gradients: Sequence[torch.Tensor | None] | None) -> None:
        present = [each for each in gradients or () if each is not None]
        for each in present:
            self.is_first_use_of(each)
        detached = [None if each is None else each.detach() for each in gradients or ()] if present else None
        if recv.peer in self._agent.liveness.gone:
            raise self._gone(recv.peer, "it could be sent gradients")
        if recv.peer != self._agent.number:
            self._informed.add(recv.peer)
        self._tell(recv.peer, "gradients", self._retain, recv.message, detached)

    def _tell(self, rank: int, what: str, *content: Any) -> None:
        self._contexts.tell(rank, Note(self.context.context_id, what, self._key, content))

    # -- called for notes of other workers

    def gradients_came(self, source: int, message: int, gradients: list[torch.Tensor | None] | None) -> None:
        """Take the gradients of the tensors sent in a message; None if it was not used."""
        with self._lock:
            unknown = self._sends is not None and message not in self._sends
            if not unknown:
                self._arrived[message] = gradients
        if unknown and gradients is not None:
            self.fail(
                RuntimeError(
                    f"gradients have come from worker {self._agent.workers[source].name!r} for a message that"
                    " was sent while the backward pass ran: wait for calls before backward()"
                )
            )
        self._wake_if_ready()

    def peer_done(self, rank: int, informed: Collection[int], failed: ErrorRecord | None) -> None:
        """Record that a worker has done its part, and told these ranks of the pass. Called at the origin."""
        if failed is not None:
            self.fail(rebuild(failed))
            return
        with self._lock:
            self._done.add(rank)
            self._awaited |= set(informed)
            self._awaited -= self._done | {self._agent.number}
        self._wake_if_ready()

    def fail(self, error: BaseException) -> None:
        """End the pass here with this error."""
        if self._failure is None:
            self._failure = error
        self._wake_if_ready()

    # -- waiting

    def _wake_if_ready(self) -> None:
        wait = self._wait
        if wait is not None and (self._failure is not None or self._is_ready()):
            wait.finished = True
            self._agent.pool.wake(wait)

    def _await(self, is_ready: Callable[[], bool], peers: Callable[[], Collection[int]], doing: str) -> None:
        """Wait until everything has come that these peers are to send."""
        if self._failure is None and not is_ready():
            agent = self._agent
            clock = RunningClock()
            self._is_ready = is_ready
            wait = self._wait = _Wait()

            def check() -> None:
                gone = [rank for rank in peers() if rank in agent.liveness.gone]
                if gone:
                    self.fail(self._gone(gone[0], f"{doing} came"))
                elif agent.timeout and clock.elapsed() > agent.timeout:
                    self.fail(self._late(peers(), doing, agent.timeout))

            agent.checks.add(check)
            try:
                self._wake_if_ready()
                agent.pool.wait(wait)
            finally:
                agent.checks.discard(check)
                self._wait = None
                self._is_ready = bool  # the former function refers to this task: a reference cycle
        if self._failure is not None:
            raise self._failure
        if not is_ready():
            raise WorkerFailedError(
                f"worker {self._agent.info.name!r} has shut down during a backward pass",
                self._agent.info.name,
            )

    def _gone(self, rank: int, before: str) -> WorkerFailedError:
        agent = self._agent
        return agent.liveness.failure_of(
            rank,
            f"in a backward pass of context {self.context.context_id}, before {before} on worker"
            f" {agent.info.name!r}",
        )

    def _late(self, ranks: Collection[int], doing: str, seconds: float) -> RpcTimeoutError:
        names = ", ".join(repr(self._agent.workers[rank].name) for rank in sorted(ranks))
        return RpcTimeoutError(
            f"worker {self._agent.info.name!r} (rank {self._agent.info.id}) has waited {seconds:g} s in a"
            f" backward pass of context {self.context.context_id} for {doing}, from {names};"
            " set_rpc_timeout() changes how long it waits"
        )
