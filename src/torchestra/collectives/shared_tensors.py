"""Tensors in memory that the ranks of a group share, which its collectives need not copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.arguments.annotations import checked
from torchestra.engine.interface import Engine
from torchestra.engine.local import moves
from torchestra.errors import InvalidArgumentError, shown
from torchestra.process_group import NonMember
from torchestra.world.init import AnyGroup, default_group

__all__ = ["empty", "full", "ones", "zeros"]


def sharing_engine(group: AnyGroup | None, name: str) -> Engine:
    """Return the engine whose ranks share memory.

    Raises:
        InvalidArgumentError: this rank is not in the group.
        GroupDestroyedError: it has left the group.
    """
    chosen = default_group() if group is None else group
    if isinstance(chosen, NonMember):
        raise InvalidArgumentError(f"{name}: this rank is {chosen!r}")
    chosen.communicator.queue.refuse_if_closed(name)
    return chosen.communicator.engine


@checked
def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: AnyGroup | None = None
) -> torch.Tensor:
    """Return an uninitialised CPU tensor in memory that the group's ranks share; any rank may call it alone.

    Collectives of this group make no intermediate copies if every rank's tensor is of this kind: the ranks
    read each other's. Apart from that they are ordinary tensors, and stay valid after the group is destroyed.
    ``dtype`` is torch's default dtype unless given.

    Raises:
        InvalidArgumentError: this rank is not in the group, or the group's memory is full.
    """
    engine = sharing_engine(group, "empty")
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    lengths = tuple(torch.Size(shape))  # type: ignore[arg-type]
    if any(length < 0 for length in lengths):
        raise InvalidArgumentError(f"empty: lengths must not be negative, got {lengths}")
    chosen_dtype = dtype or torch.get_default_dtype()
    if not moves(chosen_dtype):
        raise InvalidArgumentError(f"empty: `dtype` is {chosen_dtype}, of which tensors cannot be sent")
    return engine.empty(lengths, chosen_dtype)


@checked
def full(
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    group: AnyGroup | None = None,
) -> torch.Tensor:
    """Return a tensor of :func:`empty`, filled with ``fill_value``."""
    tensor = empty(size, dtype=dtype, group=group)
    try:
        return tensor.fill_(fill_value)
    except (OverflowError, RuntimeError) as error:  # a number out of the dtype's range
        raise InvalidArgumentError(f"full: `fill_value`: {error}, got {shown(fill_value)}") from error


@checked
def zeros(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: AnyGroup | None = None
) -> torch.Tensor:
    """Return a tensor of :func:`empty`, filled with 0."""
    return empty(*size, dtype=dtype, group=group).zero_()


@checked
def ones(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: AnyGroup | None = None
) -> torch.Tensor:
    """Return a tensor of :func:`empty`, filled with 1."""
    return empty(*size, dtype=dtype, group=group).fill_(1)
