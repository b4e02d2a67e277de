"""torch.compile of the wrapper, and of the module in it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._inductor.compile_fx  # here, so that ranks, which are forked, need not import it
from ddp_models import batch, gradients, loss, mlp, seeded, share

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run

STEPS = 3


def train(inside: bool, options: dict[str, bool]) -> tuple[list[torch.Tensor | None], int]:
    # What the compiler warns of when it looks at the tensors of others.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model = seeded(mlp)
    if inside:
        model = torch.compile(model, backend="eager")
    wrapped = DistributedDataParallel(model, **options)
    called = wrapped if inside else torch.compile(wrapped, backend="eager")
    for _ in range(STEPS):
        wrapped.zero_grad()
        loss(called(share(batch(2), dist.get_rank(), 2))).backward()
    return gradients(wrapped), wrapped.statistics().steps


@pytest.mark.parametrize(("inside", "options"), [(False, {}), (True, {"static_graph": True})])
def test_a_compiled_model_is_averaged(inside: bool, options: dict[str, bool]) -> None:
    alone = seeded(mlp)
    loss(alone(batch(2))).backward()
    for found, steps in run("processes", 2, train, inside, options):
        assert steps == STEPS
        torch.testing.assert_close(found, gradients(alone))
