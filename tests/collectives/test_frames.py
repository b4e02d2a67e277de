"""How many Python frames there are between the user's call and the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import torchestra as dist
from worlds import run

PERSISTENT, FAST, GENERAL = 2, 5, 10


def frames_above_the_kernel(call: Callable[[], object]) -> tuple[int, int]:
    """How deep the stack is when the kernel is called, and how many functions have been entered by then."""
    engine: Any = dist.group.WORLD.communicator.engine
    kernel, seen, entered = engine.kernels.all_reduce, [], [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        entered[0] += event == "call"

    def spy(*arguments: int) -> int:
        sys.setprofile(None)
        frame, depth = sys._getframe(1), 0
        while frame is not None and frame.f_code is not call.__code__:
            frame, depth = frame.f_back, depth + 1
        seen.append((depth, entered[0] - 2))  # without the call itself, and this
        return kernel(*arguments)

    engine.kernels.all_reduce = spy
    try:
        sys.setprofile(count)
        call()
    finally:
        sys.setprofile(None)
        engine.kernels.all_reduce = kernel
    return seen[0]


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

    plan = dist.all_reduce_init(tensor)
    plan()

    def start_a_persistent_one() -> None:
        plan()

    assert frames_above_the_kernel(start_a_persistent_one) == (PERSISTENT, PERSISTENT)
    first, _ = frames_above_the_kernel(reduce_plain)
    fast, entered = frames_above_the_kernel(reduce_plain)
    assert fast <= entered <= FAST
    assert first <= GENERAL
    assert frames_above_the_kernel(reduce_strided)[0] <= GENERAL
    assert frames_above_the_kernel(reduce_in_the_background)[0] <= GENERAL


def test_there_are_few() -> None:
    run("processes", 1, measure)
