"""Buckets of gradients for hooks, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import torchestra as dist
from torchestra.nn.parallel.comm_hooks.interface import CommHook, GradBucket

SHAPES = ((7, 5), (5,), (4, 3, 2), (), (6, 5))


def gradients(rank: int, step: int = 0, numel: int | None = None) -> torch.Tensor:
    """Return what rank ``rank`` has computed in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = sum(torch.Size(shape).numel() for shape in SHAPES) if numel is None else numel
    return torch.randn(count, generator=generator)


def mean(size: int, step: int = 0, numel: int | None = None) -> torch.Tensor:
    return torch.stack([gradients(rank, step, numel) for rank in range(size)]).mean(dim=0)


def bucket(
    flat: torch.Tensor, shapes: Sequence[Sequence[int]] = SHAPES, index: int = 0, is_last: bool = True
) -> GradBucket:
    return GradBucket(index, flat, [torch.empty(shape, dtype=flat.dtype) for shape in shapes], is_last)


def apply(
    hook: CommHook, state: Any, flat: torch.Tensor, shapes: Sequence[Sequence[int]] = SHAPES
) -> torch.Tensor:
    """Return what a hook makes of these gradients, as a model would take it over."""
    made = bucket(flat, shapes)
    result = hook(state, made).wait()
    assert made.buffer().dtype == flat.dtype
    assert result.numel() == flat.numel()
    return result.to(flat.dtype).view(-1).clone()


def identical(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is the same on all ranks, bit for bit."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(other, tensor) for other in gathered)
