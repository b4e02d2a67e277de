"""A test case whose ``assertEqual`` knows tensors."""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["TestCase", "WithoutTests"]

_NUMBERS = (bool, int, float, complex)


class WithoutTests(unittest.TestCase):
    """What test cases are made of; only classes derived from it are collected, by pytest too.

    A derived class that holds no tests either says so: ``__test__ = False``.
    """

    __test__ = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in cls.__dict__:
            cls.__test__ = True


class TestCase(WithoutTests):
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
            AssertionError: they differ; says where and by how much.
        """
        tolerances = {"atol": atol, "rtol": rtol}
        settings = {"equal_nan": equal_nan, "exact_dtype": exact_dtype, "exact_device": exact_device}
        if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
            self._assert_close(first, second, msg, tolerances, equal_nan, exact_dtype, exact_device)
        elif isinstance(first, (float, complex)) and isinstance(second, _NUMBERS):
            self._assert_close(first, second, msg, tolerances, equal_nan, False, False)
        elif _is_sequence(first) and _is_sequence(second):
            super().assertEqual(len(first), len(second), msg)
            for one, other in zip(first, second, strict=True):
                self.assertEqual(one, other, msg, **tolerances, **settings)  # type: ignore[arg-type]
        elif isinstance(first, Mapping) and isinstance(second, Mapping):
            super().assertEqual(first.keys(), second.keys(), msg)
            for key in first:
                self.assertEqual(first[key], second[key], msg, **tolerances, **settings)  # type: ignore[arg-type]
        else:
            super().assertEqual(first, second, msg)

    @staticmethod
    def _assert_close(
        first: Any,
        second: Any,
        msg: Any,
        tolerances: dict[str, float | None],
        equal_nan: bool,
        exact_dtype: bool,
        exact_device: bool,
    ) -> None:
        if isinstance(first, _NUMBERS) and isinstance(second, torch.Tensor):
            first = torch.full_like(second, first)
        elif isinstance(second, _NUMBERS) and isinstance(first, torch.Tensor):
            second = torch.full_like(first, second)
        torch.testing.assert_close(
            first,
            second,
            atol=tolerances["atol"],
            rtol=tolerances["rtol"],
            equal_nan=equal_nan,
            check_dtype=exact_dtype,
            check_device=exact_device,
            check_layout=False,
            msg=None if msg is None else lambda told: f"{told}\n{msg}",
        )

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None, **tolerances: Any) -> None:
        """Fail if the two are equal, as :meth:`assertEqual` tells it."""
        try:
            self.assertEqual(first, second, **tolerances)
        except AssertionError:
            return
        raise self.failureException(self._formatMessage(msg, f"{first!r} == {second!r}"))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
