"""Test what it takes to add a collective: a row of the table, and a kernel of a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine import local, operations
from torchestra.engine.entry_layout import State
from torchestra.engine.kernels.buffers import buffer_of
from torchestra.engine.kernels.waiting import arrive, end, enter, meet
from torchestra.engine.native.atomics import kernel, load, memcpy, store
from torchestra.engine.native.kernel import entry_point
from torchestra.engine.operations import Collective, Parameter
from torchestra.errors import CollectiveMismatchError
from torchestra.process_group.forms import Form, in_place
from worlds import KINDS, run

RANK, SIZE, RESUME, NOT_SHARED, DONE = at.RANK, at.SIZE, at.RESUME, at.NOT_SHARED, at.DONE
PLAN_CONTEXT, PLAN_META, PLAN_UNIT = at.PLAN_CONTEXT, at.PLAN_META, at.PLAN_UNIT

_TENSOR = Parameter("tensor")
SHIFT = Collective(
    "shift", 40, "Replace each rank's small tensor by that of the rank before it.", _TENSOR, _TENSOR
)


@kernel
def shift(plan, count, address):  # type: ignore[no-untyped-def]
    context, meta = load(plan + PLAN_CONTEXT), load(plan + PLAN_META)
    rank, size, length = load(context + RANK), load(context + SIZE), count * load(plan + PLAN_UNIT)
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, length, 1)
        if code != DONE:
            return code
        memcpy(buffer_of(context, rank, 0), address, length)
        arrive(context, meta, count, NOT_SHARED)
    code = meet(context, meta, count)
    if code != DONE:
        store(context + RESUME, 1)
        return code
    memcpy(address, buffer_of(context, (rank + size - 1) % size, 0), length)
    end(context)
    return DONE


@pytest.fixture(autouse=True)
def _tables_are_as_before() -> Iterator[None]:
    yield
    operations.COLLECTIVES.pop("shift", None)
    for table in (local.KERNELS, local.ALGORITHMS):
        table.pop("shift", None)


def install() -> None:
    """In every process of the world, before the group that uses it is made."""
    operations.add(SHIFT)
    local.KERNELS["shift"] = shift
    local.ALGORITHMS["shift"] = lambda engine, plan, inputs, outputs: (
        getattr(engine.kernels, "shift"),  # noqa: B009 - the class does not declare it
        (plan.address, inputs[0].numel(), inputs[0].data_ptr()),
    )


def use() -> None:
    install()
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(list(range(size)))
    communicator, before = group.communicator, (rank - 1) % size

    def shifted(tensor: torch.Tensor, **options: Any) -> Any:
        return communicator.collective(SHIFT, tensor, tensor, **options)

    tensor = torch.full((2, 2), float(rank))
    assert shifted(tensor) is None
    assert tensor.tolist() == [[before] * 2] * 2
    tensor = torch.full((2, 2), float(rank))
    shifted(tensor.t()[1:], async_op=True).wait()
    assert tensor.tolist() == [[rank, before]] * 2
    Form(SHIFT, in_place, "tensors opts?").method()(group, [tensor]).wait()
    assert tensor.tolist() == [[before, (rank - 2) % size]] * 2
    with pytest.raises(CollectiveMismatchError, match=r"shift\(float32, 3 elements\)"):
        shifted(torch.ones(3 + rank))
    other = shifted if rank else communicator.all_reduce
    with pytest.raises(CollectiveMismatchError, match="all_reduce"):
        other(tensor, **({} if rank else {"op": dist.ReduceOp.SUM}))


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_where_every_other_does(kind: str) -> None:
    run(kind, 3, use)


def test_it_may_be_added_while_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that is another rank, and ahead."""

    def add_and_load(loaded: Any) -> Any:
        install()
        return entry_point(loaded)

    monkeypatch.setattr(local, "entry_point", add_and_load)
    assert local.Kernels(State()).barrier == entry_point(local.KERNELS["barrier"])


def test_it_runs_in_a_fake_world() -> None:
    install()
    dist.init_process_group("fake", rank=1, world_size=3, store=dist.FakeStore())
    communicator: Any = dist.group.WORLD.communicator
    tensor = torch.ones(2)
    assert communicator.collective(SHIFT, tensor, tensor) is None
    assert communicator.collective(SHIFT, tensor, tensor, async_op=True).is_completed()
    dist.destroy_process_group()
