"""Operations are ranges of torch's profilers, as torch.distributed's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from worlds import run

N = 2


def autograd_profiler() -> Any:
    return torch.autograd.profiler.profile(record_shapes=True)


def kineto_profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)


def events_of(profiled: Any) -> list[Any]:
    return profiled.events() if isinstance(profiled, torch.profiler.profile) else profiled.function_events


def peer() -> int:
    return 1 - dist.get_rank()


def lists() -> list[torch.Tensor]:
    return [torch.zeros(3, 2) for _ in range(N)]


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def exchange(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    for step in (first, second) if dist.get_rank() == 0 else (second, first):
        step()


CALLS: dict[str, tuple[Callable[[], Any], dict[str, list[list[int]]]]] = {
    "all_reduce": (lambda: dist.all_reduce(ones(3, 2)), {"all_reduce": [[3, 2]]}),
    "complex": (lambda: dist.all_reduce(ones(3, dtype=torch.complex64)), {"all_reduce": [[3, 2]]}),
    "async": (lambda: dist.all_reduce(ones(3, 2), async_op=True).wait(), {"all_reduce": [[3, 2]]}),
    "coalesced": (
        lambda: dist.all_reduce_coalesced([ones(3), ones(4, 2)]),
        {"all_reduce": [[3], [4, 2]]},
    ),
    "method": (lambda: dist.group.WORLD.allreduce([ones(3), ones(3)]).wait(), {"all_reduce": [[3], [3]]}),
    "reduce": (lambda: dist.reduce(ones(3, 2), 1), {"reduce": [[3, 2]]}),
    "broadcast": (lambda: dist.broadcast(ones(3, 2), 0), {"broadcast": [[3, 2]]}),
    "all_gather": (lambda: dist.all_gather(lists(), ones(3, 2)), {"all_gather": [[3, 2]]}),
    "into one": (lambda: dist.all_gather_into_tensor(ones(6), ones(3)), {"all_gather": [[3]]}),
    "reduce_scatter": (lambda: dist.reduce_scatter_tensor(ones(3), ones(6)), {"reduce_scatter": [[6]]}),
    "all_to_all": (lambda: dist.all_to_all(lists(), lists()), {"all_to_all": [[3, 2], [3, 2]]}),
    "barrier": (dist.barrier, {"barrier": []}),
    "messages": (
        lambda: exchange(lambda: dist.send(ones(5), peer()), lambda: dist.recv(ones(5), peer())),
        {"send": [[5]], "recv": [[5]]},
    ),
    "begun": (
        lambda: [dist.irecv(ones(5)), dist.isend(ones(5), peer())],
        {"recvAnySource": [[5]], "send": [[5]]},
    ),
}


def call_profiled(name: str, make: Callable[[], Any]) -> None:
    call, expected = CALLS[name]
    call()  # so that what has a fast path is known to take it
    with make() as profiled:
        torch.ones(2)
        call()
        torch.ones(2)
    dist.barrier()
    events = events_of(profiled)
    seen = {event.name: event for event in events if event.name.startswith("gloo:")}
    assert {key.removeprefix("gloo:"): event.input_shapes for key, event in seen.items()} == expected, name
    assert all(event.is_async and event.count == 1 for event in seen.values()), name
    assert len([event for event in events if event.name.startswith("torchestra::")]) == len(expected)
    after = [event.time_range.start for event in events if event.name == "aten::ones"][-1]
    assert all(event.time_range.end <= after for event in seen.values()), name


def call_all_profiled(make: Callable[[], Any]) -> None:
    for name in CALLS:
        call_profiled(name, make)


@pytest.mark.parametrize("make", [autograd_profiler, kineto_profiler])
def test_a_call_is_one_range_with_the_shapes_read(make: Callable[[], Any]) -> None:
    run("processes", N, call_all_profiled, make)


def call_between() -> list[int]:
    """Return how many ranges there are when the profiler is off, on, and off again."""
    tensor, counts = ones(3), []
    for on in (False, True, False):
        with torch.autograd.profiler.profile(enabled=on) as profiled:
            dist.all_reduce(tensor)
        events = profiled.function_events if on else []
        counts.append(len([event for event in events if event.name == "gloo:all_reduce"]))
    assert tensor.tolist() == [8.0] * 3
    return counts


def test_only_while_a_profiler_is_on() -> None:
    assert run("processes", N, call_between) == [[0, 1, 0]] * N


def fail() -> bool:
    with pytest.raises(dist.InvalidArgumentError), torch.autograd.profiler.profile():
        dist.all_reduce("nothing")  # type: ignore[arg-type]
    with pytest.raises(dist.InvalidArgumentError), torch.autograd.profiler.profile():
        dist.send("nothing", peer())  # type: ignore[arg-type]
    tensor = ones(2)
    with torch.autograd.profiler.profile() as profiled:
        dist.all_reduce(tensor)
    return "gloo:all_reduce" in {event.name for event in profiled.function_events}


def test_what_is_refused_leaves_no_range_open() -> None:
    assert run("processes", N, fail) == [True] * N


def named() -> list[str]:
    """Return the names of the operations of a thread's blocks, in order."""
    seen = []
    with torch.autograd.profiler.profile() as profiled:
        dist.all_reduce(ones(2))
        with dist.record_comm("layer 1"):
            dist.all_reduce(ones(2))
            with dist.record_comm("layer 2"):
                dist.broadcast(ones(2), 0, async_op=True).wait()
            dist.barrier()
        dist.barrier()
    for event in sorted(profiled.function_events, key=lambda event: event.time_range.start):
        if event.name.startswith(("gloo:", "layer")):
            seen.append(event.name)
    return seen


def test_a_block_names_its_operations() -> None:
    names = ["gloo:all_reduce", "layer 1", "layer 2", "layer 1", "gloo:barrier"]
    assert run("processes", N, named) == [names] * N
