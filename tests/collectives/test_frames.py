"""Test how many Python frames there are between the user's call and the kernel."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine.entries.tensor_access import access_to_tensors, why_not
from torchestra.engine.native.kernel import is_interpreted
from worlds import run

# Where torch has CUDA, which device a tensor is on is asked first.
GENERAL = 12 if torch.backends.cuda.is_built() else 10

needs_entries = pytest.mark.skipif(
    access_to_tensors() is None or is_interpreted(),
    reason=f"there are no entries: {why_not() or 'kernels run interpreted'}",
)
"""Marks what tests entries, which there are not everywhere (communicator/entries.py)."""


def functions_entered(call: Callable[[], object]) -> list[str]:
    """The Python functions that a call enters, besides itself, by their names."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    gc.disable()  # finalizers and callbacks of a collection are none of the call's
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered[1:]


def frames_above_the_kernel(call: Callable[[], object]) -> int:
    """Return how deep the stack is when the kernel is called."""
    engine: Any = dist.group.WORLD.communicator.engine
    kernel, seen = engine.kernels.all_reduce, []

    def spy(*arguments: int) -> int:
        frame, depth = sys._getframe(1), 0
        while frame is not None and frame.f_code is not call.__code__:
            frame, depth = frame.f_back, depth + 1
        seen.append(depth)
        return kernel(*arguments)

    engine.kernels.all_reduce = spy
    try:
        call()
    finally:
        engine.kernels.all_reduce = kernel
    return seen[0]


def measure_entries() -> None:
    tensor = torch.ones(4)

    def reduce_plain() -> None:
        dist.all_reduce(tensor)

    reduce_plain()  # the first goes the general way
    assert functions_entered(reduce_plain) == ["all_reduce"]

    def broadcast_plain() -> None:
        dist.broadcast(tensor, 0)

    broadcast_plain()
    assert functions_entered(broadcast_plain) == ["broadcast"]
    plan = dist.all_reduce_init(tensor)
    plan()

    def start_a_persistent_one() -> None:
        plan()

    assert functions_entered(start_a_persistent_one) == []


@needs_entries
def test_there_are_none_before_an_entry() -> None:
    run("processes", 1, measure_entries)


def measure() -> None:
    tensor = torch.ones(4)
    strided = torch.ones(4, 4).t()[1:3]

    def reduce_plain() -> None:
        dist.all_reduce(tensor)

    def reduce_strided() -> None:
        dist.all_reduce(strided)

    def reduce_in_the_background() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    reduce_plain()  # the first makes the entry
    # There are no entries here: another function is in the place of a kernel.
    assert frames_above_the_kernel(reduce_plain) <= GENERAL
    assert frames_above_the_kernel(reduce_strided) <= GENERAL
    assert frames_above_the_kernel(reduce_in_the_background) <= GENERAL


def test_there_are_few() -> None:
    run("processes", 1, measure)
