"""Test how many functions of Python a call passes, at the caller and at the worker called."""

from __future__ import annotations

import itertools
import sys
import threading
from types import FrameType

import rpc_workers
import torchestra as dist
import worlds
from torchestra import rpc

MAX_FRAMES = 35
REPEATS = 20
_called: list[str] = []


def note_call(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _called.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)


def add_one(value: int) -> int:
    return value + 1


def called_between_calls() -> list[str]:
    """Return what this worker's threads have called from one call of ``add_one`` to the next."""
    name = add_one.__qualname__
    where = [place for place, called in enumerate(_called) if called == name]
    spans = [_called[begin:end] for begin, end in itertools.pairwise(where)]
    return min(spans, key=len)


def count_frames() -> int:
    if dist.get_rank() == 1:
        threading.setprofile(note_call)  # for threads that begin from now on, such as those of the pool
    rank = rpc_workers.begin()
    frames = 0
    if rank == 0:
        spans = []
        for _ in range(REPEATS):  # warm from the second on
            _called.clear()
            sys.setprofile(note_call)
            rpc.rpc_sync("worker1", add_one, (1,))
            sys.setprofile(None)
            spans.append(list(_called))
        there, here = rpc.rpc_sync("worker1", called_between_calls), min(spans, key=len)
        frames = len(here) + len(there)
        assert frames <= MAX_FRAMES, f"at the caller {here}, at the worker called {there}"
    rpc.shutdown()
    threading.setprofile(None)
    return frames


def test_a_call_of_a_function_with_a_number_passes_few_functions() -> None:
    frames, _ = worlds.run("processes", 2, count_frames)
    assert frames > 10
