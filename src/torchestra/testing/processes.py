"""Tests whose ranks are processes, from the launcher's warm fork server."""

from __future__ import annotations

import contextlib
import os
import tempfile
import unittest
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchestra.errors import LaunchTimeoutError, RankError
from torchestra.launcher.api import launched
from torchestra.testing.cases import RankTests, TestCase
from torchestra.testing.outcomes import RankFailure
from torchestra.testing.skips import TEST_SKIPS, skip_reason
from torchestra.world.init import destroy_process_group, is_initialized

_SETTLE_S = 2.0  # for other ranks to fail as well, and report why, after one has
LAUNCH_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHESTRA_STORE",
)
"""The variables that the launcher puts into a rank's environment."""


class _Exit(NamedTuple):
    """A rank's own report of its end: its exit code, and why it skipped the test."""

    exit_code: int = 0
    text: str = ""


class MultiProcessTests(RankTests):
    """Runs each test of a test case in ``world_size`` processes, each a rank.

    List it before a TestCase among the bases, as in :class:`MultiProcessTestCase`.

    Call :meth:`_spawn_processes` (or ``_fork_processes``, the same) at the end of your ``setUp``. ``setUp``
    and ``tearDown`` run once, in the test's own process (rank -1). Every rank has its own instance,
    with ``rank`` and ``file_name`` set, and makes its default group itself, for example with
    ``init_process_group(store=FileStore(self.file_name, self.world_size), rank=self.rank,
    world_size=self.world_size)``.

    The test fails with a RankFailure that has the traceback of every rank that raised, and is skipped
    if rank 0 raises SkipTest or exits with one of the codes of :data:`TEST_SKIPS`. Two seconds after a
    rank has failed or died, the others are ended.

    Attributes:
        special_return_code_checks: by test, the exit code required of rank 0 instead of 0.
        skip_return_code_checks: tests whose ranks may exit with any code.
    """

    __test__ = False
    MAIN_PROCESS_RANK = -1
    TEST_ERROR_EXIT_CODE = 10

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name, methodName)
        self.file_name = ""
        self.special_return_code_checks: dict[Any, int] = {}
        self.skip_return_code_checks: list[Any] = []
        self._spawned = False

    @property
    def is_master(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """Return whether a rank's default group is destroyed after the test; override it to keep it."""
        return True

    def setUp(self) -> None:
        """Prepare a test, once, in the test's own process."""
        super().setUp()
        with tempfile.NamedTemporaryFile(prefix="torchestra-test-", delete=False) as file:
            self.file_name = file.name
        self.addCleanup(_remove, self.file_name)

    @classmethod
    def _enter(cls, before: Mapping[str, str]) -> None:
        """Prepare a rank, first of all. ``before``: the :data:`LAUNCH_VARIABLES` of the test's process."""

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        """Make a rank's instance, and run the test on it; override it to wrap the test."""
        case = cls(test_name)
        case.rank = rank
        case.file_name = file_name
        case.run_test(test_name, parent_pipe)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """Run the test on a rank, and leave the default group."""
        try:
            getattr(self, test_name)()
        finally:
            if self.destroy_pg_upon_exit and is_initialized():
                destroy_process_group()

    def _spawn_processes(self) -> None:
        """Arrange for the ranks to start when the test runs; call it from ``setUp``."""
        self._spawned = True

    _fork_processes = _spawn_processes

    def _join(self, test: Any) -> None:
        if not self._spawned:
            raise RuntimeError(f"{self.id()}: no ranks were started: call self._spawn_processes() in setUp")
        size = int(getattr(test, "_required_world_size", self.world_size))
        names = (type(self), self._testMethodName, self.file_name)
        before = {name: os.environ[name] for name in LAUNCH_VARIABLES if name in os.environ}
        failures: dict[int, str] = {}
        try:
            with launched(_run_rank, size, (*names, before), self.timeout, {}, _SETTLE_S) as job:
                failures = job.failures()
                exits: list[_Exit] = job.results()
        except RankError as error:
            if error.rank in failures:
                raise RankFailure(
                    "\n".join(
                        f"Process {rank} exited with error code {self.TEST_ERROR_EXIT_CODE} and exception:\n"
                        f"{text}"
                        for rank, text in failures.items()
                    )
                ) from error.__cause__
            exits = [_Exit()] * size
            exits[error.rank] = _Exit(error.exit_code, f"{error}\n{error.traceback}")
            if exits[0].exit_code == 0 or not self._may_end_so(test, exits[0].exit_code):
                raise RankFailure(f"Process {error.rank} failed: {error}\n{error.traceback}") from error
        except LaunchTimeoutError as error:
            late = ", ".join(map(str, error.ranks))
            raise RankFailure(
                f"Process {late} terminated or timed out after {self.timeout:g} seconds\n{error.tracebacks}"
            ) from error
        self._decide(test, exits)

    def _decide(self, test: Any, exits: list[_Exit]) -> None:
        code = exits[0].exit_code
        reason = skip_reason(code)
        if reason is not None:
            raise unittest.SkipTest(exits[0].text or reason)
        if not self._may_end_so(test, code):
            expected = self.special_return_code_checks.get(test, 0)
            raise self.failureException(f"Expected exit code {expected} but got {code} from rank 0")

    def _may_end_so(self, test: Any, exit_code: int) -> bool:
        return (
            test in self.skip_return_code_checks
            or exit_code == self.special_return_code_checks.get(test, 0)
            or skip_reason(exit_code) is not None
        )


def _run_rank(
    case_class: type[MultiProcessTests], name: str, file_name: str, before: Mapping[str, str]
) -> _Exit:
    """Run the test on a rank; return how it ended."""
    rank = int(os.environ["RANK"])
    case_class._enter(before)
    try:
        case_class._run(rank, name, file_name, None)
    except unittest.SkipTest as skipped:
        return _Exit(TEST_SKIPS["generic"].exit_code, str(skipped))
    except SystemExit as left:
        code = left.code
        return _Exit(code if isinstance(code, int) else int(code is not None), "")
    return _Exit()


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class MultiProcessTestCase(MultiProcessTests, TestCase):
    """A test case each of whose tests runs in several processes, each a rank.

    See :class:`~torchestra.testing.processes.MultiProcessTests`, and :class:`TestCase` for what its
    ``assertEqual`` compares.
    """

    __test__ = False
