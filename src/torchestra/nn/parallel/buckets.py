"""Which gradients are reduced together, and where each of them lies in its bucket.

Gradients arrive last layer first. So parameters are taken in reverse order, and a bucket is closed as soon
as it has reached its size: the first one early, so that communication starts early, the others later, so
that there are few. A bucket has one dtype; dtypes that alternate fill buckets side by side. Buckets are
numbered in the order in which their last gradients are expected, because they are reduced in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_CAP_MB = 25.0


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    first_bytes: int = FIRST_BUCKET_BYTES,
    cap_bytes: int = int(BUCKET_CAP_MB * (1 << 20)),
) -> tuple[tuple[int, ...], ...]:
    """The indices of the parameters in each bucket, in the order in which their gradients are expected.

    Args:
        parameters: in the order in which the forward pass uses them, roughly.
        first_bytes: the first bucket of each dtype is closed when it has so many bytes, or more.
        cap_bytes: the same for the others.
    """
    open_buckets: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    caps: dict[torch.dtype, int] = {}
    closed: list[tuple[int, ...]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        dtype = parameter.dtype
        open_buckets.setdefault(dtype, []).append(index)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.nbytes
        if sizes[dtype] >= caps.get(dtype, first_bytes):
            closed.append(tuple(open_buckets.pop(dtype)))
            sizes[dtype] = 0
            caps[dtype] = cap_bytes
    closed.extend(tuple(indices) for indices in open_buckets.values())
    return tuple(sorted(closed, key=lambda indices: -indices[-1]))


@dataclass(frozen=True, eq=False)
class Bucket:
    """The memory in which some gradients are reduced together.

    Attributes:
        indices: which parameters, in the order in which their gradients are expected.
        parameters: these parameters.
        flat: one dimension, all their gradients one after the other.
        views: for each parameter its part of ``flat``, with the parameter's shape and strides.
    """

    indices: tuple[int, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]


def make_bucket(
    indices: tuple[int, ...], parameters: Sequence[torch.nn.Parameter], group: ProcessGroup
) -> Bucket:
    """A bucket in the memory that the group's ranks share, where there is room, else in ordinary memory."""
    chosen = tuple(parameters[index] for index in indices)
    numel = sum(parameter.numel() for parameter in chosen)
    try:
        flat = group.communicator.engine.empty((numel,), chosen[0].dtype)
    except InvalidArgumentError:
        flat = torch.empty(numel, dtype=chosen[0].dtype)
    flat.zero_()
    parts = flat.split([parameter.numel() for parameter in chosen])
    views = tuple(_like(part, parameter) for part, parameter in zip(parts, chosen, strict=True))
    return Bucket(indices, chosen, flat, views)


def _like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part with the parameter's shape, and with its strides if those leave no gaps."""
    dense = torch.empty_like(parameter, memory_format=torch.preserve_format, device="meta").stride()
    if dense != parameter.stride():
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, dense)
