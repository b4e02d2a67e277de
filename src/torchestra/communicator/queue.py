"""The queue that runs a group's operations on a rank, in the program's order.

A synchronous operation with nothing pending runs on the calling thread; otherwise, and with ``async_op``,
operations queue for the group's progress thread, or the first thread that waits for them
(engine/progress.py). They can also be collected first and then be run as one.

Ranks match each other's operations by counting them: each that a kernel begins takes the next sequence
number. So **an operation that was called, and whose arguments are right, takes all its numbers, or the group
is aborted.** If one failed here before its kernel began (no memory for a copy), or between two of its
kernels, the peers would match it with this rank's next operation: kinds and sizes may agree, and they would
get the sum of two unrelated tensors. Errors that leave the numbers right, or that all ranks raise (arguments,
a mismatch), leave the group usable. Collected operations count as called: they are run, even after a
mismatch, or the group is aborted.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import profiler
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torchestra.arguments.annotations import check_flag
from torchestra.communicator import profiling
from torchestra.communicator.work import Work
from torchestra.engine import layout as at
from torchestra.engine.entry_layout import INSIDE, State
from torchestra.engine.interface import Engine
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
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
"""Runs an operation and returns its result; takes the calling line if it is not on this thread's stack."""

_CLOSE_SECONDS = 5.0

RAISED_BY_ALL = (CollectiveMismatchError, InvalidArgumentError, InvalidArgumentTypeError)
"""Errors that every rank raises in the same operation."""


class CoalescedOperation(NamedTuple):
    """An operation that was called inside :meth:`OperationQueue.coalescing`, and is still to be run."""

    operation: Operation
    description: str
    work: Work | None
    reads: Sequence[torch.Tensor]
    operations: int


def _depth_word(engine: Engine) -> npt.NDArray[np.int64] | None:
    """Return the word of the rank's flight record that tells how many operations are queued."""
    if engine.context is None:
        return None
    arena: Arena = engine.context.arena
    return arena.words(arena.record(engine.context.rank) + at.QUEUED, 1)


class OperationQueue:
    """Run the operations of a rank in one group, one at a time.

    Attributes:
        raises_at_call: wait for asynchronous operations where they are called, so that what they raise is
            raised there.
    """

    raises_at_call = False

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.closed = False
        # The name of the group by which shrink() has replaced this one.
        self.became = ""
        # The state that this queue sets and entries read.
        self.state = State() if engine.state is None else engine.state
        self.thread = ProgressThread(
            f"torchestra-{name}-{engine.rank}", state=self.state, depth=_depth_word(engine)
        )
        # Held while an operation runs, so that two threads of one rank do not mix theirs; an entry does not
        # take it, but see engine/entry_layout.py.
        self.lock = threading.Lock()
        # By thread: the operations called inside `coalescing`.
        self._coalesced: dict[int, list[CoalescedOperation]] = {}
        # The sequence number once all queued operations have run; meaningless when none is queued.
        self._promised = 0
        self._inherited = False

    def forget(self) -> None:
        """Refuse everything: this is a forked child, which is not part of the group."""
        self.closed = self._inherited = True
        # The queued operations are the parent's, and a thread that does not exist here may hold the locks.
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
            operation: the function to run; no other thread uses the engine meanwhile.
            description: its description, for messages.
            async_op: whether only to queue it, and return its Work at once.
            operations: how many of the engine's operations it consists of, at most.
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
            # Nor can the operation be queued: on a rank where the callback is called before anything else was
            # queued, it runs first.
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
        if async_op and not self.raises_at_call:
            return work
        work.wait()
        return work if async_op else None

    def _make_progress(self, work: Work) -> None:
        # Tracing and counting modes of this thread are the program's, and must not affect the operation.
        if _get_current_dispatch_mode() is None and _get_current_function_mode() is None:
            self.thread.progress(work.is_completed)
        else:
            self.thread.start_now()

    def perform(
        self, operation: Operation, description: str, operations: int, site: str | None = None
    ) -> list[Any]:
        """Run an operation whose turn it is; return its result.

        If it fails here without taking as many sequence numbers as on other ranks, the group is aborted.
        """
        state = self.state
        with self.lock:
            try:
                # An interrupt here is as if it had come before the call.
                state.general = 1
                if state.inside:
                    self.await_entry()
                if state.started:
                    self.end_started()
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
        """Wait until no thread runs an operation by an entry; call with the lock held and GENERAL set."""
        state = self.state
        try:
            state.wanted = 1
            while state.inside:
                shared_words.sleep_while(state.address + INSIDE, 1)
        finally:
            state.wanted = 0

    def end_started(self) -> None:
        """End the operation that machine code has started; call with the lock held and GENERAL set."""
        ctypes.cast(self.state.started, ctypes.py_object).value.end_started()

    def end_all(self, timeout_s: float) -> None:
        """Let operations that were called end; wait at most ``timeout_s``."""
        if self.state.started:
            self.run(lambda site: [], "the end of a persistent operation", True, operations=0)
        self.thread.drain(timeout_s)

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
        """Abort the group because this rank does not do its part of an operation; return the reason.

        Do not abort if the rank has destroyed the group: its state tells the others.
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
        """Check and list the operations that this thread calls in the block, but do not run them.

        (Messages are not operations of the whole group, and are not held back.) The caller passes the list to
        :meth:`run_coalesced`, or runs it as part of another operation. If the block is left by an error of
        this rank alone after an operation was collected, the group is aborted.
        """
        thread = threading.get_ident()
        outer = self._coalesced.get(thread)
        steps = self._coalesced[thread] = []
        self._promised = self.sequence_number()
        self.thread.add_pending()  # so that no call bypasses `run`
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

        Operations after one that fails on every rank alike are run, because other ranks may have called them
        one by one; then the first such error is raised. Those after any other failure are not run. The result
        is ``result``, or else their results in one list.
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

    def has_unfinished(self) -> bool:
        """Return whether operations that were called have not ended; messages are not counted."""
        return bool(self.thread.pending or self.state.started)

    def new_work(self, description: str, *, held: bool = False) -> Work:
        return Work(f"{description} of group {self.name!r}", held=held)

    def close(self) -> None:
        """Run the queued operations, then leave the group; do nothing in a forked child."""
        if self._inherited:
            return
        if self.state.started:
            self.end_all(_CLOSE_SECONDS)
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
    """Return how many of the engine's operations the collected ones consist of, at most."""
    return sum(step.operations for step in steps)


def describe_coalesced(steps: Sequence[CoalescedOperation]) -> str:
    """Return the description of collected operations that run as one."""
    return f"coalesced {', '.join(dict.fromkeys(step.description for step in steps))}"


class _Queued(Task):
    """An operation in the queue.

    The program's main thread may run it, where an interrupt can come between any two lines but never between
    an assignment and the ``try`` after it. After an interrupt it is called again, and does the rest.
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

    def is_in_callbacks(self) -> bool:
        return self.new_work.is_in_callbacks()

    def __call__(self, dequeue: Callable[[], None]) -> None:
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
            self.new_work.finish(self._result, dequeue=dequeue)
            return
        if not isinstance(failure, Exception):
            self.interrupt = failure
            # The peers have been promised this operation, and those behind it must not take its place.
            why = self._queue.leave(self._description, failure)
            # The thread that runs this gets the interrupt itself, once; later waiters get this error.
            failure = GroupAbortedError(
                f"rank {self._queue.engine.rank}: group {self._queue.name!r} can no longer be used: {why}"
            )
        self.new_work.fail(failure, dequeue)
