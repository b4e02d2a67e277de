"""Workers that shut down, and workers that die."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
import rpc_workers
import torch

import torchestra as dist
import worlds
from torchestra import rpc
from torchestra.errors import RpcTimeoutError, WorkerFailedError


def sleep_long() -> None:
    time.sleep(60)


def echo(value):
    return value


def make() -> torch.Tensor:
    return torch.ones(2)


def live_on() -> tuple[float, str]:
    rank = rpc_workers.begin()
    if rank == 2:
        worlds.leave_note("ready")
        time.sleep(60)
    worlds.await_note("ready")
    rref = rpc.remote("worker2", make)
    assert rref.to_here().tolist() == [1, 1]
    futures = [rpc.rpc_async("worker2", sleep_long) for _ in range(5)]
    futures += [rpc.rpc_async("worker2", echo, (torch.ones(1 << 20),)) for _ in range(20)]
    worlds.leave_note(f"calls-{rank}")
    began = None
    errors = []
    for future in futures:
        try:
            future.wait()
        except WorkerFailedError as error:
            began = began or time.monotonic()
            errors.append(error)
    took = time.monotonic() - began
    assert len(errors) >= 5
    assert errors[0].worker == "worker2"
    with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died"):
        rpc.rpc_sync("worker2", echo, (1,))
    with pytest.raises(WorkerFailedError, match="worker2"):
        rref.to_here()
    assert rpc.rpc_sync(1 - rank, echo, (rank,)) == rank  # the others go on
    dist.barrier(dist.new_group([0, 1], use_local_synchronization=True))
    rpc.shutdown(graceful=False)
    return took, str(errors[0])


def test_a_worker_that_is_killed_is_named_and_the_others_go_on() -> None:
    with worlds.processes(3, live_on) as world:
        for rank in (0, 1):
            world.await_file(f"calls-{rank}")
        world.signal(2, signal.SIGKILL)
        ended = [world.wait(rank) for rank in (0, 1)]
    for outcome in ended:
        took, message = outcome.result()
        assert took < 20
        assert "died (killed by SIGKILL)" in message
        assert "'worker2' (rank 2)" in message


def shut_down_without_one() -> str:
    rank = rpc_workers.begin()
    if rank == 1:
        worlds.leave_note("ready")
        time.sleep(60)
    with pytest.raises(WorkerFailedError, match=r"'worker1' \(rank 1\) died") as caught:
        rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.get_worker_info()
    return str(caught.value)


def test_a_graceful_shutdown_with_a_dead_worker_is_an_error() -> None:
    with worlds.processes(2, shut_down_without_one) as world:
        world.await_file("ready")
        world.signal(1, signal.SIGKILL)
        world.wait(0).result()


_passed = threading.Event()


def test_a_shutdown_that_nobody_joins_times_out() -> None:
    _passed.clear()
    worlds.run("threads", 2, _time_out_alone)


def _time_out_alone() -> None:
    rank = rpc_workers.begin()
    if rank == 0:
        with pytest.raises(RpcTimeoutError, match="'worker1' had not called shutdown"):
            rpc.shutdown(timeout=0.3)
        _passed.set()
    else:
        assert _passed.wait(30)
        with pytest.raises(WorkerFailedError, match="has shut down"):
            rpc.rpc_sync("worker0", echo, (1,))
        rpc.shutdown(graceful=False)


def call_back(depth: int) -> None:
    if depth:
        rpc.rpc_async((rpc.get_worker_info().id + 1) % 3, call_back, (depth - 1,))
    else:
        _calls.append(depth)


_calls: list[int] = []


def test_a_graceful_shutdown_waits_for_calls_that_calls_make() -> None:
    _calls.clear()
    rpc_workers.run("threads", 3, _start_calls)
    assert len(_calls) == 30


def _start_calls(rank: int) -> None:
    for _ in range(10):
        rpc.rpc_async((rank + 1) % 3, call_back, (12,))


def _begin_again() -> None:
    for _ in range(3):
        rank = rpc_workers.begin()
        assert rpc.rpc_sync(1 - rank, echo, (rank,)) == rank
        rpc.shutdown()


def test_rpc_can_begin_again_and_leaves_no_thread_and_no_memory(kind: str) -> None:
    worlds.run(kind, 2, _begin_again_and_look if kind == "processes" else _begin_again)
    deadline = time.monotonic() + 10
    while left := [each.name for each in threading.enumerate() if each.name.startswith("rpc-")]:
        assert time.monotonic() < deadline, left


def _begin_again_and_look() -> None:
    gc.collect()
    before = len(worlds.mappings())
    _begin_again()
    left = [each.name for each in threading.enumerate() if each.name.startswith("rpc-")]
    assert left == []
    gc.collect()
    assert len(worlds.mappings()) <= before


def test_a_name_must_be_unique_and_valid() -> None:
    ended = worlds.outcomes("threads", 2, _same_name)
    assert all("'same' is not unique: ranks 0 and 1" in outcome.message for outcome in ended)
    with pytest.raises(ValueError, match="Worker name must match"):
        rpc.init_rpc("not good", rank=0, world_size=1)
    with pytest.raises(TypeError, match="BackendType"):
        rpc.init_rpc("good", backend="native")
    with pytest.raises(TypeError, match="RpcBackendOptions"):
        rpc.init_rpc("good", rpc_backend_options=3)


def _same_name() -> None:
    rpc.init_rpc("same")


def _call_on(worker: str) -> None:
    while rpc.rpc_sync(worker, echo, (1,)):
        pass


def _end_without_shutdown() -> None:
    rank = rpc_workers.begin()
    if rank == 0:
        with pytest.raises(WorkerFailedError, match=r"'worker1' \(rank 1\) died \(its thread has ended\)"):
            _call_on("worker1")
    # The block that made it a rank ends, and nobody has called shutdown().


def test_a_thread_that_ends_without_shutdown_is_told_and_leaves_no_thread() -> None:
    worlds.run("threads", 2, _end_without_shutdown)
    deadline = time.monotonic() + 20
    while left := [each.name for each in threading.enumerate() if each.name.startswith("rpc-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
