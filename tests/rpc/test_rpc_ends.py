"""Workers that shut down, and workers that die."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

import rpc_workers
import torchestra as dist
import worlds
from torchestra import rpc
from torchestra.engine import layout as at
from torchestra.errors import RpcError, RpcTimeoutError, WorkerFailedError
from torchestra.rpc import rref_context, starting
from torchestra.rpc.agent import Agent
from torchestra.rpc.current import current_agent
from torchestra.rpc.rref_context import RRefContext
from torchestra.store import HashStore, PrefixStore


def sleep_long() -> None:
    time.sleep(60)


def echo(value):
    return value


def make() -> torch.Tensor:
    return torch.ones(2)


def begin_on(transport: str, **options: object) -> int:
    """On a process rank: become a worker, which all others reach by this transport."""
    rank = dist.get_rank()
    if transport == "wire":
        os.environ["TORCHESTRA_HOST_ID"] = f"host{rank}"
        options["secret"] = rpc_workers.SECRET
    return rpc_workers.begin(rank, **options)


def live_on(transport: str) -> tuple[float, str]:
    rank = begin_on(transport)
    if rank == 2:
        worlds.leave_note("ready")
        time.sleep(60)
    worlds.await_note("ready")
    rref = rpc.remote("worker2", make)
    assert rref.to_here().tolist() == [1, 1]
    futures = [rpc.rpc_async("worker2", sleep_long) for _ in range(5)]
    futures += [rpc.rpc_async("worker2", echo, (torch.ones(1 << 18),)) for _ in range(20)]
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


@pytest.mark.parametrize("transport", ["arena", "wire"])
def test_a_worker_that_is_killed_is_named_and_the_others_go_on(transport: str) -> None:
    with worlds.processes(3, live_on, transport) as world:
        for rank in (0, 1):
            world.await_file(f"calls-{rank}")
        world.signal(2, signal.SIGKILL)
        ended = [world.wait(rank) for rank in (0, 1)]
    for outcome in ended:
        _, message = outcome.result()
        # How it died is known as long as nobody has reaped it.
        known = (
            r"killed by SIGKILL|process \d+ is gone" if transport == "arena" else "its connection has ended"
        )
        assert re.search(rf"died \(({known})\)", message), message
        assert "'worker2' (rank 2)" in message


def interrupted(transport: str) -> int:
    rank = begin_on(transport, rpc_timeout=worlds.WORLD_SECONDS)
    large = torch.arange(1 << 24, dtype=torch.int32)
    count = 0
    if rank == 0:
        seen: list[int] = []  # Python drops what is raised while it runs a finalizer

        def interrupt(number: int, frame: FrameType | None) -> None:
            seen.append(number)
            signal.default_int_handler(number, frame)

        signal.signal(signal.SIGINT, interrupt)
        try:
            worlds.leave_note("calling")
            while not seen:
                rpc.rpc_sync("worker1", echo, (large,))
                count += 1
        except KeyboardInterrupt:
            pass
        for _ in range(3):
            assert torch.equal(rpc.rpc_sync("worker1", echo, (large,)), large)
    rpc.shutdown()
    return count


@pytest.mark.parametrize("transport", ["arena", "wire"])
def test_ctrl_c_while_a_large_message_moves_leaves_the_workers_usable(transport: str) -> None:
    with worlds.processes(2, interrupted, transport) as world:
        world.await_file("calling")
        world.signal(0, signal.SIGINT)
        for ended in world.finish():
            ended.result()


def fork_in_between(transport: str) -> None:
    rank = begin_on(transport)
    for _ in range(3):
        rpc.rpc_sync(1 - rank, echo, (torch.ones(100_000),))
        with current_agent().pool._lock:  # as one of its threads may have it just then
            child = os.fork()
            if child == 0:
                try:
                    rpc.rpc_sync(1 - rank, echo, (1,))
                except RpcError as error:
                    current_agent().close()
                    os._exit("which was forked from this rank" not in str(error))
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    rpc.shutdown()


@pytest.mark.parametrize("transport", ["arena", "wire"])
def test_a_forked_child_is_refused_and_disturbs_nobody(transport: str) -> None:
    worlds.run("processes", 2, fork_in_between, transport)


def miss_a_silent_one() -> str:
    rank = begin_on("wire", heartbeat_timeout=2.0)
    worlds.leave_note(f"ready-{rank}")
    if rank == 1:
        time.sleep(60)
    worlds.await_note("stopped")
    with pytest.raises(WorkerFailedError, match=r"'worker1' \(rank 1\) died or is cut off") as caught:
        rpc.rpc_sync("worker1", echo, (1,))
    rpc.shutdown(graceful=False)
    return str(caught.value)


def test_a_worker_on_another_host_that_falls_silent_is_given_up() -> None:
    with worlds.processes(2, miss_a_silent_one) as world:
        for rank in range(2):  # or the other would still be about to meet this one
            world.await_file(f"ready-{rank}")
        world.signal(1, signal.SIGSTOP)
        with open(world.path("stopped"), "w"):
            pass
        assert re.search(r"nothing has been heard of it for \d+\.\d", world.wait(0).result())


def shut_down_without_one() -> str:
    rank = rpc_workers.begin()
    worlds.leave_note(f"ready-{rank}")
    if rank == 1:
        time.sleep(60)
    with pytest.raises(WorkerFailedError, match=r"'worker1' \(rank 1\) died") as caught:
        rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.get_worker_info()
    return str(caught.value)


def test_a_graceful_shutdown_with_a_dead_worker_is_an_error() -> None:
    with worlds.processes(2, shut_down_without_one) as world:
        for rank in range(2):  # or the other would still be about to meet this one
            world.await_file(f"ready-{rank}")
        world.signal(1, signal.SIGKILL)
        world.wait(0).result()


def block_for_another() -> None:
    worlds.leave_note("blocked")
    _passed.wait(worlds.WORLD_SECONDS)


def call_one_that_blocks() -> None:
    try:
        rpc.rpc_sync("worker0", block_for_another)
    except WorkerFailedError as error:
        worlds.leave_note("told", error.worker)
        raise


def end_because_of_another(transport: str) -> None:
    rank = begin_on(transport)
    worlds.leave_note(f"ready-{rank}")
    if rank == 2:
        time.sleep(60)
    if rank == 1:
        with pytest.raises(WorkerFailedError, match=r"'worker2' \(rank 2\) died"):
            rpc.shutdown()
        worlds.await_note("told")
        return
    while not current_agent().termination:  # worker 1 waits for all to shut down with it
        time.sleep(0.002)
    with pytest.raises(WorkerFailedError):
        rpc.rpc_sync("worker1", call_one_that_blocks)
    _passed.set()
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("transport", ["arena", "wire"])
def test_calls_of_a_worker_that_ends_because_another_died_fail_by_that_name(transport: str) -> None:
    """Whoever has called the function that waits for such a call is told who died, and no other error."""
    with worlds.processes(3, end_because_of_another, transport) as world:
        for name in ("ready-0", "ready-1", "ready-2", "blocked"):
            world.await_file(name)
        world.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            world.wait(rank).result()
        assert world.await_file("told") == "worker2"


_passed = threading.Event()


@pytest.mark.parametrize("hosts", [["", ""], ["here", "there"]], ids=["arena", "wire"])
def test_a_shutdown_that_nobody_joins_times_out(hosts: list[str]) -> None:
    _passed.clear()
    worlds.run("threads", 2, _time_out_alone, hosts=hosts)


def _time_out_alone() -> None:
    rank = rpc_workers.begin(secret=rpc_workers.SECRET)
    worlds.store_barrier()
    if rank == 0:
        with pytest.raises(RpcTimeoutError, match="'worker1' had not called shutdown"):
            rpc.shutdown(timeout=0.3)
        _passed.set()
    else:
        assert _passed.wait(worlds.WORLD_SECONDS)
        with pytest.raises(WorkerFailedError, match="has shut down"):
            rpc.rpc_sync("worker0", echo, (1,))
        rpc.shutdown(graceful=False)


def call_back(depth: int) -> None:
    if depth:
        rpc.rpc_async((rpc.get_worker_info().id + 1) % 3, call_back, (depth - 1,))
    else:
        _calls.append(depth)


_calls: list[int] = []


@pytest.mark.parametrize("kind", ["threads", "hosts"])
def test_a_graceful_shutdown_waits_for_calls_that_calls_make(kind: str) -> None:
    _calls.clear()
    rpc_workers.run(kind, 3, _start_calls)
    assert len(_calls) == 30


def _start_calls(rank: int) -> None:
    for _ in range(10):
        rpc.rpc_async((rank + 1) % 3, call_back, (12,))


def _begin_again(transport: str) -> None:
    for _ in range(3):
        rank = begin_on(transport) if dist.get_backend() == "native" else rpc_workers.begin()
        assert rpc.rpc_sync(1 - rank, echo, (rank,)) == rank
        rpc.shutdown()


@pytest.mark.parametrize(
    ("kind", "transport"), [("threads", "arena"), ("processes", "arena"), ("processes", "wire")]
)
def test_rpc_can_begin_again_and_leaves_nothing(kind: str, transport: str) -> None:
    before = set(threading.enumerate())
    worlds.run(kind, 2, _begin_again_and_look if kind == "processes" else _begin_again, transport)
    deadline = time.monotonic() + 10
    while left := rpc_workers.threads_since(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _left_of_rpc() -> list[Any]:
    """Return what there is of RPC in this process: its threads, and the memory of its arenas."""
    gc.collect()
    threads: list[Any] = rpc_workers.threads_since(())
    return threads + [each for each in (*worlds.mappings(), *worlds.descriptors()) if "rpc of" in each]


def _await_nothing_left() -> None:
    deadline = time.monotonic() + 30
    while left := _left_of_rpc():  # by a thread of the worker that shutdown() found at work
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _begin_again_and_look(transport: str) -> None:
    _begin_again(transport)  # what is made once and kept has been made
    _await_nothing_left()
    before = len(worlds.mappings()), worlds.descriptors(), threading.active_count()
    _begin_again(transport)
    _await_nothing_left()
    assert len(worlds.mappings()) <= before[0]
    deadline = time.monotonic() + 30  # a FileStore's descriptors are closed by threads that take 10 ms
    while worlds.descriptors() - before[1] or threading.active_count() > before[2]:
        assert time.monotonic() < deadline, (worlds.descriptors() - before[1], threading.enumerate())
        time.sleep(0.01)


def requests_per_worker(size: int) -> float:
    """Return how many requests it takes a worker to learn the names of all."""
    store, requests = HashStore(), Counter()
    asking = threading.Lock()

    def counted(name: str, ask: Any) -> Any:
        def asked(*arguments: Any) -> Any:
            with asking:
                requests[name] += 1
            return ask(*arguments)

        return asked

    for name in ("set", "get", "wait", "await_values", "multi_get"):
        setattr(store, name, counted(name, getattr(store, name)))
    names: dict[int, list[str]] = {}

    def meet(rank: int) -> None:
        names[rank] = starting._meet(
            PrefixStore("rpc", store), f"worker{rank}", rank, size, worlds.WORLD_SECONDS
        )

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == {rank: [f"worker{peer}" for peer in range(size)] for rank in range(size)}
    return sum(requests.values()) / size


def test_to_learn_all_names_takes_no_more_requests_where_there_are_more_workers() -> None:
    assert requests_per_worker(16) <= requests_per_worker(4)


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_that_do_not_come_are_named(rank: int) -> None:
    store = PrefixStore("rpc", HashStore())
    with pytest.raises(
        dist.StoreTimeoutError, match=f"ranks {1 - rank}, 2 of 3 did not come to .* rank {rank}"
    ):
        starting._meet(store, f"worker{rank}", rank, 3, 0.05)


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
    worlds.store_barrier()
    if rank == 0:
        # Worker 1 may have noticed itself, and left, before worker 0 looks.
        how = r"died \(its thread has ended\)|has shut down"
        with pytest.raises(WorkerFailedError, match=rf"'worker1' \(rank 1\) ({how})"):
            _call_on("worker1")
    # The block that made it a rank ends, and nobody has called shutdown().


def test_a_thread_that_ends_without_shutdown_is_told_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    worlds.run("threads", 2, _end_without_shutdown)
    deadline = time.monotonic() + 20
    while left := rpc_workers.threads_since(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def use_here(rref: rpc.RRef) -> int:
    return rref.local_value()


def hold_acceptance_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have worker 1 accept a reference only once it has seen, in its shutdown, that it is not done."""
    about_to, seen = threading.Event(), threading.Event()
    tell, is_quiet = RRefContext._tell, Agent.is_quiet.fget
    assert is_quiet is not None

    def look(agent: Agent) -> bool:
        found: bool = is_quiet(agent)
        if agent.number == 1 and about_to.is_set() and not found:
            seen.set()
        return found

    def tell_late(self: RRefContext, rank: int, function: Any, *args: Any) -> Any:
        if function is rref_context._accept:
            about_to.set()
            while not (seen.wait(0.01) or self._agent.closed):
                pass
        return tell(self, rank, function, *args)

    monkeypatch.setattr(Agent, "is_quiet", property(look))
    monkeypatch.setattr(RRefContext, "_tell", tell_late)


def pass_back() -> None:
    rref = rpc.remote("worker1", echo, (7,))
    assert rpc.rpc_sync("worker1", use_here, (rref,)) == 7


def test_shutdown_waits_for_what_a_worker_is_about_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_acceptance_up(monkeypatch)
    rpc_workers.first("threads", 2, pass_back)


def wait_until_passed() -> bool:
    return _passed.wait(60)


def time_out_though_yielding_takes_long() -> None:
    current_agent().router.context.store_word(at.YIELDS, 1 << 40)
    _passed.clear()
    try:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", wait_until_passed, timeout=0.3)
    finally:
        _passed.set()


def test_a_call_times_out_though_each_yield_may_take_long() -> None:
    rpc_workers.first("threads", 2, time_out_though_yielding_takes_long)
