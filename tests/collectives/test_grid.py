"""Every collective, on ranks of both kinds, for world sizes and lengths on both sides of every threshold."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import CASES, Case, check_case

import torchestra as dist
from torchestra.engine.algorithms import Choices
from worlds import KINDS, run

SIZES = (1, 2, 3, 4, 7)


def tiny() -> Choices:
    """Thresholds so small that a few kilobytes take many chunks, and are written past the caches."""
    engine = dist.group.WORLD.communicator.engine
    return dataclasses.replace(engine.choices, direct=128, chunk=384, stream_above=1500)


def many_chunks(case: Case) -> None:
    dist.group.WORLD.communicator.engine.choices = tiny()
    check_case(case, (0, 1, 13, 32, 33, 97, 501), (torch.float32,), ("ordinary",))
    check_case(case, (13, 501), (torch.float32,), ("arena", "mixed"))
    check_case(case, (77,), (torch.uint8, torch.complex128), ("mixed",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_every_operation_gives_what_its_formula_says(case: Case, size: int, kind: str) -> None:
    run(kind, size, many_chunks, case)


def around_the_thresholds(case: Case) -> None:
    choices = dist.group.WORLD.communicator.engine.choices
    size = dist.get_world_size()
    lengths = {
        edge // 4 + more for edge in (choices.direct, choices.part(size), choices.chunk) for more in (0, 1)
    } | {choices.chunk + 5}
    check_case(case, sorted(lengths), (torch.float32,), ("ordinary",))
    check_case(case, (choices.chunk + 5,), (torch.float32,), ("arena",))


@pytest.mark.parametrize(("kind", "size"), [("processes", 2), ("threads", 3)])
@pytest.mark.parametrize("case", CASES)
def test_lengths_around_the_thresholds_that_are_in_use(case: Case, size: int, kind: str) -> None:
    run(kind, size, around_the_thresholds, case)
