"""A wrapped module after its group was shrunk: the wrapper goes on in the new group, or a new one does."""

from __future__ import annotations

import pytest
import torch
from ddp_models import batch, loss, mlp

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from worlds import outcomes


class Gone(Exception):
    """End the rank that is lost."""


def averages(wrapped: DistributedDataParallel) -> bool:
    """Return whether a step leaves, on all ranks, the average of their gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = []
    for other in range(size):
        wrapped.module.zero_grad()
        loss(wrapped.module(batch(other))).backward()
        expected.append([parameter.grad.clone() for parameter in wrapped.module.parameters()])
    wrapped.module.zero_grad()
    loss(wrapped(batch(rank))).backward()
    means = [sum(grads) / size for grads in zip(*expected, strict=True)]
    found = [parameter.grad for parameter in wrapped.module.parameters()]
    return all(torch.allclose(mean, grad, atol=1e-6) for mean, grad in zip(means, found, strict=True))


def lose_rank_1(how: str) -> bool:
    wrapped = DistributedDataParallel(mlp(), gradient_as_bucket_view=how == "rebuild")
    if dist.get_rank() == 1:
        raise Gone
    with pytest.raises(dist.GroupAbortedError):
        loss(wrapped(batch(dist.get_rank()))).backward()
    with pytest.raises(dist.GradientReductionError, match=r"or shrink the group and rebuild\(\) the wrapper"):
        wrapped(batch(0))
    assert dist.group.WORLD is not None
    dist.group.WORLD.shrink()
    if how == "rebuild":
        wrapped.rebuild()
    else:
        wrapped = DistributedDataParallel(wrapped.module)
    return averages(wrapped) and averages(wrapped)


@pytest.mark.parametrize("how", ["rebuild", "wrap anew"])
def test_gradients_are_averaged_over_the_ranks_that_are_left(how: str) -> None:
    one, two, three = outcomes("threads", 3, lose_rank_1, how)
    assert isinstance(two.error, Gone)
    assert one.result()
    assert three.result()
