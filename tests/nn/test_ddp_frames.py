"""Test how many Python frames a gradient passes in DistributedDataParallel: what backward waits for."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from torchestra.nn.parallel import DistributedDataParallel
from worlds import KINDS, run

# The first ten steps are sampled for logging, and record in which order gradients arrive.
WARM_STEPS = 13
MAX_FRAMES = 20
# Entered only where the other rank is late.
WAITING = {"communicator/entries.py: finish_call", "engine/membership/rank_context.py: finish"}


def frames_of_a_backward() -> list[str]:
    """Return the functions of torchestra that a warm backward with one gradient calls.

    From autograd's hooks to the kernel, and back to the end of backward. What the engine does inside, where
    it waits for the other rank, is not counted.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4, bias=False))
    samples = torch.randn(2, 8)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        path = frame.f_code.co_filename.rpartition("/torchestra/")[2]
        name = f"{path}: {frame.f_code.co_name}"
        callers = []
        caller = frame.f_back
        while caller is not None:
            callers.append(caller.f_code.co_filename)
            caller = caller.f_back
        ours = any("/torchestra/nn/" in name for name in (path and frame.f_code.co_filename, *callers))
        if ours and name not in WAITING and not any("/torchestra/engine/" in each for each in callers):
            called.append(name)

    for step in range(WARM_STEPS + 1):
        model.zero_grad()
        loss = model(samples).sum()
        if step == WARM_STEPS:
            sys.setprofile(note)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
    return called


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_passes_few_frames(kind: str) -> None:
    for called in run(kind, 2, frames_of_a_backward):
        assert 0 < len(called) <= MAX_FRAMES, "\n".join(called)
