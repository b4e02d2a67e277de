"""Of ranks that fail nearly together, the one that the others failed for is named."""

from __future__ import annotations

import signal

from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.root_cause import FailedRank, describe_exit, root_cause
from torchestra.launcher.spec import Failure


def raised(rank: int, time: float, consequence: bool = False) -> FailedRank:
    return FailedRank(rank, 1, time, Failure(time, 1, "E", "E\n", consequence))


def killed(rank: int, time: float) -> FailedRank:
    return FailedRank(rank, -signal.SIGKILL, time)


def test_nobody_is_to_blame_for_nothing() -> None:
    assert root_cause([]) is None


def test_the_first_exception_is_the_cause() -> None:
    cause = root_cause([raised(0, 3.0), raised(1, 1.0), raised(2, 2.0)])
    assert cause is not None
    assert cause.rank == 1


def test_who_says_that_another_rank_is_gone_is_not_the_cause() -> None:
    cause = root_cause([raised(0, 1.0, consequence=True), raised(1, 2.0), raised(2, 1.5, consequence=True)])
    assert cause is not None
    assert cause.rank == 1


def test_a_killed_rank_is_the_cause_though_its_peers_spoke_first() -> None:
    cause = root_cause([raised(0, 1.0), killed(2, 1.01), raised(1, 0.99, consequence=True)])
    assert cause is not None
    assert cause.rank == 2


def test_exit_codes_as_a_shell_shows_them() -> None:
    assert FailedRank(0, 3, 0.0).shell_code == 3
    assert killed(0, 0.0).shell_code == 137
    assert FailedRank(0, 0, 0.0).shell_code == 1, "a rank at fault never makes the job a success"


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL (out of memory?)"


def test_ranks_in_words() -> None:
    assert ranks_phrase([3]) == "rank 3"
    assert ranks_phrase([0, 1]) == "ranks 0, 1"
    assert ranks_phrase([0, 1, 2, 5, 7, 8, 9]) == "ranks 0-2, 5, 7-9"
