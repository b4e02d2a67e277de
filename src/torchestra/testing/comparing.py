"""A test case whose ``assertEqual`` knows tensors."""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["TestCase"]


class TestCase(unittest.TestCase):
    """unittest's TestCase; tensors, and lists, tuples and dicts of them, are compared element by element.

    Floating-point elements are equal within ``torch.testing.assert_close``'s tolerances for their dtype, or
    ``atol`` and ``rtol``. A tensor and a number are equal if all its elements are that number.
    """

    # Neither of pytest's nor of unittest's own: it holds no tests.
    __test__ = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in cls.__dict__:
            cls.__test__ = True

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
        if not (_has_tensor(first) or _has_tensor(second)):
            super().assertEqual(first, second, msg)
            return
        if isinstance(first, (int, float, complex, bool)):
            first = torch.full_like(second, first)
        elif isinstance(second, (int, float, complex, bool)):
            second = torch.full_like(first, second)
        if _is_sequence(first) and _is_sequence(second):
            first, second = list(first), list(second)
        torch.testing.assert_close(
            first,
            second,
            rtol=rtol,
            atol=atol,
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


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return _is_sequence(value) and any(map(_has_tensor, value))
