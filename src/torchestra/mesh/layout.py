"""A mesh's dimensions as axes of a strided table: what slicing, flattening and unflattening do to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torchestra.errors import InvalidArgumentError, UnknownDimensionError

Axes = tuple[tuple[int, int], ...]
"""A dimension: lengths and strides, the outermost first."""


def length(axes: Axes) -> int:
    """How many places the dimension has."""
    return math.prod(length for length, _ in axes)


def is_ordered(axes: Axes) -> bool:
    """Whether strides descend without overlap: no axis steps within what the next one spans."""
    return all(outer[1] >= inner[0] * inner[1] for outer, inner in itertools.pairwise(axes))


def joined(axes: Axes) -> Axes:
    """The same dimension with as few axes as possible."""
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
    """The dimensions of a table of this shape."""
    return [((length, math.prod(shape[index + 1 :])),) for index, length in enumerate(shape)]


def coordinate(place: int, axes: Axes) -> int:
    """Where a place of the table is along the dimension."""
    found = 0
    for length, stride in axes:
        found = found * length + (place // stride) % length
    return found


def cut(axes: Axes, lengths: Sequence[int]) -> list[Axes]:
    """A dimension's axes, divided among several dimensions of these lengths."""
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


def offset(place: int, axes: Axes) -> int:
    """How far a place of the table is from where the dimension begins."""
    return sum((place // stride) % length * stride for length, stride in axes)


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Refuse ranks that repeat or that the world does not have. A range is not looked through."""
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
    """Refuse names that repeat or are not one for each dimension."""
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
        raise InvalidArgumentError(f"Slicing overlapping dim_names {tuple(names)} is not allowed.")
    if any(first[1] < second[1] for first, second in itertools.pairwise(axes)):
        raise UnknownDimensionError(
            f"Invalid mesh_dim_names {tuple(names)} specified. Mesh dim indices should be in ascending order."
        )
