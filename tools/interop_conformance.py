"""PyTorch's own distributed_test, with torchestra as the backend of torch.distributed.

    python tools/interop_conformance.py [--ranks 2] [PART_OF_A_NAME ...]

Prints each test that does not pass, and how many passed, failed and were skipped. Nothing is renamed: the
tests use torch.distributed, and the backend's name is "torchestra". They are told, though, that it can do
what Gloo can do: those that ask for Gloo's name find this one equal to it. Tests of CUDA are left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from typing import Any
from unittest import mock

from torch import distributed

from torchestra.engine import warm_up


class Named(str):
    """The backend's name, for sets and comparisons the same as that of another, which tests ask for."""

    other = "gloo"

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self.other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.other)


_look_up: Any = type(os.environ).__getitem__


def _named(environment: Any, key: str) -> str:
    found: str = _look_up(environment, key)
    return Named(found) if key == "BACKEND" else found


def prepared() -> type[unittest.TestCase]:
    """The test case, whose decorators have seen such a name."""
    import torchestra.interop.torch_distributed  # noqa: F401 - registers the backend

    def backend(cls: Any, name: str, original: Any = distributed.Backend.__new__) -> Any:
        return name if isinstance(name, Named) else original(cls, name)

    with (
        mock.patch.object(type(os.environ), "__getitem__", _named),
        mock.patch.object(distributed.Backend, "__new__", backend),
    ):
        from torch.testing._internal.distributed import distributed_test as tests

    class TestOnTorchestra(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        """Ranks are forked, since loading torch anew would take most of the time."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return TestOnTorchestra


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description="PyTorch's own distributed_test on this backend.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--part", default="0/1", help="one of several parts of the tests, such as 1/4")
    parser.add_argument(
        "--like", default="gloo", help="whose tests to run; of all_to_all there are only mpi's"
    )
    parser.add_argument("names", nargs="*", help="run tests whose names contain one of these")
    asked = parser.parse_args()
    Named.other = asked.like
    with tempfile.TemporaryDirectory(prefix="torchestra-interop-") as directory:
        os.environ |= {"BACKEND": "torchestra", "WORLD_SIZE": str(asked.ranks), "TEMP_DIR": directory}
        os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")
        warm_up()  # not in every forked rank
        case = prepared()
        names = [
            name
            for name in unittest.TestLoader().getTestCaseNames(case)
            if "cuda" not in name
            and "nccl" not in name
            and (not asked.names or any(part in name for part in asked.names))
        ]
        part, parts = map(int, asked.part.split("/"))
        counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        for name in names[part::parts]:
            result: Any = unittest.TestResult()
            began = time.monotonic()
            case(name).run(result)
            told = [*result.failures, *result.errors]
            how = "failed" if told else "skipped" if result.skipped else "passed"
            counts[how] += 1
            if how != "passed":
                why = told[0][1].strip().splitlines()[-1] if told else result.skipped[0][1]
                print(f"{how} {name} ({time.monotonic() - began:.0f} s): {why}", flush=True)
                if told and asked.names:
                    print(told[0][1], flush=True)
        print(counts)
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
