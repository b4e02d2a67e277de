"""The flight recorder's rings: every rank's last operations, right at every moment for whoever reads."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_variants import Rule, broken, edited

from torchestra.engine import layout as at
from torchestra.engine.recorder import recorder

Words = npt.NDArray[np.int64]

# The first test compiles kernels.
pytestmark = pytest.mark.timeout(300)

ENOUGH = 50
LIMIT = 90.0


def write(entry: Words, number: int, writer: Any) -> None:
    """An entry in which every word follows from the stamp."""
    writer(entry.ctypes.data, number, *(number * 10 + field for field in range(5)))


def is_whole(copy: Words) -> bool:
    number = int(copy[at.STAMP // 8])
    fields = [at.BEGAN, at.WHAT, at.AMOUNT, at.MOVED_BYTES, at.AWAITED]
    return [int(copy[field // 8]) for field in fields] == [number * 10 + field for field in range(5)]


def torn_reads(rule: Rule | None) -> tuple[int, int]:
    """Of the reads beside a writer: how many were of no one moment, and how many there were.

    Ends with the first torn one, or when there were ENOUGH.
    """
    writer, reader = edited(recorder.write_entry), edited(recorder.read_entry)
    entry, copy = np.zeros(8, dtype=np.int64), np.zeros(8, dtype=np.int64)
    stop = threading.Event()

    def keep_writing() -> None:
        number = 1
        while not stop.is_set():
            write(entry, number, writer)
            number += 1
            if number % 3 == 0:
                time.sleep(0.0001)  # an entry that is always being written is never read

    thread = threading.Thread(target=keep_writing, daemon=True)
    torn = read = 0
    deadline = time.monotonic() + LIMIT
    with broken(rule):
        thread.start()
        while torn == 0 and time.monotonic() < deadline and (rule is not None or read < ENOUGH):
            if reader(entry.ctypes.data, copy.ctypes.data):
                read += 1
                torn += not is_whole(copy)
        stop.set()
        thread.join()
    return torn, read


def test_an_entry_is_read_as_it_was_at_one_moment() -> None:
    assert torn_reads(None) == (0, ENOUGH)


@pytest.mark.parametrize("rule", [Rule.TAKE_THE_STAMP_AWAY, Rule.STAMP_LAST, Rule.LOOK_AT_THE_STAMP_AGAIN])
def test_the_rules_of_the_stamp_are_needed(rule: Rule) -> None:
    torn, _ = torn_reads(rule)
    assert torn == 1
