"""Test cases whose ranks are processes: results, failures, skips, exit codes, ranks that die."""

from __future__ import annotations

import os
import signal
import sys
import threading
import unittest
from unittest import SkipTest

import torch

import torchestra as dist
from torchestra.testing import TEST_SKIPS, MultiProcessTestCase


class Cases(MultiProcessTestCase):
    """Cases that the tests below run; pytest itself does not."""

    __test__ = False
    timeout = 200.0

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self.special_return_code_checks = {getattr(self.test_exit_code, "__wrapped__", None): 5}
        self._spawn_processes()

    def join(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(store=store, rank=self.rank, world_size=self.world_size, timeout=30)

    def test_all_reduce(self) -> None:
        self.join()
        tensor = torch.ones(2) * self.rank
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.ones(2))
        assert self.is_master is (self.rank == 0)

    def test_failure(self) -> None:
        self.join()
        if self.rank == 1:
            self.assertEqual(torch.ones(2), torch.zeros(2))
        dist.barrier()

    def test_skip(self) -> None:
        raise SkipTest("not today")

    def test_skip_code(self) -> None:
        sys.exit(TEST_SKIPS["no_cuda"].exit_code)

    def test_exit_code(self) -> None:
        sys.exit(5)

    def test_wrong_exit_code(self) -> None:
        sys.exit(6)

    def test_others_wait(self) -> None:
        self.join()
        if self.rank == 1:
            raise ValueError("rank 1 gives up")
        threading.Event().wait()

    def test_death(self) -> None:
        self.join()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def outcome(name: str) -> unittest.TestResult:
    result = unittest.TestResult()
    case = Cases(name)
    case.run(result)
    assert not os.path.exists(case.file_name)
    return result


def test_every_rank_runs_the_test_in_a_process_of_its_own() -> None:
    result = outcome("test_all_reduce")
    assert result.wasSuccessful(), result.errors


def test_the_traceback_of_a_failing_rank_is_told() -> None:
    [(_, text)] = outcome("test_failure").errors
    assert "Process 1 exited with error code 10 and exception" in text
    assert "Tensor-likes are not close" in text


def test_who_waits_for_a_failed_rank_is_ended() -> None:
    [(_, text)] = outcome("test_others_wait").errors
    assert "rank 1 gives up" in text
    assert "timed out" not in text


def test_skips_pass_through() -> None:
    [(_, reason)] = outcome("test_skip").skipped
    assert reason == "not today"
    [(_, reason)] = outcome("test_skip_code").skipped
    assert reason == "CUDA is not available."


def test_exit_codes_are_expected_or_fail() -> None:
    assert outcome("test_exit_code").wasSuccessful()
    [(_, text)] = outcome("test_wrong_exit_code").failures
    assert "Expected exit code 0 but got 6" in text


def test_a_rank_that_dies_is_named() -> None:
    [(_, text)] = outcome("test_death").errors
    assert "Process 1 failed" in text
    assert "SIGKILL" in text
