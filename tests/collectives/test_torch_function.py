"""Classes of tensors that have ``__torch_function__`` override the collectives, as torch.distributed's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

import torchestra as dist
from torchestra.testing import spawn_threads_and_init_comms

CALLS: dict[str, Sequence[Any]] = {
    "all_reduce": ("own",),
    "reduce": ("own", 0),
    "broadcast": ("own", 0),
    "all_gather": (["plain"], "own"),
    "all_gather_into_tensor": ("plain", "own"),
    "gather": ("own",),
    "scatter": ("own",),
    "reduce_scatter": ("own", ["plain"]),
    "reduce_scatter_tensor": ("plain", "own"),
    "all_to_all": (["plain"], ["own"]),
    "all_to_all_single": ("plain", "own"),
    "all_reduce_coalesced": (["plain", "own"],),
    "all_gather_coalesced": ([["plain"]], ["own"]),
    "send": ("own", 0),
    "recv": ("own",),
    "isend": ("own", 0),
    "irecv": ("own",),
}
RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
seen: list[tuple[Any, ...]] = []


class Own(torch.Tensor):
    """Notes what it is given to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append((func, tuple(types), len(args), dict(kwargs)))
        return "overridden"


class Mine(torch.Tensor):
    """Adds nothing to torch's ``__torch_function__``."""


def made(value: Any) -> Any:
    if isinstance(value, list):
        return [made(each) for each in value]
    if isinstance(value, int):
        return value
    return torch.ones(2).as_subclass(Own if value == "own" else torch.Tensor)


def is_overridden_in_torch(name: str) -> bool:
    """Return whether torch's function, or what it is now an alias of, asks for overrides: few do in 2.10."""
    functions = [getattr(distributed, each, None) for each in (name, RENAMED.get(name, ""))]
    return any(
        "has_torch_function" in inspect.unwrap(each).__code__.co_names
        for each in functions
        if each is not None
    )


@pytest.mark.parametrize("name", CALLS)
def test_the_override_is_called_as_by_torch_distributed(name: str) -> None:
    """Before any group is asked for, with the same arguments."""
    seen.clear()
    args = made([*CALLS[name]])
    if not is_overridden_in_torch(name):
        assert getattr(dist, name)(*args) == "overridden" or name == "send"
        assert [call[0] for call in seen] == [getattr(dist, name)]
        return
    results = [getattr(module, name)(*args) for module in (dist, distributed)]
    (ours, *as_called), (torchs, *as_torch_calls) = seen
    assert results == ["overridden"] * 2 or name == "send"
    assert as_called[:2] == as_torch_calls[:2]
    assert as_called[2].keys() == as_torch_calls[2].keys()
    assert ours is getattr(dist, name)
    assert torchs.__name__ in (name, RENAMED.get(name))


@pytest.mark.parametrize("name", ["scan", "exscan"])
def test_operations_that_torch_does_not_have_are_overridden_too(name: str) -> None:
    assert getattr(dist, name)(made("own")) == "overridden"


class Counting(TorchFunctionMode):
    """Counts the calls of all_reduce."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is dist.all_reduce
        return func(*args, **(kwargs or {}))


@spawn_threads_and_init_comms(world_size=2)
def run_with_classes_and_modes() -> None:
    tensor = torch.ones(3).as_subclass(Mine)
    assert dist.all_reduce(tensor) is None
    assert type(tensor) is Mine
    assert tensor.tolist() == [2, 2, 2]
    outputs = [torch.zeros(1), torch.zeros(1)]
    work = dist.all_gather(
        outputs, torch.full((1,), dist.get_rank()).float().as_subclass(Mine), async_op=True
    )
    assert work is not None
    work.wait()
    assert outputs == [0, 1]
    plain = torch.ones(2)
    with Counting() as mode:
        dist.all_reduce(plain)
    assert (mode.calls, plain.tolist()) == (1, [2, 2])


def test_classes_without_an_override_and_modes_run_the_operation() -> None:
    run_with_classes_and_modes()
