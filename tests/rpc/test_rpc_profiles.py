"""What called workers do, in the legacy profile of their caller: as torch.distributed.rpc has it."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch.autograd.profiler_legacy import profile as torch_profile
from torch.futures import Future

import rpc_workers
import torchestra as dist
import worlds
from torchestra import rpc
from torchestra.compat import rpc as compat_rpc
from torchestra.compat.rpc import _server_process_global_profile
from torchestra.rpc.profiling import profile, run_for_server_profiles


def work(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("## work ##"):
        return torch.add(x, x).relu()


@torch_rpc.functions.async_execution
def nested_in_torch(to: str, x: torch.Tensor) -> Future[torch.Tensor]:
    return torch_rpc.rpc_async(to, work, (x,))  # type: ignore[no-any-return]


@rpc.functions.async_execution
def nested_here(to: str, x: torch.Tensor) -> Future[torch.Tensor]:
    return rpc.rpc_async(to, work, (x,))


def workload(rpc: Any, nested: Any) -> None:
    x = torch.ones(3)
    rpc.rpc_sync("worker1", work, (x,))
    rpc.rpc_async("worker1", torch.mul, (x, x)).wait()
    rpc.rpc_async("worker1", nested, ("worker2", x)).wait()
    rref = rpc.remote("worker2", work, (x,))
    rref._get_profiling_future().wait()
    mine = rpc.remote("worker0", work, (x,))
    mine._get_profiling_future().wait()
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker1", torch.add, (x, torch.ones(4)))


def remote_events(profiled: Any) -> Counter[tuple[Any, ...]]:
    return Counter(
        (
            event.name.replace("nested_in_torch", "nested_here"),
            event.node_id,
            str(event.input_shapes or []),
            len(event.cpu_children),
        )
        for event in profiled.function_events
        if event.is_remote
    )


def both_profiles(directory: str) -> tuple[Any, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/torchs")
    with warnings.catch_warnings():  # torch's RPC uses a group in a way that torch deprecates
        warnings.simplefilter("ignore", UserWarning)
        torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    with torch_profile(record_shapes=True) as torchs:
        if rank == 0:
            workload(torch_rpc, nested_in_torch)
    torch_rpc.shutdown()
    rpc_workers.begin()
    with profile(record_shapes=True) as ours:
        if rank == 0:
            workload(rpc, nested_here)
    if rank == 0:
        check_times(ours)
        assert ours.key_averages().table()
    rpc.shutdown()
    return remote_events(torchs), remote_events(ours)


def check_times(profiled: Any) -> None:
    """What a worker did lies within the time of the call."""
    calls = {event.name: event.time_range for event in profiled.function_events if not event.is_remote}
    for event in profiled.function_events:
        if event.is_remote:
            call = calls[event.name.partition("#remote_op: ")[0]]
            assert call.start <= event.time_range.start <= event.time_range.end <= call.end


def test_a_callers_profile_has_the_same_events_of_called_workers_as_torchs(tmp_path: Any) -> None:
    torchs, ours = worlds.run("processes", 3, both_profiles, str(tmp_path))[0]
    assert ours == torchs
    assert ours


def recorded_names(rref: Any) -> list[list[str]]:
    return [
        [event.name for event in events if event.cpu_parent is None]
        for events in rref.local_value().process_global_function_events
        if events
    ]


def profiles_of_a_server(rank: int) -> None:
    if rank:
        return
    x = torch.ones(2)
    outer = rpc.remote("worker1", _server_process_global_profile)
    outer.rpc_sync().__enter__()
    rpc.rpc_sync("worker1", torch.add, (x, x))
    inner = rpc.remote("worker1", _server_process_global_profile)
    inner.rpc_sync().__enter__()
    with profile() as mine:
        rpc.rpc_sync("worker1", torch.sub, (x, x))
    for each in (inner, outer):
        each.rpc_sync().__exit__(None, None, None)
    rpc.rpc_sync("worker1", torch.mul, (x, x))
    assert rpc.rpc_sync("worker1", recorded_names, (inner,)) == [["aten::sub"]]
    assert rpc.rpc_sync("worker1", recorded_names, (outer,)) == [["aten::add"], ["aten::sub"]]
    assert "rpc_sync#aten::sub(worker0 -> worker1)#remote_op: aten::sub" in [
        event.name for event in mine.function_events
    ]


def test_a_server_records_what_is_called_on_it_while_its_profile_is_on() -> None:
    rpc_workers.run("processes", 2, profiles_of_a_server)


def last_for_long() -> None:
    with torch.profiler.record_function("long"):
        time.sleep(0.05)


def begin_late(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return x - x


def test_a_short_call_is_not_taken_for_a_part_of_a_longer_one_before_it() -> None:
    """Torch has the times of each call since that began; both are executed by one thread here."""
    profiled = _server_process_global_profile()
    with profiled:
        run_for_server_profiles(last_for_long, (), None)
        run_for_server_profiles(begin_late, (torch.ones(2),), None)
    names = [
        [event.name for event in events if event.cpu_parent is None]
        for events in profiled.process_global_function_events
    ]
    assert names == [["long"], ["aten::sub"]]


def names_of_both(rank: int) -> None:
    x = torch.ones(2)
    with torch.profiler.profile() as kinetos:
        compat_rpc.rpc_sync("worker0", torch.add, (x, x))
    assert not [event.name for event in kinetos.events() if "rpc" in event.name]
    with profile() as legacy:
        compat_rpc.rpc_sync("worker0", torch.add, (x, x))
    names = [event.name for event in legacy.function_events if event.name.startswith("rpc_sync")]
    assert names[0] == "rpc_sync#aten::add(worker0 -> worker0)"
    assert f"{names[0]}#remote_op: aten::add" in names


def test_by_torchs_names_calls_are_in_legacy_profiles_only() -> None:
    rpc_workers.run("processes", 1, names_of_both)
