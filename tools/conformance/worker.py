"""Runs some tests of one module, one after the other, and tells how each ends: one line of JSON each.

    python -m tools.conformance.worker DESCRIPTOR MODULE < NAMES

DESCRIPTOR is an open file to write to. Without names of tests, one a line, all names are told and none is
run. A line is a list: ``["found", names]``, ``["begins", name]``, or ``["ended", name, how, text]``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import unittest
from types import TracebackType
from typing import Any

ErrorInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class Telling(unittest.TestResult):
    """Tells how the tests end as they do; what fails twice (a test, and then its tear-down) is told once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._told = False

    def tell(self, *what: Any) -> None:
        os.write(self._descriptor, json.dumps(what).encode() + b"\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._told = False
        self.tell("begins", _name(test))

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._end(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._end(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: ErrorInfo) -> None:
        self._end(test, "passed", "")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._end(test, "failed", "AssertionError: the test is expected to fail, and has not")

    def addFailure(self, test: unittest.TestCase, err: ErrorInfo) -> None:
        self._end(test, "failed", "".join(traceback.format_exception(*err)))

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: ErrorInfo | None) -> None:
        if err is not None:
            self.addFailure(test, err)

    def _end(self, test: unittest.TestCase, how: str, text: str) -> None:
        if not self._told:
            self._told = True
            self.tell("ended", _name(test), how, text)


def _name(test: unittest.TestCase) -> str:
    return ".".join(test.id().rsplit(".", 2)[-2:])


def _all(suite: unittest.TestSuite) -> list[str]:
    names: list[str] = []
    for each in suite:
        names += _all(each) if isinstance(each, unittest.TestSuite) else [_name(each)]
    return names


def main() -> None:
    """Do what the command line asks for."""
    result = Telling(int(sys.argv[1]))
    module = importlib.import_module(sys.argv[2])
    loader = unittest.TestLoader()
    names = sys.stdin.read().split()
    if not names:
        result.tell("found", _all(loader.loadTestsFromModule(module)))
    for name in names:
        loader.loadTestsFromName(name, module).run(result)


if __name__ == "__main__":
    main()
