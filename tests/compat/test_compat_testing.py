"""Test what tests take from PyTorch's helpers for distributed tests."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

import torchestra.compat as dist
from torchestra.compat import testing
from torchestra.testing import RankFailure


class Ranks(testing.MultiProcessTestCase):
    """Run by the tests below, and by pytest as well."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _init(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_ranks_are_processes(self) -> None:
        self._init()
        tensor = torch.tensor([os.getpid(), -os.getpid()])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        self.assertNotEqual(tensor[0], -tensor[1])

    def test_sparse_examples_add_up(self) -> None:
        self._init()
        for inputs, outputs in testing.simple_sparse_reduce_tests(self.rank, self.world_size, num_inputs=2):
            for tensor in inputs:
                dist.all_reduce(tensor)
            self.assertEqual(sum(tensor.to_dense() for tensor in inputs), outputs[0].to_dense())

    @testing.require_n_gpus_for_nccl_backend(8, "gloo")
    @testing.with_dist_debug_levels(levels=["OFF", "DETAIL"])
    def test_at_each_debug_level(self) -> None:
        if not dist.is_initialized():
            self._init()
        tensor = torch.tensor(int(dist.get_debug_level()))
        dist.all_reduce(tensor)
        expected = {"OFF": 0, "DETAIL": 4}[os.environ["TORCH_DISTRIBUTED_DEBUG"]]
        self.assertEqual(tensor.item(), expected)

    @testing.require_n_gpus_for_nccl_backend(8, "nccl")
    def test_skipped_without_gpus(self) -> None:
        assert testing.at_least_x_gpu(8)


class AroundTheTest(Ranks):
    """A test case that does something around each of its tests, on the ranks."""

    __test__ = False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
        case = cls(test_name)
        case.rank = rank
        case.file_name = file_name
        case._init()
        case.run_test(test_name, pipe)
        sys.exit(3)

    def test_in_a_group(self) -> None:
        assert dist.get_rank() == self.rank


def test_a_test_case_may_override_what_a_rank_runs() -> None:
    result = unittest.TestResult()
    AroundTheTest("test_in_a_group").run(result)
    ((_, text),) = result.failures
    assert "Expected exit code 0 but got 3" in text


def test_what_is_skipped_is_skipped() -> None:
    result = unittest.TestResult()
    Ranks("test_skipped_without_gpus").run(result)
    assert len(result.skipped) == (0 if testing.at_least_x_gpu(8) else 1)
    assert result.wasSuccessful()


def test_test_cases_have_torchs_assertions() -> None:
    pytest.importorskip("expecttest", reason="torch's own test case needs it")
    from torch.testing._internal.common_utils import TestCase

    assert issubclass(testing.MultiThreadedTestCase, TestCase)
    assert issubclass(testing.MultiProcessTestCase, TestCase)
    assert not testing.MultiThreadedTestCase.__test__


def test_a_failure_on_a_rank_is_a_runtime_error() -> None:
    @testing.spawn_threads_and_init_comms(world_size=2)
    def fails() -> None:
        if dist.get_rank() == 1:
            raise AssertionError("on purpose")
        dist.barrier()

    with pytest.raises(RuntimeError, match="on purpose") as caught:
        fails()
    assert isinstance(caught.value, RankFailure)


def test_directories_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TEMP_DIR", "INIT_METHOD"):
        monkeypatch.setenv(variable, "")
    testing.initialize_temp_directories()
    made = Path(os.environ["TEMP_DIR"])
    assert (made / "barrier").is_dir()
    assert os.environ["INIT_METHOD"] == f"file://{made}/init_dir/shared_init_file"
    testing.cleanup_temp_dir()
    assert not made.exists()


def test_output_is_captured() -> None:
    with testing.captured_output() as (out, err):
        print("one")
        print("two", file=sys.stderr)
    assert (out.getvalue(), err.getvalue()) == ("one\n", "two\n")


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert testing.init_multigpu_helper(2, "nccl") == {0: [0], 1: [1]}
    assert testing.init_multigpu_helper(8, "nccl") == {rank: [] for rank in range(8)}


def test_a_store_on_a_free_port() -> None:
    store = testing.create_tcp_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_the_error_that_ddp_has_logged() -> None:
    class Model:
        def _get_ddp_logging_data(self) -> dict[str, object]:
            return {"iteration": 1, "has_error": 1, "error": "this went wrong"}

    testing.verify_ddp_error_logged(Model(), "went wrong\nException raised from C++")
    with pytest.raises(AssertionError, match="Did not find expected"):
        testing.verify_ddp_error_logged(Model(), "something else")


def test_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(testing.TIMEOUT_OVERRIDE, "test_slow", 1000)
    assert testing.get_timeout("module.Class.test_slow") == 1000
    assert testing.get_timeout("module.Class.test_other") == testing.TIMEOUT_DEFAULT


class TestSubtests(testing.MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_every_combination_is_run(self) -> None:
        seen = []

        def note(scale: int, *, first: int, second: str) -> None:
            seen.append((first * scale, second))

        testing.run_subtests(self, {"first": [1, 2], "second": ["a", "b"]}, note, 10)
        self.assertEqual(seen, [(10, "a"), (10, "b"), (20, "a"), (20, "b")])
