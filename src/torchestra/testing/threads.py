"""Tests whose ranks are threads: no start-up cost, the same kernels, one debugger."""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Container
from typing import Any, TypeVar, cast, overload

from torchestra.store import HashStore
from torchestra.testing.assertions import TestCase, WithoutTests
from torchestra.testing.faults import RankKilled
from torchestra.testing.outcomes import Outcome, raise_for
from torchestra.world.init import destroy_process_group, init_process_group, is_initialized
from torchestra.world.registry import thread_rank

__all__ = ["MultiThreadedTestCase", "MultiThreadedTests", "ThreadRanks", "spawn_threads_and_init_comms"]

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_WORLD_SIZE = 4
DEFAULT_TIMEOUT = 300.0
_GRACE = 2.0  # for ranks that have been released by another's failure


class ThreadRanks:
    """Ranks that are threads of this process, each in a default group, running one function.

    When a rank raises it leaves its groups, so that those that wait for it get an error at once. A thread
    cannot be ended from outside: a rank that hangs in something else is left behind as a daemon.

    Args:
        size: how many.
        body: what each calls, with its rank. Its result is dropped.
        timeout: how long operations of the default group may wait, in seconds.
        init: whether to make the default group before ``body`` is called.
        may_die: ranks whose being killed (faults.kill) is no failure.
    """

    def __init__(
        self,
        size: int,
        body: Callable[[int], object],
        timeout: float = DEFAULT_TIMEOUT,
        init: bool = True,
        may_die: Container[int] = (),
    ) -> None:
        self.size = size
        self._may_die = may_die
        self._body = body
        self._timeout = timeout
        self._init = init
        self._store = HashStore()
        self._outcomes: dict[int, Outcome] = {}
        self._changed = threading.Condition()
        self.threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int) -> None:
        outcome = Outcome(rank)
        try:
            with thread_rank(rank, self.size, self._store):
                try:
                    if self._init:
                        init_process_group(timeout=self._timeout)
                    self._body(rank)
                    if is_initialized():
                        destroy_process_group()
                    outcome.time = time.monotonic()
                except BaseException as error:
                    # Before the groups are destroyed, so that the peers' errors come later.
                    outcome = Outcome.of(rank, error)
        except BaseException as error:
            outcome = Outcome.of(rank, error)
        finally:
            if rank in self._may_die and isinstance(outcome.error, RankKilled):
                outcome = Outcome(rank)
            with self._changed:
                self._outcomes[rank] = outcome
                self._changed.notify_all()

    def join(self, seconds: float = DEFAULT_TIMEOUT) -> list[Outcome]:
        """Wait until all ranks have ended, or one has failed and the others were given a moment to notice.

        Args:
            seconds: how long to wait.

        Returns:
            The outcomes by rank; those that have not ended are ``late``, with their stacks.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._outcomes) == self.size or self._any_error(), seconds)
            if self._any_error():
                self._changed.wait_for(lambda: len(self._outcomes) == self.size, _GRACE)
            return [self._outcomes.get(rank) or self._late(rank) for rank in range(self.size)]

    def _any_error(self) -> bool:
        return any(outcome.error is not None for outcome in self._outcomes.values())

    def _late(self, rank: int) -> Outcome:
        frame = sys._current_frames().get(self.threads[rank].ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return Outcome(rank, text=f"It was here:\n{stack}", late=True)


@overload
def spawn_threads_and_init_comms(func: F) -> F: ...
@overload
def spawn_threads_and_init_comms(
    func: None = None, timeout: float = ..., world_size: int = ...
) -> Callable[[F], F]: ...
def spawn_threads_and_init_comms(
    func: F | None = None, timeout: float = DEFAULT_TIMEOUT, world_size: int = DEFAULT_WORLD_SIZE
) -> F | Callable[[F], F]:
    """Decorate a test (a function or a method) to run on ``world_size`` threads, each a rank.

    Every rank is in a default group already. Can be used with and without arguments.

    Args:
        timeout: seconds that the whole may take.
        world_size: how many ranks; default 4.

    Raises:
        RankFailure: a rank raised (so raises the decorated test); carries its traceback, and its exception as
            the cause. The others were released at once.
        unittest.SkipTest: a rank raised it, or left with one of the exit codes of :data:`TEST_SKIPS`.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)
    test = func

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        ranks = ThreadRanks(world_size, lambda rank: test(*args, **kwargs), timeout)
        raise_for(ranks.join(timeout), "Thread", timeout)

    return cast("F", wrapper)


class MultiThreadedTests(WithoutTests):
    """Has each test of a test case run on ``world_size`` threads, each a rank in a default group.

    To be put before a kind of TestCase, as in :class:`MultiThreadedTestCase`.

    Call :meth:`_spawn_threads` at the end of your ``setUp``. Every rank has an instance of its own, with
    ``rank`` set; ``setUp`` and ``tearDown`` run once, on the main thread (rank -1), and what each rank
    needs belongs into :meth:`perThreadSetUp` and :meth:`perThreadTearDown`.
    """

    __test__ = False
    MAIN_THREAD_RANK = -1
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that one test may take."""

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        if methodName != "runTest":
            method_name = methodName
        super().__init__(method_name)
        self.rank = self.MAIN_THREAD_RANK
        test = getattr(self, method_name, None)
        if test is not None:
            setattr(self, method_name, types.MethodType(_joining(test), self))

    @property
    def world_size(self) -> int:
        """How many ranks; override it."""
        return DEFAULT_WORLD_SIZE

    def setUp(self) -> None:
        """Once per test, on the main thread."""
        super().setUp()
        self.rank = self.MAIN_THREAD_RANK
        self._ranks: ThreadRanks | None = None

    def perThreadSetUp(self) -> None:
        """On every rank, in its default group, before the test."""

    def perThreadTearDown(self) -> None:
        """On every rank after the test, whatever became of it."""

    def _spawn_threads(self) -> None:
        """Start the ranks on the test; to be called from ``setUp``."""
        name = self._testMethodName
        cases = [type(self)(name) for _ in range(self.world_size)]

        def body(rank: int) -> None:
            case = cases[rank]
            case.rank = rank
            case.perThreadSetUp()
            try:
                getattr(case, name)()
            finally:
                case.perThreadTearDown()

        self._ranks = ThreadRanks(self.world_size, body, self.timeout)

    def _join_ranks(self) -> None:
        if self._ranks is None:
            raise RuntimeError(f"{self.id()}: no ranks were started: call self._spawn_threads() in setUp")
        ranks, self._ranks = self._ranks, None
        raise_for(ranks.join(self.timeout), "Thread", self.timeout)

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """:meth:`assertEqual`, on one rank only: all threads draw from one random generator."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """:meth:`assertNotEqual`, on one rank only."""
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)


def _joining(test: Callable[[], None]) -> Callable[[MultiThreadedTests], None]:
    """On the main thread, wait for the ranks; on a rank, run the test."""

    @functools.wraps(test)
    def join_or_run(case: MultiThreadedTests) -> None:
        if case.rank == case.MAIN_THREAD_RANK:
            case._join_ranks()
        else:
            test()

    return join_or_run


class MultiThreadedTestCase(MultiThreadedTests, TestCase):
    """A test case each of whose tests runs on several threads, each a rank in a default group.

    See :class:`~torchestra.testing.threads.MultiThreadedTests`, and :class:`TestCase` for what its
    ``assertEqual`` compares.
    """

    __test__ = False
