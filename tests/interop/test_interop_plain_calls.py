"""Plain calls of torch.distributed skip torch's Python; all others run it, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_worlds import run

OPTIONS = (
    "AllreduceOptions",
    "ReduceOptions",
    "BroadcastOptions",
    "AllgatherOptions",
    "ReduceScatterOptions",
    "AllToAllOptions",
    "BarrierOptions",
)
"""What the body of each of torch's functions makes."""


class RanTorchsBody(Exception):
    """Torch's function has begun to make its options."""


@contextmanager
def without_torchs_bodies() -> Iterator[None]:
    """Have torch's functions fail before they call the group."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RanTorchsBody

    kept = {name: getattr(c10d, name) for name in (*OPTIONS, "isend", "irecv")}
    vars(c10d).update(dict.fromkeys(kept, refuse))
    try:
        yield
    finally:
        vars(c10d).update(kept)


def calls(tensor: torch.Tensor) -> dict[str, tuple[Callable[..., Any], list[Any], int]]:
    """Return calls with this tensor as input, by name: the function, its arguments, and which is written."""
    size = dist.get_world_size()
    wide = torch.cat([tensor.detach()] * size)
    return {
        "all_reduce": (dist.all_reduce, [tensor], 0),
        "all_reduce, max": (dist.all_reduce, [tensor, dist.ReduceOp.MAX], 0),
        "reduce": (dist.reduce, [tensor, 1], 0),
        "broadcast": (dist.broadcast, [tensor, 1], 0),
        "all_gather": (c10d.all_gather_into_tensor, [torch.zeros_like(wide), tensor], 0),
        "reduce_scatter": (c10d.reduce_scatter_tensor, [torch.zeros_like(tensor), wide], 0),
        "all_to_all": (dist.all_to_all_single, [torch.zeros_like(wide), wide.clone()], 0),
    }


def mine(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(4) + 10 * dist.get_rank()).to(dtype)


def message(tensor: torch.Tensor, **more: Any) -> torch.Tensor:
    """Send a tensor from rank 0 to rank 1, which returns what it gets."""
    if dist.get_rank() == 0:
        dist.send(tensor, 1, **more)
        return tensor
    got = torch.zeros_like(tensor)
    assert dist.recv(got, 0, **more) == 0
    return got


def results(tensor_of: Callable[[], torch.Tensor]) -> dict[str, list[float]]:
    found = {}
    for name in calls(tensor_of()):
        function, arguments, written = calls(tensor_of())[name]
        assert function(*arguments) is None
        found[name] = arguments[written].detach().tolist()
    dist.barrier()
    found["message"] = message(tensor_of(), tag=3).detach().tolist()
    return found


def run_plain_calls() -> dict[str, list[float]]:
    results(mine)  # what is needed but once is made
    with without_torchs_bodies():
        return results(mine)


def run_other_calls() -> dict[str, list[float]]:
    results(mine)
    if dist.get_rank() == 1:  # of the same operations, that is: ranks may differ in which way they go
        with without_torchs_bodies():
            return results(mine)
    return results(lambda: torch.nn.Parameter(mine(), requires_grad=False))


@pytest.mark.parametrize("switched", [False, True])
def test_plain_calls_skip_torchs_python_and_ranks_may_differ_in_it(switched: bool) -> None:
    backend = "gloo" if switched else "torchestra"
    plain, again = (
        run(2, each, backend=backend, switched=switched) for each in (run_plain_calls, run_other_calls)
    )
    assert plain == again
    assert plain[0]["all_reduce"] == [10.0, 12.0, 14.0, 16.0]
    assert plain[1]["message"] == [0.0, 1.0, 2.0, 3.0]


class Seen(TorchFunctionMode):
    """Note the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Nothing(TorchDispatchMode):
    """Change nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass, whose operations are told to it."""

    called: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def call_otherwise() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(mine())
    with Seen() as seen:
        dist.all_reduce(mine())
    assert "all_reduce" in seen.names
    dist.all_reduce(mine().as_subclass(Named))
    assert "all_reduce" in Named.called

    def takes_torchs_way(function: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        with without_torchs_bodies(), pytest.raises(RanTorchsBody):
            function(*arguments, **more)

    for function, arguments, _ in calls(mine()).values():
        takes_torchs_way(function, *arguments, async_op=True)
        with Nothing():
            takes_torchs_way(function, *arguments)
    for name, (function, arguments, _) in calls(mine(torch.complex64)).items():
        if "max" not in name:
            takes_torchs_way(function, *arguments)
    takes_torchs_way(dist.all_reduce, mine(), dist.ReduceOp.AVG)
    takes_torchs_way(dist.broadcast, mine(), group_src=0)
    takes_torchs_way(dist.all_to_all_single, mine(), mine(), [2, 2], [2, 2])
    takes_torchs_way(dist.send, mine(), group_dst=1 - rank)

    with pytest.raises(ValueError, match="does not support"):
        dist.all_reduce(mine(torch.complex64), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="rank of the current process"):
        dist.send(mine(), rank)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        dist.all_reduce([1.0])

    together = [mine(), mine()]
    with dist._coalescing_manager():
        for each in together:
            dist.all_reduce(each)
        assert together[0].tolist() == mine().tolist()  # nothing has begun
    assert together[1].tolist() == [10.0, 12.0, 14.0, 16.0]

    group = dist.new_group([0, 1])
    dist.broadcast(one := mine(), 1, group)
    assert one.tolist() == [10.0, 11.0, 12.0, 13.0]
    dist.all_reduce(one, group=group)
    assert one.tolist() == [20.0, 22.0, 24.0, 26.0]
    if rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        dist.all_reduce(one, group=alone)
    assert one.tolist() == [20.0, 22.0, 24.0, 26.0]
    with pytest.warns(UserWarning, match="does not belong"):
        assert dist.all_reduce(one, group=dist.GroupMember.NON_GROUP_MEMBER) is None
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="group"):
        dist.all_reduce(one, group=group)
    with pytest.raises(ValueError, match="rank"):
        dist.broadcast(one, size)


def test_all_other_calls_run_torchs_function() -> None:
    run(2, call_otherwise)


def fail() -> None:
    dist.all_reduce(mine())
    count = 4 + dist.get_rank()
    with pytest.raises(dist.DistBackendError, match="different operations"), without_torchs_bodies():
        dist.all_reduce(torch.ones(count))


def test_an_error_of_a_plain_call_is_torchs_too() -> None:
    run(2, fail)
