"""A mesh's dimensions as axes of a strided table, and functions to slice, flatten and unflatten them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from torchestra.arguments.annotations import check_integer, refuse_type
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, UnknownDimensionError, shown

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MAX_RANKS = (1 << 31) - 1

Axes = tuple[tuple[int, int], ...]
"""A dimension: lengths and strides, the outermost first."""


def length(axes: Axes) -> int:
    """Return the length of the dimension."""
    return math.prod(length for length, _ in axes)


def is_ordered(axes: Axes) -> bool:
    """Return whether strides descend without overlap: no axis steps within what the next one spans."""
    return all(outer[1] >= inner[0] * inner[1] for outer, inner in itertools.pairwise(axes))


def joined(axes: Axes) -> Axes:
    """Return the same dimension with as few axes as possible."""
    joined: list[tuple[int, int]] = []
    for length, stride in axes:
        if length == 1:
            continue
        if joined and joined[-1][1] == length * stride:
            joined[-1] = (joined[-1][0] * length, stride)
        else:
            joined.append((length, stride))
    return tuple(joined) or ((1, 1),)


def row_major(shape: Sequence[int]) -> list[Axes]:
    """Return the dimensions of a table of this shape."""
    return [((length, math.prod(shape[index + 1 :])),) for index, length in enumerate(shape)]


def coordinate(position: int, axes: Axes) -> int:
    """Return the coordinate of a table's element along the dimension."""
    found = 0
    for length, stride in axes:
        found = found * length + (position // stride) % length
    return found


def cut(axes: Axes, lengths: Sequence[int]) -> list[Axes]:
    """Divide a dimension's axes among several dimensions of these lengths."""
    check_lengths(lengths, "mesh_sizes", "unflatten")
    parts: list[Axes] = []
    left = list(axes)
    for wanted in reversed(lengths):
        part: list[tuple[int, int]] = []
        while wanted > 1:
            length, stride = left.pop()
            taken = math.gcd(length, wanted)
            if taken == 1 or (taken != length and taken != wanted):
                raise InvalidArgumentError(f"unflatten: lengths {tuple(lengths)} do not fit the axes {axes}")
            part.insert(0, (taken, stride))
            wanted //= taken
            if taken < length:
                left.append((length // taken, stride * taken))
        parts.insert(0, joined(tuple(part)))
    return parts


def offset(position: int, axes: Axes) -> int:
    """Return the distance of a table's element from the first along the dimension."""
    return sum((position // stride) % length * stride for length, stride in axes)


def index_of(mesh_dim: object, names: Sequence[str] | None, ndim: int, name: str) -> int:
    """Return the index of a dimension that the function ``name`` was given by name or index."""
    if isinstance(mesh_dim, str):
        if names is None:
            raise UnknownDimensionError(
                f"{name}: No `mesh_dim_names` found, got {shown(mesh_dim)} as `mesh_dim`"
            )
        if mesh_dim not in names:
            raise UnknownDimensionError(
                f"{name}: Mesh dimension {shown(mesh_dim)} does not exist. Available mesh dimensions are:"
                f" mesh_dim_names={names}, got it as `mesh_dim`"
            )
        return names.index(mesh_dim)
    index = check_integer(mesh_dim, "mesh_dim", name)
    if not -ndim <= index < ndim:
        raise UnknownDimensionError(f"{name}: mesh_dim is {shown(index)}, but the mesh has {ndim} dimensions")
    return index % ndim


def check_device_type(device_type: str) -> None:
    """Refuse a value that is not a kind of device that torch knows."""
    try:
        known = torch.device(device_type).type == device_type
    except RuntimeError:
        known = False
    if not known:
        raise InvalidArgumentError(
            "DeviceMesh: `device_type` must be a kind of device, as 'cpu' or 'cuda', got"
            f" {shown(device_type)}"
        )


def table_of(mesh: object) -> torch.Tensor:
    """Return a table of global ranks; refuse any other value."""
    try:
        table = torch.as_tensor(mesh).detach()
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentTypeError(
            f"DeviceMesh: `mesh` must be a table of ranks, got {shown(mesh)}: {error}"
        ) from error
    if table.dtype not in _INTEGERS and table.numel():
        refuse_type("DeviceMesh", "mesh", "a table of ints", mesh)
    return table.to(device="cpu", dtype=torch.int)


def check_lengths(lengths: Sequence[int], parameter: str, name: str) -> None:
    """Refuse lengths of dimensions that are not positive, or of more ranks than can be."""
    if any(length < 1 for length in lengths) or math.prod(lengths) > _MAX_RANKS:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` must be positive lengths of at most {_MAX_RANKS} ranks in all, got"
            f" {shown(tuple(lengths))}"
        )


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Refuse ranks that repeat or that the world does not have. A range is not searched."""
    if len(ranks) > size:
        raise InvalidArgumentError(
            f"Mesh should not be bigger than default world size {size}, but found {len(ranks)} ranks!"
        )
    few = (ranks[0], ranks[-1]) if isinstance(ranks, range) and ranks else ranks
    if not few or min(few) < 0 or max(few) >= size:
        raise InvalidArgumentError(
            f"DeviceMesh: ranks must be from 0 to {size - 1}, and at least one, got {ranks}"
        )
    if not isinstance(ranks, range) and len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(f"DeviceMesh: ranks must differ, got {list(ranks)}")


def check_names(names: Sequence[str] | None, dimensions: Sequence[Axes]) -> None:
    """Refuse names that repeat or are not one per dimension."""
    if names is None:
        return
    if len(set(names)) != len(names):
        raise InvalidArgumentError(
            "Each mesh_dim_name must be unique. Found repeated mesh_dim_name in mesh_dim_names"
            f" {tuple(names)}"
        )
    if len(names) != len(dimensions):
        raise InvalidArgumentError(
            "mesh_shape and mesh_dim_names should have same length! Found len(mesh_dim_names):"
            f" {len(names)} and len(mesh_shape):{len(dimensions)}."
        )


def check_order(dimensions: Sequence[Axes], names: Sequence[str]) -> None:
    """Refuse dimensions to slice that overlap or are not in the table's order."""
    axes = [axis for dimension in dimensions for axis in dimension if axis[0] > 1]
    if not is_ordered(tuple(sorted(axes, key=lambda axis: -axis[1]))):
        raise UnknownDimensionError(f"Slicing overlapping dim_names {tuple(names)} is not allowed.")
    if any(first[1] < second[1] for first, second in itertools.pairwise(axes)):
        raise UnknownDimensionError(
            f"Invalid mesh_dim_names {tuple(names)} specified. Mesh dim indices should be in ascending order."
        )
