"""In which order the operations of a group run on a rank: the program's.

A synchronous operation with nothing pending runs on the calling thread; otherwise, and with ``async_op``,
operations queue for the group's progress thread, or whoever waits for them first (engine/progress.py). They
can also be collected first and then be run as one.

Ranks find each other's operations by counting them: each that a kernel begins takes the next sequence number.
So **an operation that was called, and whose arguments are right, takes all its numbers, or the group is
aborted.** If one failed here before its kernel began (no memory for a copy), or between two of its kernels,
this rank's next operation would take its place with the peers: kinds and sizes may agree, and they would get
the sum of two different things. Errors that leave the numbers right, or that all ranks raise (arguments,
a mismatch), leave the group usable. Operations that are collected have been called: they are run, also behind
a mismatch, or the group is aborted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torchestra.arguments.annotations import check_flag
from torchestra.communicator import profiling
from torchestra.communicator.work import Work
from torchestra.engine.entry_layout import INSIDE, State
from torchestra.engine.interface import Engine
from torchestra.engine.kernels import shared_words
from torchestra.engine.progress import ProgressThread, Task
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import (
    CollectiveMismatchError,
    DistError,
    GroupAbortedError,
    GroupDestroyedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
)
from torchestra.system.forking import refusal

Operation = Callable[[str | None], list[Any]]
"""Runs an operation, given the line that called it if that is not on this thread's stack; its result."""

_CLOSE_SECONDS = 5.0

RAISED_BY_ALL = (CollectiveMismatchError, InvalidArgumentError, InvalidArgumentTypeError)
"""What every rank raises in the same operation."""


class CoalescedOperation(NamedTuple):
    """An operation that was called inside :meth:`OperationQueue.coalescing`, and is still to be run."""

    operation: Operation
    description: str
    work: Work | None
    reads: Sequence[torch.Tensor]
    operations: int


class OperationQueue:
    """The operations that a rank runs in one group, one at a time."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.closed = False
        # The name of the group that shrink() has put in this one's place.
        self.became = ""
        # What entries look at, and this tells them.
        self.state = State() if engine.state is None else engine.state
        self.thread = ProgressThread(f"torchestra-{name}-{engine.rank}", state=self.state)
        # Held while an operation runs, so that two threads of one rank do not mix theirs; an entry does not
        # take it, but see engine/entry_layout.py.
        self.lock = threading.Lock()
        # By thread: the operations called inside `coalescing`.
        self._coalesced: dict[int, list[CoalescedOperation]] = {}
        # The sequence number when what is queued has been run; of no meaning when nothing is.
        self._promised = 0
        self._inherited = False

    def forget(self) -> None:
        """Refuse everything: this is a forked child, which is not part of the group."""
        self.closed = self._inherited = True
        # What is queued is the parent's, and a thread that does not exist here may have had the locks.
        self.thread = ProgressThread(f"torchestra-{self.name}-{self.engine.rank}")
        self.lock = threading.Lock()

    def run(
        self,
        operation: Operation,
        description: str,
        async_op: bool = False,
        operations: int = 1,
        reads: Sequence[torch.Tensor] = (),
    ) -> Work | None:
        """Run an operation in the group's order: here and now, or after those that are queued.

        Args:
            operation: what to run; nobody else uses the engine meanwhile.
            description: of it, for messages.
            async_op: whether only to queue it, and return its Work at once.
            operations: how many of the engine's it consists of, at most.
            reads: the tensors that it reads, for profilers.
        """
        if self.closed:
            self.refuse_if_closed(description)
        if async_op is not False and async_op is not True:
            async_op = check_flag(async_op, "async_op", description)
        if self._coalesced and (steps := self._coalesced.get(threading.get_ident())) is not None:
            work = self.new_work(description, held=True) if async_op else None
            steps.append(CoalescedOperation(operation, description, work, reads, operations))
            return work
        if profiler._is_profiler_enabled and profiling.wanted():
            with profiling.recorded(description, reads):
                return self._run_or_queue(operation, description, async_op, operations)
        return self._run_or_queue(operation, description, async_op, operations)

    def _run_or_queue(
        self, operation: Operation, description: str, async_op: bool, operations: int
    ) -> Work | None:
        """Run an operation that is not to be collected: here and now, or queue it."""
        # A callback of an asynchronous operation runs on the progress thread, and cannot wait for its queue.
        if not async_op and (not self.thread.pending or self.thread.is_current()):
            self.perform(operation, description, operations)
            return None
        if self.engine.is_fake:
            return Work.finished(f"{description} of group {self.name!r}", operation(None))
        work = self.new_work(description)
        if async_op and self.thread.is_current():
            # Nor can it wait for what would be queued: on a rank where it is called earlier, before anything
            # else was queued, the operation comes first too.
            self._run_at_once(partial(self.perform, operation, description, operations), work)
            return work
        queued = _Queued(self, operation, description, operations, call_site(), work)
        work.progress, work.start = partial(self._make_progress, work), self.thread.start_now
        self._promised = self.sequence_number() + operations
        try:  # abort_on_error(), without the cost of a context manager
            self.thread.submit(queued)
        except BaseException as error:
            if not isinstance(error, RAISED_BY_ALL):
                self.leave(description, error)
            raise
        if async_op:
            return work
        work.wait()
        return None

    def _make_progress(self, work: Work) -> None:
        # What this thread traces or counts is the program's doing, and not how an operation is run.
        if _get_current_dispatch_mode() is None and _get_current_function_mode() is None:
            self.thread.progress(work.is_completed)
        else:
            self.thread.start_now()

    def perform(
        self, operation: Operation, description: str, operations: int, site: str | None = None
    ) -> list[Any]:
        """Run an operation, whose turn it is; returns its result.

        If that fails here, and has not taken as many sequence numbers as elsewhere, the group is aborted.
        """
        state = self.state
        with self.lock:
            try:
                # An interrupt here is as if it had come before the call.
                state.general = 1
                if state.inside:
                    self.await_entry()
                before = self.engine.sequence_number()
                try:
                    return operation(site)
                except BaseException as error:
                    if not isinstance(error, RAISED_BY_ALL) and (
                        self.engine.sequence_number() != before + operations
                    ):
                        self.leave(description, error)
                    raise
            finally:
                state.general = 0

    def await_entry(self) -> None:
        """Wait until no thread runs an operation by an entry; with the lock, and GENERAL set."""
        state = self.state
        try:
            state.wanted = 1
            while state.inside:
                shared_words.sleep_while(state.address + INSIDE, 1)
        finally:
            state.wanted = 0

    @contextlib.contextmanager
    def abort_on_error(self, description: str) -> Iterator[None]:
        """Abort the group if the block, part of an operation, is left by an error of this rank alone."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RAISED_BY_ALL):
                self.leave(description, error)
            raise

    def leave(self, description: str, error: BaseException) -> str:
        """Abort the group because this rank does not do its part of an operation; returns why.

        Not if the rank has destroyed the group: the others are told that by its state.
        """
        lines = str(error).splitlines()
        told = f": {lines[0]}" if lines else ""
        why = f"rank {self.engine.rank} left {description} with {type(error).__name__}{told}"
        if not (self.closed or self.engine.is_aborted):
            self.engine.abort(why)
        return why

    @staticmethod
    def _run_at_once(perform: Callable[[], list[Any]], work: Work) -> None:
        try:
            result = perform()
        except BaseException as error:
            work.fail(error)
        else:
            work.finish(result)

    @contextlib.contextmanager
    def coalescing(self) -> Iterator[list[CoalescedOperation]]:
        """Operations that this thread calls while the block runs are checked and listed, but not run.

        (Messages are not operations of the whole group, and are not held back.) To be handed to
        :meth:`run_coalesced`, or run as part of another operation. If the block is left by an error of this
        rank alone after an operation was collected, the group is aborted.
        """
        thread = threading.get_ident()
        outer = self._coalesced.get(thread)
        steps = self._coalesced[thread] = []
        self._promised = self.sequence_number()
        self.thread.add_pending()  # so that no call goes past `run`
        try:
            yield steps
        except BaseException as error:
            for step in steps:
                if step.work is not None:
                    step.work.fail(
                        DistError(f"{step.description} was not run: its block ended with {error!r}")
                    )
            if steps and not isinstance(error, RAISED_BY_ALL):
                self.leave(describe_coalesced(steps), error)
            raise
        finally:
            self.thread.remove_pending()
            if outer is None:
                del self._coalesced[thread]
            else:
                self._coalesced[thread] = outer

    def run_coalesced(
        self,
        steps: Sequence[CoalescedOperation],
        description: str,
        async_op: bool = False,
        result: list[Any] | None = None,
    ) -> Work | None:
        """Run collected operations, one after the other, as one.

        Those after one that every rank fails alike are run, because other ranks may have called them one by
        one; then the first such error is raised. Those after any other failure are not run. The result is
        ``result``, or else their results in one list.
        """

        def operation(site: str | None) -> list[Any]:
            results: list[Any] = []
            first: Exception | None = None
            left = list(steps)
            try:
                while left:
                    try:
                        results.extend(own := left[0].operation(site))
                    except RAISED_BY_ALL as error:
                        first = first or error
                        if (work := left.pop(0).work) is not None:
                            work.fail(error)
                    else:
                        if (work := left.pop(0).work) is not None:
                            work.finish(own)
            except BaseException as error:
                for step in left:
                    if step.work is not None:
                        step.work.fail(error)
                raise
            if first is not None:
                raise first
            return results if result is None else result

        for step in steps:
            if step.work is not None:
                step.work.held = False
        reads = [tensor for step in steps for tensor in step.reads]
        return self.run(operation, description, async_op, count_operations(steps), reads)

    def sequence_number(self) -> int:
        """Return how many operations of the whole group this rank has called, queued ones included."""
        return self._promised if self.thread.pending else self.engine.sequence_number()

    def new_work(self, description: str, *, held: bool = False) -> Work:
        return Work(f"{description} of group {self.name!r}", held=held)

    def close(self) -> None:
        """Run what is queued, then leave the group. In a forked child nothing is to be done."""
        if self._inherited:
            return
        self.closed = True
        self.thread.close(_CLOSE_SECONDS)
        self.engine.close()

    def refuse_if_inherited(self, name: str) -> None:
        """Raise ForkedProcessError in a process that was forked from the rank."""
        if self._inherited:
            raise refusal(f"{name}: group {self.name!r} of rank {self.engine.rank} cannot be used")

    def refuse_if_closed(self, name: str) -> None:
        if self.closed:
            self.refuse_if_inherited(name)
            raise GroupDestroyedError(
                f"{name}: rank {self.engine.rank} has {'shrunk' if self.became else 'destroyed'} group"
                f" {self.name!r}" + (f"; {self.became!r} is in its place" if self.became else "")
            )


def count_operations(steps: Sequence[CoalescedOperation]) -> int:
    """Return how many operations of the engine some collected ones consist of, at most."""
    return sum(step.operations for step in steps)


def describe_coalesced(steps: Sequence[CoalescedOperation]) -> str:
    """Return what some collected operations are called when they are run as one."""
    return f"coalesced {', '.join(dict.fromkeys(step.description for step in steps))}"


class _Queued(Task):
    """An operation in the queue.

    It may be run by the program's main thread, in which an interrupt can come between any two lines but never
    between an assignment and the ``try`` after it. What is left to do when that has happened is done by
    calling it again.
    """

    def __init__(
        self,
        queue: OperationQueue,
        operation: Operation,
        description: str,
        operations: int,
        site: str,
        work: Work,
    ) -> None:
        self.ran = False
        self.interrupt: BaseException | None = None
        self._queue = queue
        self._operation = operation
        self._description = description
        self._operations = operations
        self._site = site
        self.new_work = work
        self._result: list[Any] = []
        self._error: BaseException | None = None

    def is_bound(self) -> bool:
        return self.new_work.has_future()

    def __call__(self, let_go: Callable[[], None]) -> None:
        if not self.ran:
            self.ran = True
            try:
                self._result = self._queue.perform(
                    self._operation, self._description, self._operations, self._site
                )
            except BaseException as error:
                self._error = error
        failure = self._error
        if failure is None:
            self.new_work.finish(self._result, let_go=let_go)
            return
        if not isinstance(failure, Exception):
            self.interrupt = failure
            # The peers have been promised this operation, and those behind it must not take its place.
            why = self._queue.leave(self._description, failure)
            # The interrupt itself is for who runs this, once; who waits for the operation later learns this.
            failure = GroupAbortedError(
                f"rank {self._queue.engine.rank}: group {self._queue.name!r} can no longer be used: {why}"
            )
        self.new_work.fail(failure, let_go)
