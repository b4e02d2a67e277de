"""The test cases of :mod:`torchestra.testing` on torch's own TestCase, whose assertions tests use."""

from __future__ import annotations

import os
import unittest
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchestra import testing
from torchestra.testing.processes import LAUNCH_VARIABLES, MultiProcessTests
from torchestra.testing.threads import MultiThreadedTests

__all__ = ["MultiProcessTestCase", "MultiThreadedTestCase", "TestCase"]


def _base() -> type[unittest.TestCase]:
    try:
        from torch.testing._internal.common_utils import TestCase as TorchTestCase
    except ImportError:  # it needs packages that torch does not
        return testing.TestCase
    return TorchTestCase


if TYPE_CHECKING:
    TestCase = testing.TestCase
else:
    TestCase = _base()


class MultiThreadedTestCase(MultiThreadedTests, TestCase):
    """:class:`torchestra.testing.MultiThreadedTestCase` with torch's assertions, if available."""

    __test__ = False


class MultiProcessTestCase(MultiProcessTests, TestCase):
    """:class:`torchestra.testing.MultiProcessTestCase` with torch's assertions, if available.

    As with torch's, its ranks see only the environment of the test's own process.
    """

    __test__ = False

    @classmethod
    def _enter(cls, before: Mapping[str, str]) -> None:
        for name in LAUNCH_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)
