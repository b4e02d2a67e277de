"""A wrapped module after its group was shrunk: the wrapper goes on in the new group, or a new one does."""

from __future__ import annotations

import pytest
import torch
from ddp_models import batch, loss, mlp

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from worlds import outcomes, run, store_barrier


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
    store_barrier()
    if dist.get_rank() == 1:
        raise Gone
    if how == "wrap anew after a forward":
        wrapped(batch(0))
        with pytest.raises(dist.GroupAbortedError):
            dist.barrier()
    else:
        with pytest.raises(dist.GroupAbortedError):
            loss(wrapped(batch(dist.get_rank()))).backward()
        # What the step that failed has left expects no gradients of the module alone.
        loss(wrapped.module(batch(0))).backward()
        with pytest.raises(dist.GradientReductionError, match=r"or shrink the group and rebuild\(\) the wr"):
            wrapped(batch(0))
    assert dist.group.WORLD is not None
    dist.group.WORLD.shrink()
    former = wrapped  # as a traceback of the step that failed would, this keeps the wrapper alive
    if how == "rebuild":
        wrapped.rebuild()
    else:
        wrapped = DistributedDataParallel(former.module)
    return averages(wrapped) and averages(wrapped)


@pytest.mark.parametrize("how", ["rebuild", "wrap anew", "wrap anew after a forward"])
def test_gradients_are_averaged_over_the_ranks_that_are_left(how: str) -> None:
    one, two, three = outcomes("threads", 3, lose_rank_1, how)
    assert isinstance(two.error, Gone)
    assert one.result()
    assert three.result()


def rebuild_after_another() -> list[bool]:
    """Wrap a module anew after a death; after a second one, the first wrapper goes on, and then the other."""
    first = DistributedDataParallel(mlp())
    store_barrier("first")
    if dist.get_rank() == 1:
        raise Gone
    with pytest.raises(dist.GroupAbortedError):
        loss(first(batch(dist.get_rank()))).backward()
    dist.group.WORLD.shrink()
    second = DistributedDataParallel(first.module)
    told = [averages(second)]
    store_barrier("second")
    if dist.get_rank() == 0:
        raise Gone
    with pytest.raises(dist.GroupAbortedError):
        loss(second(batch(dist.get_rank()))).backward()
    dist.group.WORLD.shrink()
    first.rebuild()
    told.append(averages(first))
    return told


def test_a_wrapper_goes_on_though_its_module_was_wrapped_anew_in_between() -> None:
    ended = outcomes("threads", 4, rebuild_after_another)
    assert [isinstance(each.error, Gone) for each in ended] == [True, True, False, False]
    assert [each.result() for each in ended[2:]] == [[True, True]] * 2


def test_hooks_that_were_removed_for_good_do_not_come_back() -> None:
    def body() -> bool:
        wrapped = DistributedDataParallel(mlp())
        wrapped._remove_autograd_hooks()
        wrapped.rebuild()
        return any(each._post_accumulate_grad_hooks for each in wrapped.parameters())

    assert run("threads", 1, body) == [False]
