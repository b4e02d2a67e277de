"""The thresholds between algorithms, made so small in a test that a few bytes take every way there is."""

from __future__ import annotations

import dataclasses

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels.selection import Choices

_NEVER = 1 << 62


def use_thresholds(direct: int, chunk: int, stream_above: int = 1500) -> None:
    """On every rank of the default group: the same numbers of bytes instead of the usual ones."""
    given = {
        "direct": direct,
        "eager": min(chunk, at.EAGER_SLOT_BYTES),
        "single_copy": _NEVER,  # test_single_copy.py has what is read where it lies
        "stream_above": stream_above,
    }
    numbers = {field.name: given.get(field.name, chunk) for field in dataclasses.fields(Choices)}
    dist.group.WORLD.communicator.engine.choices = Choices(**numbers)


def thresholds_in_use() -> list[int]:
    """Of the default group, in bytes."""
    choices = dist.group.WORLD.communicator.engine.choices
    numbers = {*dataclasses.asdict(choices).values(), choices.part(dist.get_world_size())}
    return sorted(numbers - {_NEVER})
