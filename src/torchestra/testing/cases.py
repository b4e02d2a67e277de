"""Parts of test cases: tests that run on ranks, and an ``assertEqual`` that knows tensors."""

from __future__ import annotations

import functools
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

DEFAULT_WORLD_SIZE = 4
DEFAULT_TIMEOUT_S = 300.0
_MAIN_RANK = -1
_NUMBERS = (bool, int, float, complex)


class _WithoutTests(unittest.TestCase):
    """A base class that test runners, pytest too, do not collect, though they collect its subclasses.

    A subclass without tests sets ``__test__ = False``.
    """

    __test__ = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in cls.__dict__:
            cls.__test__ = True


class RankTests(_WithoutTests):
    """Runs each test of a test case on ``world_size`` ranks. List it before a TestCase among the bases.

    ``setUp`` and ``tearDown`` run once, in the test's own thread and process, where ``rank`` is -1 and where
    the test waits for the ranks. Every rank has its own instance, with its ``rank``.
    """

    __test__ = False
    timeout: float = DEFAULT_TIMEOUT_S
    """Seconds that one test may take."""

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        if methodName != "runTest":
            method_name = methodName
        super().__init__(method_name)
        self.rank = _MAIN_RANK
        test = getattr(self, method_name, None)
        if test is not None:
            setattr(self, method_name, types.MethodType(_on_ranks(test), self))

    @property
    def world_size(self) -> int:
        """Return the number of ranks; override it."""
        return DEFAULT_WORLD_SIZE

    def setUp(self) -> None:
        """Prepare a test, once, in the test's own thread and process."""
        super().setUp()
        self.rank = _MAIN_RANK

    def _join(self, test: Callable[[], None]) -> None:
        """Wait for the ranks; raise what their outcomes mean for the test."""
        raise NotImplementedError


def _on_ranks(test: Callable[[], None]) -> Callable[[RankTests], None]:
    """Return a method that runs the test if called on a rank, and otherwise waits for the ranks."""

    @functools.wraps(test)
    def join_or_run(case: RankTests) -> None:
        if case.rank == _MAIN_RANK:
            case._join(test)
        else:
            test()

    return join_or_run


class TestCase(_WithoutTests):
    """unittest's TestCase; tensors and numbers, also in lists, tuples and dicts, are compared as torch does.

    That is, floating-point ones are equal within ``torch.testing.assert_close``'s tolerances for their dtype,
    or ``atol`` and ``rtol``. A tensor and a number are equal if all its elements are that number, and a list
    equals a tuple with the same elements.
    """

    __test__ = False

    def assertEqual(
        self,
        first: Any,
        second: Any,
        msg: Any = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        equal_nan: bool = True,
        exact_dtype: bool = True,
        exact_device: bool = False,
    ) -> None:
        """Fail unless the two are equal, tensors within them included.

        Raises:
            AssertionError: they differ; the message says where and by how much.
        """
        options: dict[str, Any] = {"atol": atol, "rtol": rtol, "equal_nan": equal_nan}
        checks = {"exact_dtype": exact_dtype, "exact_device": exact_device}
        if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
            _assert_close(first, second, msg, exact_dtype, exact_device, options)
        elif isinstance(first, (float, complex)) and isinstance(second, _NUMBERS):
            _assert_close(first, second, msg, False, False, options)
        elif _is_sequence(first) and _is_sequence(second):
            super().assertEqual(len(first), len(second), msg)
            for one, other in zip(first, second, strict=True):
                self.assertEqual(one, other, msg, **options, **checks)
        elif isinstance(first, Mapping) and isinstance(second, Mapping):
            super().assertEqual(first.keys(), second.keys(), msg)
            for key in first:
                self.assertEqual(first[key], second[key], msg, **options, **checks)
        else:
            super().assertEqual(first, second, msg)

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None, **tolerances: Any) -> None:
        """Fail if the two are equal by :meth:`assertEqual`."""
        try:
            self.assertEqual(first, second, **tolerances)
        except AssertionError:
            return
        raise self.failureException(self._formatMessage(msg, f"{first!r} == {second!r}"))


def _assert_close(
    first: Any, second: Any, msg: Any, exact_dtype: bool, exact_device: bool, options: dict[str, Any]
) -> None:
    if isinstance(first, _NUMBERS) and isinstance(second, torch.Tensor):
        first = torch.full_like(second, first)
    elif isinstance(second, _NUMBERS) and isinstance(first, torch.Tensor):
        second = torch.full_like(first, second)
    torch.testing.assert_close(
        first,
        second,
        check_dtype=exact_dtype,
        check_device=exact_device,
        check_layout=False,
        msg=None if msg is None else lambda text: f"{text}\n{msg}",
        **options,
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
