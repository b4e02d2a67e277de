"""Test cases whose ranks are threads: every rank runs the test, and what one of them raises is told."""

from __future__ import annotations

import threading
import unittest
from unittest import SkipTest, skip

import pytest
import torch

import torchestra as dist
from torchestra.testing import (
    TEST_SKIPS,
    MultiThreadedTestCase,
    RankFailure,
    TestCase,
    skip_if_lt_x_gpu,
    spawn_threads_and_init_comms,
)
from torchestra.testing.outcomes import Outcome, first_failure


def test_every_rank_runs_the_function_with_its_arguments() -> None:
    seen: list[tuple[int, int, str]] = []

    @spawn_threads_and_init_comms(world_size=3)
    def body(word: str) -> None:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        seen.append((dist.get_rank(), int(tensor[0]), word))

    body("given")
    assert sorted(seen) == [(rank, 3, "given") for rank in range(3)]
    assert not dist.is_initialized()


def test_without_arguments_there_are_four_ranks() -> None:
    sizes: list[int] = []

    @spawn_threads_and_init_comms
    def body() -> None:
        sizes.append(dist.get_world_size())

    body()
    assert sizes == [4] * 4


@pytest.mark.parametrize("failing", [{0}, {1}, {1, 2, 3}])
def test_an_exception_on_any_rank_releases_the_others_and_carries_the_traceback(failing: set[int]) -> None:
    @spawn_threads_and_init_comms(world_size=4)
    def body() -> None:
        given = torch.ones(3, 3) * dist.get_rank()
        outputs = [torch.empty_like(given) for _ in range(4)]
        dist.all_gather(outputs, given)
        if dist.get_rank() in failing:
            raise AssertionError("wrong on purpose")
        dist.all_gather(outputs, given)

    with pytest.raises(RuntimeError, match="exited with exception") as caught:
        body()
    assert isinstance(caught.value, RankFailure)
    assert str(caught.value).startswith(tuple(f"Thread {rank} " for rank in failing))
    assert 'raise AssertionError("wrong on purpose")' in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)


def test_a_skip_passes_through() -> None:
    @spawn_threads_and_init_comms(world_size=2)
    @skip("not today")
    def skipped() -> None:
        raise AssertionError("must not run")

    with pytest.raises(SkipTest, match="not today"):
        skipped()


def test_leaving_with_a_code_for_skipping_skips() -> None:
    @spawn_threads_and_init_comms(world_size=2)
    def leaves() -> None:
        raise SystemExit(TEST_SKIPS["no_cuda"].exit_code)

    with pytest.raises(SkipTest, match="CUDA is not available"):
        leaves()


def test_a_rank_that_hangs_is_named_with_where_it_is() -> None:
    release = threading.Event()

    @spawn_threads_and_init_comms(world_size=2, timeout=4)
    def hangs() -> None:
        if dist.get_rank() == 1:
            release.wait()

    try:
        with pytest.raises(RankFailure, match="Thread 1 terminated or timed out after 4 seconds") as caught:
            hangs()
        assert "release.wait()" in str(caught.value)
    finally:
        release.set()


def test_the_failure_that_others_followed_from_comes_first() -> None:
    cause = Outcome(2, ValueError("the cause"), time=2.0)
    released = Outcome(0, dist.GroupAbortedError("released"), time=1.0)
    assert first_failure([released, Outcome(1), cause]) is cause


class Base(MultiThreadedTestCase):
    __test__ = False

    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


class TestWithBaseClass(Base):
    """Use all that a test case of threads offers, run by pytest as users run it."""

    __test__ = True

    def perThreadSetUp(self) -> None:
        self.prepared = dist.get_rank()

    def test_the_rank_is_the_groups(self) -> None:
        self.assertEqual(self.rank, dist.get_rank())
        self.assertEqual(self.prepared, self.rank)

    def test_all_reduce(self) -> None:
        output = torch.ones(3, 3) * dist.get_rank()
        dist.all_reduce(output)
        self.assertEqual(output, torch.ones(3, 3) * 6)

    def test_assert_equal_on_rank(self) -> None:
        mine = torch.full((3,), float(self.rank))
        theirs = torch.zeros(3)
        self.assertEqualOnRank(mine, theirs, rank=0)
        self.assertNotEqualOnRank(mine, theirs, rank=1)

    def test_the_group_is_seen_by_a_thread_that_a_rank_starts(self) -> None:
        ranks: list[int] = []
        thread = threading.Thread(target=lambda: ranks.append(dist.get_rank()))
        thread.start()
        thread.join()
        self.assertEqual(ranks, [self.rank])

    def test_subgroups(self) -> None:
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        output = torch.ones(2) * self.rank
        dist.all_reduce(output, group=low if self.rank < 2 else high)
        self.assertEqual(output, torch.ones(2) * (1 if self.rank < 2 else 5))

    @skip_if_lt_x_gpu(8)
    def test_a_skip_on_the_ranks_skips_the_test(self) -> None:
        raise AssertionError("must not run")

    def test_backward_sees_the_group_of_forward(self) -> None:
        case, forward_thread = self, threading.get_ident()

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):  # type: ignore[no-untyped-def]
                return x * 2

            @staticmethod
            def backward(ctx, grad):  # type: ignore[no-untyped-def]
                case.assertEqual(threading.get_ident(), forward_thread)
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total)
                return grad * total

        x = torch.ones(1, requires_grad=True)
        Sum.apply(x).sum().backward()
        self.assertEqual(x.grad, torch.tensor([6.0]))


def run_case(case: unittest.TestCase) -> unittest.TestResult:
    result = unittest.TestResult()
    case.run(result)
    return result


def test_a_failing_rank_fails_the_case_once() -> None:
    class Failing(Base):
        __test__ = False

        def test_it(self) -> None:
            if self.rank == 2:
                self.assertEqual(torch.ones(2), torch.zeros(2))
            dist.barrier()

    result = run_case(Failing("test_it"))
    [(_, text)] = result.errors
    assert "Thread 2 exited with exception" in text
    assert "Tensor-likes are not close" in text


def test_forgetting_to_start_the_ranks_says_so() -> None:
    class Forgetful(MultiThreadedTestCase):
        __test__ = False

        def test_it(self) -> None:
            pass

    [(_, text)] = run_case(Forgetful("test_it")).errors
    assert "call self._spawn_threads() in setUp" in text


class TestComparison(TestCase):
    """assertEqual knows tensors, and still knows everything else."""

    def test_tensors_and_containers(self) -> None:
        self.assertEqual(torch.ones(2), torch.ones(2) + 1e-7)
        self.assertEqual([torch.ones(2), torch.zeros(1)], (torch.ones(2), torch.zeros(1)))
        self.assertEqual({"a": torch.ones(2)}, {"a": torch.ones(2)})
        self.assertEqual(torch.ones(2), 1.0)
        self.assertEqual([[0, 0], [1, 1]], list(zip(range(2), range(2), strict=True)))
        self.assertEqual({"a": [0.1 + 0.2]}, {"a": [0.3]})
        self.assertNotEqual([1, 2], [1, 2, 3])
        self.assertNotEqual({"a": 1}, {"b": 1})
        self.assertNotEqual(0.1, 0.2)
        self.assertEqual("same", "same")
        self.assertNotEqual(torch.ones(2), torch.zeros(2))
        with self.assertRaisesRegex(AssertionError, "dtype"):
            self.assertEqual(torch.ones(2), torch.ones(2, dtype=torch.float64))
        with self.assertRaises(AssertionError):
            self.assertEqual(torch.ones(2), torch.ones(3))
        with self.assertRaises(AssertionError):
            self.assertNotEqual(torch.ones(2), torch.ones(2))
