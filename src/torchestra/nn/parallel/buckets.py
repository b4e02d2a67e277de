"""Assigns gradients to buckets, and allocates the buckets' memory.

Gradients are reduced in *buckets*: few operations instead of one per parameter, but several, so that the
first can run while backward computes the rest. A bucket has one dtype, and is on one device.

Gradients are reduced in place, so a bucket needs no memory of its own. It has memory, which the group's ranks
share, only where all of it must be in one tensor: for a communication hook, or for gradients that are views
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.gradient_memory import is_large
from torchestra.process_group import ProcessGroup

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_CAP_MB = 25.0

_Kind = tuple[torch.dtype, torch.device]


def compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    bucket_size_limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
) -> tuple[list[list[int]], list[int]]:
    """Assign tensors to buckets: neighbours of one dtype and device, until they reach a size.

    Args:
        tensors: the tensors to put into buckets.
        bucket_size_limits: in bytes: the first bucket of each dtype and device is closed when it reaches the
            first limit, the second at the second, and so on; the last limit holds for all further ones.
        expect_sparse_gradient: by index; a tensor for which this is true gets a bucket of its own.
        tensor_indices: the index of each of ``tensors``, where they are not 0, 1, 2, ...; then the order of
            ``tensors`` is the order in which they will be ready.

    Returns:
        The indices in each bucket, and each bucket's limit (0 for a sparse one). With ``tensor_indices`` the
        buckets are in the order in which they will be complete, else in the order of their first members.

    Raises:
        InvalidArgumentError: there is no tensor or no limit, a tensor is sparse, or lengths do not match.
    """
    indices = list(tensor_indices) or list(range(len(tensors)))
    _check_assignment(tensors, bucket_size_limits, expect_sparse_gradient, indices)
    filling: dict[_Kind, list[int]] = {}
    bytes_in: dict[_Kind, int] = {}
    closed_of: dict[_Kind, int] = {}
    found: list[tuple[list[int], int]] = []

    def limit_of(kind: _Kind) -> int:
        return bucket_size_limits[min(closed_of.get(kind, 0), len(bucket_size_limits) - 1)]

    for index, tensor in zip(indices, tensors, strict=True):
        if expect_sparse_gradient and expect_sparse_gradient[index]:
            found.append(([index], 0))
            continue
        kind = tensor.dtype, tensor.device
        filling.setdefault(kind, []).append(index)
        bytes_in[kind] = bytes_in.get(kind, 0) + tensor.nbytes
        if bytes_in[kind] >= limit_of(kind):
            found.append((filling.pop(kind), limit_of(kind)))
            bytes_in[kind] = 0
            closed_of[kind] = closed_of.get(kind, 0) + 1
    found += [(members, limit_of(kind)) for kind, members in filling.items()]
    if tensor_indices:
        order = {index: position for position, index in enumerate(indices)}
        found.sort(key=lambda bucket: order[bucket[0][-1]])
    else:
        found.sort(key=lambda bucket: bucket[0][0])
    return [members for members, _ in found], [limit for _, limit in found]


def _check_assignment(
    tensors: Sequence[torch.Tensor],
    limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool],
    indices: Sequence[int],
) -> None:
    name = "compute_bucket_assignment_by_size"
    if not tensors or not limits:
        raise InvalidArgumentError(
            f"{name}: there must be at least one tensor and one limit, got {len(tensors)} and {len(limits)}"
        )
    if len(indices) != len(tensors) or (
        expect_sparse_gradient and len(expect_sparse_gradient) <= max(indices)
    ):
        raise InvalidArgumentError(
            f"{name}: `tensor_indices` and `expect_sparse_gradient` must have one entry for each of"
            f" {len(tensors)} tensors"
        )
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise InvalidArgumentError(f"{name}: No support for sparse tensors.")


@dataclass(eq=False)
class Bucket:
    """Some parameters whose gradients are reduced together.

    Attributes:
        number: the bucket's position in the order in which they are reduced.
        indices: of the parameters, in their order in the bucket.
        flat: memory for all its gradients, one after the other, if it has any.
        views: the part of ``flat`` for each parameter, with its shape and strides.
        sparse: whether the only parameter has sparse gradients.
        large: the slots of large parameters (gradient_memory.py).
        nbytes: of all its gradients, were they dense.
        limit: the bytes at which the bucket was closed.
    """

    number: int
    indices: tuple[int, ...]
    parameters: tuple[torch.Tensor, ...]
    flat: torch.Tensor | None
    views: list[torch.Tensor]
    sparse: bool
    large: tuple[int, ...]
    nbytes: int
    limit: int


def make_bucket(
    number: int,
    indices: Sequence[int],
    parameters: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    with_flat: bool,
    sparse: bool = False,
    limit: int = 0,
) -> Bucket:
    """Make a bucket for the parameters with these indices.

    Args:
        with_flat: give it memory, unless its gradient is sparse.
    """
    members = tuple(parameters[index] for index in indices)
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = []
    if with_flat and not sparse:
        flat, views = shared_flat(members, group)
    nbytes = sum(parameter.nbytes for parameter in members)
    large = tuple(slot for slot, parameter in enumerate(members) if is_large(parameter))
    return Bucket(number, tuple(indices), members, flat, views, sparse, large, nbytes, limit)


def shared_memory(numel: int, dtype: torch.dtype, group: ProcessGroup, device: torch.device) -> torch.Tensor:
    """Allocate memory that the group's ranks share, where there is room, else ordinary memory.

    It is uninitialised. A GPU's memory is not shared.
    """
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    try:
        return group.communicator.engine.empty((numel,), dtype)
    except InvalidArgumentError:
        return torch.empty(numel, dtype=dtype)


def shared_flat(
    parameters: Sequence[torch.Tensor], group: ProcessGroup
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one tensor of zeros for all parameters, in shared memory; return it and its views."""
    first = parameters[0]
    flat = shared_memory(sum(map(torch.Tensor.numel, parameters)), first.dtype, group, first.device).zero_()
    return flat, views_of(flat, parameters)


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View consecutive parts of a tensor with the parameters' shapes and strides."""
    return list(map(like, flat.split(list(map(torch.Tensor.numel, parameters))), parameters))


def like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """View a part with the parameter's shape, and with its strides if those leave no gaps."""
    dense = torch.empty_like(parameter, memory_format=torch.preserve_format, device="meta").stride()
    if dense != parameter.stride():
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, dense)


def check_plan(
    plan: Sequence[Sequence[int]], parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
) -> None:
    """Refuse buckets that do not name each parameter once, mix dtypes or devices, or do not leave a sparse
    gradient alone.

    Raises:
        InvalidArgumentError: the buckets are such.
    """
    if not parameters:
        raise InvalidArgumentError("Reducer: Expected at least one parameter.")
    if len(sparse) != len(parameters):
        raise InvalidArgumentError(
            f"Reducer: `expect_sparse_gradients` must have an entry for each of {len(parameters)} parameters,"
            f" got {len(sparse)}"
        )
    named = sorted(index for indices in plan for index in indices)
    if named != list(range(len(parameters))) or not all(plan):
        raise InvalidArgumentError(
            f"Reducer: the buckets must name each of {len(parameters)} parameters once, and each bucket at"
            f" least one, got {plan}"
        )
    for number, indices in enumerate(plan):
        dtypes = {parameters[index].dtype for index in indices}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise InvalidArgumentError(
                f"Reducer: All parameters in a bucket must have the same dtype; bucket {number} has {names}"
            )
        devices = {parameters[index].device for index in indices}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise InvalidArgumentError(
                f"Reducer: All parameters in a bucket must be placed on the same device; bucket {number}"
                f" is on {names}"
            )
        if len(indices) > 1 and any(sparse[index] for index in indices):
            raise InvalidArgumentError(
                "Reducer: Buckets with more than one variable cannot include variables that expect a sparse"
                f" gradient; bucket {number} has {len(indices)}"
            )
