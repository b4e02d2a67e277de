"""What all tests run on: fixtures (conftest.py), and processes that serve worlds (rank_process.py)."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchestra.store import Store
from worlds import run

_NEW_PID_NAMESPACE = 0x20000000
_reached = threading.Event()
_seen: list[int] = []


def test_the_folder_of_multiprocessing_is_not_removed_before_it_is() -> None:
    """multiprocessing removes it when the interpreter ends, and complains there if it is gone."""
    assert Path(tempfile.gettempdir()) not in Path(multiprocessing.util.get_temp_dir()).parents


def _leave_nothing() -> None:
    os.environ["OF_THIS_TEST"] = "1"


def _replace_a_function() -> None:
    time.perf_counter = time.monotonic


def _set_an_event() -> None:
    _reached.set()


def _append_to_a_list() -> None:
    _seen.append(1)


def _unshare() -> None:
    assert ctypes.CDLL(None).unshare(_NEW_PID_NAMESPACE) == 0


def _may_unshare() -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.CDLL(None).unshare(_NEW_PID_NAMESPACE) != 0)
    return os.waitpid(pid, 0)[1] == 0


def _pid(store: Store, rank: int, size: int) -> int:
    assert "OF_THIS_TEST" not in os.environ
    return os.getpid()


def _of_leave(store: Store, rank: int, size: int, leave: Callable[[], None]) -> int:
    leave()
    return os.getpid()


def test_a_process_that_a_world_left_as_it_was_serves_the_next_one() -> None:
    left = run("processes", 1, _of_leave, _leave_nothing, init=False)
    assert run("processes", 1, _pid, init=False) == left


@pytest.mark.parametrize("leave", [_replace_a_function, _set_an_event, _append_to_a_list, _unshare])
def test_a_process_in_which_a_world_left_something_serves_no_other(leave: Callable[[], None]) -> None:
    if leave is _unshare and not _may_unshare():
        pytest.skip("no PID namespace may be made")
    left = run("processes", 1, _of_leave, leave, init=False)
    assert run("processes", 1, _pid, init=False) != left
