"""Tests whose ranks are threads: no start-up cost, the same kernels, one debugger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any, TypeVar, cast, overload

from torchestra.interop.rank_world import join_as_thread, leave
from torchestra.interop.world_names import TORCHESTRA
from torchestra.launcher.threads import ThreadRanks
from torchestra.testing.cases import DEFAULT_TIMEOUT_S, DEFAULT_WORLD_SIZE, RankTests, TestCase
from torchestra.testing.faults import RankKilled
from torchestra.testing.outcomes import Outcome, raise_for
from torchestra.testing.stacks import late_outcome

F = TypeVar("F", bound=Callable[..., Any])

_GRACE_S = 5.0  # for ranks released by the failure of another, even on a busy machine


def start_ranks(
    size: int,
    body: Callable[[int], object],
    timeout: float = DEFAULT_TIMEOUT_S,
    init: bool = True,
    may_die: Container[int] = (),
    world: str = TORCHESTRA,
    store: Any = None,
) -> ThreadRanks:
    """Start ranks that are threads of this process, each in a default group, running one function.

    A rank that raises leaves its groups, so that ranks that wait for it get an error at once.

    Args:
        body: the function that each rank calls, with its rank. Its result is dropped.
        timeout: how long operations of the default group may wait, in seconds.
        init: whether to make the default group before ``body`` is called.
        may_die: ranks that may be killed (faults.kill) without a failure.
        world: the library of the default group, torchestra or torch.distributed.
        store: the value that :func:`~torchestra.interop.rank_world.thread_worlds` yielded.
    """

    def run(rank: int) -> None:
        try:
            if init:
                join_as_thread(world, rank, size, timeout, store)
            body(rank)
        except RankKilled:
            if rank not in may_die:
                raise

    return ThreadRanks(size, run, lambda: leave(world))


def join_ranks(threads: ThreadRanks, timeout: float) -> list[Outcome]:
    """Wait until all ranks have ended, or one has failed and the others have had a moment to notice.

    Returns:
        The outcomes by rank; those that have not ended are ``late``, with their stacks.
    """
    threads.join(timeout, _GRACE_S)
    outcomes = []
    for each in threads.ranks:
        if each.failure is not None:
            outcomes.append(Outcome(each.rank, each.error, each.failure.traceback, each.failure.time))
        elif each.done:
            outcomes.append(Outcome(each.rank))
        else:
            outcomes.append(late_outcome(each.rank, each.frames()))
    return outcomes


@overload
def spawn_threads_and_init_comms(func: F) -> F: ...
@overload
def spawn_threads_and_init_comms(
    func: None = None, timeout: float = ..., world_size: int = ...
) -> Callable[[F], F]: ...
def spawn_threads_and_init_comms(
    func: F | None = None, timeout: float = DEFAULT_TIMEOUT_S, world_size: int = DEFAULT_WORLD_SIZE
) -> F | Callable[[F], F]:
    """Decorate a test (a function or a method) to run on ``world_size`` threads, each a rank.

    Every rank is in a default group already. Can be used with and without arguments.

    Args:
        timeout: how many seconds the whole test may take.
        world_size: how many ranks; default 4.

    Raises:
        RankFailure: a rank raised (the decorated test raises this); has its traceback, and its exception as
            the cause. The others were released at once.
        unittest.SkipTest: a rank raised it, or exited with one of the exit codes of :data:`TEST_SKIPS`.
    """
    if func is None:
        return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)
    test = func

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        threads = start_ranks(world_size, lambda rank: test(*args, **kwargs), timeout)
        raise_for(join_ranks(threads, timeout), "Thread", timeout)

    return cast("F", wrapper)


class MultiThreadedTests(RankTests):
    """Runs each test of a test case on ``world_size`` threads, each a rank in a default group.

    List it before a TestCase among the bases, as in :class:`MultiThreadedTestCase`.

    Call :meth:`_spawn_threads` at the end of your ``setUp``. Every rank has its own instance, with
    ``rank`` set; ``setUp`` and ``tearDown`` run once, on the main thread (rank -1); what each rank
    needs belongs in :meth:`perThreadSetUp` and :meth:`perThreadTearDown`.
    """

    __test__ = False
    MAIN_THREAD_RANK = -1
    _threads: ThreadRanks | None = None

    def perThreadSetUp(self) -> None:
        """Prepare a rank, in its default group, before the test."""

    def perThreadTearDown(self) -> None:
        """Clean up on a rank after the test, however it ended."""

    def _spawn_threads(self) -> None:
        """Start the ranks on the test; call it from ``setUp``."""
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

        self._threads = start_ranks(self.world_size, body, self.timeout)

    def _join(self, test: Callable[[], None]) -> None:
        threads, self._threads = self._threads, None
        if threads is None:
            raise RuntimeError(f"{self.id()}: no ranks were started: call self._spawn_threads() in setUp")
        raise_for(join_ranks(threads, self.timeout), "Thread", self.timeout)

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Call :meth:`assertEqual` on one rank only: all threads draw from one random generator."""
        if self.rank == rank:
            self.assertEqual(x, y, msg)

    def assertNotEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Call :meth:`assertNotEqual` on one rank only."""
        if self.rank == rank:
            self.assertNotEqual(x, y, msg)


class MultiThreadedTestCase(MultiThreadedTests, TestCase):
    """A test case each of whose tests runs on several threads, each a rank in a default group.

    See :class:`~torchestra.testing.threads.MultiThreadedTests`, and :class:`TestCase` for what its
    ``assertEqual`` compares.
    """

    __test__ = False
