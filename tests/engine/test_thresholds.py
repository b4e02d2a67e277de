"""Thresholds that the kernels cannot work with are refused, and ranks with different ones get an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import torchestra as dist
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.local import LocalEngine
from torchestra.errors import CollectiveMismatchError, InvalidArgumentError
from worlds import KINDS, run

LENGTH = 200_000


def engine_here() -> LocalEngine:
    found = dist.group.WORLD.communicator.engine
    assert isinstance(found, LocalEngine)
    return found


OPERATIONS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "all_reduce": lambda tensor, size: dist.all_reduce(tensor),
    "broadcast": lambda tensor, size: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor, size: dist.all_gather_into_tensor(tensor.new_empty(size * LENGTH), tensor),
    "reduce_scatter": lambda tensor, size: dist.reduce_scatter_tensor(
        tensor.new_empty(LENGTH // size), tensor[: LENGTH // size * size]
    ),
    "all_to_all": lambda tensor, size: dist.all_to_all_single(torch.empty_like(tensor), tensor),
    "barrier": lambda tensor, size: dist.barrier(),
}


def with_thresholds_of_its_own(field: str, value: int) -> list[str]:
    """Return what each operation says while one rank has another threshold; then all work again."""
    engine, size = engine_here(), dist.get_world_size()
    usual = engine.choices
    said = []
    for name, operation in OPERATIONS.items():
        for in_arena in (False, True):
            if dist.get_rank() == 1:
                engine.choices = dataclasses.replace(usual, **{field: value})
            tensor = dist.ones(LENGTH) if in_arena else torch.ones(LENGTH)
            with pytest.raises(CollectiveMismatchError) as caught:
                operation(tensor, size)
            assert bool((tensor == 1).all()), f"{name} has moved something"
            said.append(str(caught.value))
            engine.choices = usual
            dist.all_reduce(tensor)
            assert bool((tensor == size).all())
    return said


@pytest.mark.parametrize(("field", "value"), [("direct", 0), ("chunk", 4096), ("share", 4096)])
def test_ranks_with_different_thresholds_get_an_error_before_anything_moves(field: str, value: int) -> None:
    by_rank = run("threads", 2, with_thresholds_of_its_own, field, value)
    assert by_rank[0] == by_rank[1]
    for said in by_rank[0]:
        assert f"{field}={value}" in said
        assert "all ranks must have the same" in said


@pytest.mark.parametrize("kind", KINDS)
def test_only_how_results_are_written_may_differ(kind: str) -> None:
    run(kind, 2, stream_on_one_rank)


def stream_on_one_rank() -> None:
    engine = engine_here()
    engine.choices = dataclasses.replace(engine.choices, stream_above=dist.get_rank() * 1000)
    tensor = torch.ones(LENGTH)
    dist.all_reduce(tensor)
    assert bool((tensor == 2).all())


def set_each(wrong: dict[str, int]) -> None:
    engine = engine_here()
    usual = engine.choices
    (field,) = wrong
    with pytest.raises(InvalidArgumentError, match=rf"^{field} is -?\d+ bytes, must be from \d+ to \d+"):
        engine.choices = dataclasses.replace(usual, **wrong)
    assert engine.choices == usual
    tensor = torch.ones(LENGTH)
    dist.all_reduce(tensor)
    assert bool((tensor == 2).all())


@pytest.mark.parametrize(
    "wrong",
    [
        {"direct": -1},
        {"direct": (1 << 20) + 1},
        {"chunk": 0},
        {"chunk": 63},
        {"chunk": (1 << 20) + 1},
        {"share": 8},
        {"share": 1 << 40},
        {"stream_above": -1},
    ],
    ids=str,
)
def test_thresholds_out_of_bounds_are_refused(wrong: dict[str, int]) -> None:
    run("threads", 2, set_each, wrong)


@pytest.mark.parametrize("size", [2, 3, 64, 1000, 4000])
def test_the_usual_thresholds_are_within_bounds_and_parts_fit_into_a_buffer(size: int) -> None:
    from torchestra.engine.memory.arena import layout_for

    buffer = layout_for(size).chunk_buffer_bytes
    choices = Choices.for_group(size, buffer)
    choices.check(buffer)
    for each in (choices, dataclasses.replace(choices, chunk=64)):
        assert each.part(size) * (size - 1) <= buffer
