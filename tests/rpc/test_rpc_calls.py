"""Calling functions on other workers."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import rpc_workers
import torchestra as dist
from torchestra import rpc
from torchestra.engine.memory.arena import Arena
from torchestra.errors import (
    DistBackendError,
    InvalidArgumentError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
)
from worlds import WORLD_SECONDS


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value


class Peculiar(Exception):
    def __init__(self, first: int, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()

    def __reduce__(self) -> str:
        raise TypeError("never")


class Unreadable:
    def __reduce__(self):
        return _refuse, ()


def _refuse() -> None:
    raise OSError("not to be read")


def own_name() -> str:
    return rpc.get_worker_info().name


def echo(value):
    return value


def bounce(depth: int) -> int:
    if depth == 0:
        return 0
    other = 1 - rpc.get_worker_info().id
    return 1 + rpc.rpc_sync(other, bounce, (depth - 1,))


def fail(error: BaseException) -> None:
    raise error


def fail_with_peculiar() -> None:
    raise Peculiar(3, "four")


def fail_unpicklable() -> None:
    raise Unpicklable


def result_that_cannot_be_read() -> Unreadable:
    return Unreadable()


def result_that_cannot_be_sent() -> threading.Lock:
    return threading.Lock()


def wait_for_event() -> bool:
    return _event.wait(WORLD_SECONDS)


def set_event() -> None:
    _event.set()


def clear_event() -> None:
    _event.clear()


_event = threading.Event()


@rpc.functions.async_execution
def add_later(to: str, first: torch.Tensor, second: int) -> torch.futures.Future:
    return rpc.rpc_async(to, torch.add, (first, 1)).then(lambda future: future.wait() + second)


@rpc.functions.async_execution
def fail_later(to: str) -> torch.futures.Future:
    return rpc.rpc_async(to, fail, (ValueError("late"),)).then(lambda future: future.wait())


@rpc.functions.async_execution
def not_a_future() -> int:
    return 3


class Later:
    @staticmethod
    @rpc.functions.async_execution
    def static(to: str, value: torch.Tensor) -> torch.futures.Future:
        return rpc.rpc_async(to, torch.add, (value, 1))

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, to: str, value: torch.Tensor) -> torch.futures.Future:
        return rpc.rpc_async(to, torch.add, (value, 2))

    @rpc.functions.async_execution
    def bound(self, to: str, value: torch.Tensor) -> torch.futures.Future:
        return rpc.rpc_async(to, torch.add, (value, 3))


def call_in_every_way() -> None:
    x = torch.arange(3.0)
    info = rpc.get_worker_info("worker1")
    assert (info.name, info.id) == ("worker1", 1)
    for to in ("worker1", 1, info):
        assert rpc.rpc_sync(to, own_name) == "worker1"
        assert rpc.rpc_async(to, own_name).wait() == "worker1"
        assert rpc.remote(to, own_name).to_here() == "worker1"
    assert rpc.rpc_sync("worker0", own_name) == "worker0"
    assert rpc.rpc_sync("worker1", torch.add, args=(x,), kwargs={"other": 2}).tolist() == [2, 3, 4]
    assert rpc.rpc_sync("worker1", torch.Tensor.mul, args=(x, 2)).tolist() == [0, 2, 4]
    assert rpc.rpc_sync("worker1", Counter(3).add, args=(4,)) == 7
    layer = torch.nn.Linear(3, 2)
    torch.testing.assert_close(rpc.rpc_sync("worker1", layer, args=(x,)), layer(x).detach(), rtol=0, atol=0)
    assert isinstance(rpc.rpc_async("worker1", own_name), torch.futures.Future)


def test_every_way_to_call(kind: str) -> None:
    rpc_workers.first(kind, 2, call_in_every_way)


def call_wrongly() -> None:
    with pytest.raises(RpcError, match=r"could not find destination worker 'nobody'.*'worker1' \(rank 1\)"):
        rpc.rpc_sync("nobody", own_name)
    with pytest.raises(RpcError, match="could not find destination worker 7"):
        rpc.rpc_async(7, own_name)
    with pytest.raises(ValueError, match="name, rank or WorkerInfo"):
        rpc.rpc_async(1.5, own_name)
    with pytest.raises(TypeError, match="function should be callable"):
        rpc.rpc_sync("worker1", 3)
    with pytest.raises(RuntimeError, match="RPC is already initialized"):
        rpc.init_rpc("worker0")
    with pytest.raises(InvalidArgumentError, match="timeout must not be negative"):
        rpc.rpc_sync("worker1", own_name, timeout=-3)
    with pytest.raises(AttributeError, match=r"local object.*on worker 'worker1'.*sent by name"):
        rpc.rpc_sync("worker1", lambda: 3)
    with pytest.raises(TypeError, match="CPU tensors"):
        rpc.rpc_sync("worker1", echo, (torch.nn.Parameter,), {"value": _OnAnotherDevice()})
    assert rpc.rpc_sync("worker1", own_name) == "worker1"


class _OnAnotherDevice:
    def __reduce__(self):
        raise TypeError("only CPU tensors can be sent")


def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    rpc_workers.first("threads", 2, call_wrongly)


def test_without_init_rpc_every_call_says_so() -> None:
    for call in (lambda: rpc.rpc_sync("x", own_name), rpc.get_worker_info, rpc.shutdown, lambda: rpc.RRef(1)):
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            call()


def test_devices_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"device_maps\['worker1'\] names device 0"):
        rpc.RpcBackendOptions(device_maps={"worker1": {0: 1}})
    with pytest.raises(InvalidArgumentError, match="devices names device 'cuda:0'"):
        rpc.TensorPipeRpcBackendOptions(devices=["cuda:0"])
    assert rpc.RpcBackendOptions(devices=["cpu"]).rpc_timeout == rpc.DEFAULT_RPC_TIMEOUT_SEC


def call_what_fails() -> None:
    with pytest.raises(ValueError, match="a certain text") as caught:
        rpc.rpc_sync("worker1", fail, (ValueError("a certain text"),))
    assert "worker 'worker1' (rank 1)" in str(caught.value)
    assert "in fail" in str(caught.value)  # the remote traceback
    with pytest.raises(Peculiar, match="3 and four") as peculiar:
        rpc.rpc_async("worker1", fail_with_peculiar).wait()
    assert peculiar.value.first == 3
    with pytest.raises(KeyError):
        rpc.rpc_sync("worker0", fail, (KeyError("own"),))
    with pytest.raises(Unpicklable, match="with a lock"):
        rpc.rpc_sync("worker1", fail_unpicklable)
    with pytest.raises(RemoteError, match="SystemExit"):
        rpc.rpc_sync("worker1", fail, (SystemExit(3),))
    with pytest.raises(RpcError, match=r"a call from worker 'worker0' cannot be unpickled.*not to be read"):
        rpc.rpc_sync("worker1", echo, (Unreadable(),))
    with pytest.raises(RpcError, match=r"result of result_that_cannot_be_read.*cannot be unpickled"):
        rpc.rpc_sync("worker1", result_that_cannot_be_read)
    with pytest.raises(TypeError, match="cannot pickle"):
        rpc.rpc_sync("worker1", result_that_cannot_be_sent)
    assert rpc.rpc_sync("worker1", own_name) == "worker1"


def test_what_fails_there_is_raised_here_as_what_it_is(kind: str) -> None:
    rpc_workers.first(kind, 2, call_what_fails)


def forget_a_name(rank: int) -> None:
    if rank == 1:
        del globals()["echo"]
    rpc.rpc_sync(1 - rank, own_name)
    dist.barrier()
    if rank == 0:
        with pytest.raises(AttributeError, match="must be importable, by the same name"):
            rpc.rpc_sync("worker1", echo, (1,))


def name_calls_without_room(rank: int) -> None:
    large = torch.zeros(1 << 20)
    if rank == 0:
        with mock.patch.object(Arena, "reserve_heap", side_effect=DistBackendError("no bytes are left")):
            for call in (rpc.rpc_async, rpc.remote):
                with pytest.raises(DistBackendError, match=r"left \(in a call of echo on worker 'worker1'\)"):
                    call("worker1", echo, (large,))
        assert torch.equal(rpc.rpc_sync("worker1", echo, (large,)), large)


def test_a_call_whose_tensors_find_no_memory_is_named() -> None:
    rpc_workers.run("threads", 2, name_calls_without_room)


def test_a_name_that_does_not_exist_there_is_told() -> None:
    rpc_workers.run("processes", 2, forget_a_name, fresh=True)


def call_each_other(rank: int) -> None:
    assert bounce(60) == 60
    futures = [rpc.rpc_async(1 - rank, bounce, (4,)) for _ in range(20)]
    assert torch.futures.wait_all(futures) == [4] * 20


def test_nested_and_mutual_calls(kind: str) -> None:
    rpc_workers.run(kind, 2, call_each_other)


def many_in_flight() -> None:
    blocked = rpc.rpc_async("worker1", wait_for_event)
    futures = [rpc.rpc_async("worker1", torch.add, (torch.tensor(number), 1)) for number in range(10_000)]
    assert [int(future.wait()) for future in futures] == list(range(1, 10_001))
    assert not blocked.done()
    rpc.rpc_sync("worker1", set_event)
    assert blocked.wait() is True


def test_ten_thousand_calls_in_flight_also_beside_one_that_blocks(kind: str) -> None:
    _event.clear()
    rpc_workers.first(kind, 2, many_in_flight)


def call_from_many_threads(rank: int) -> None:
    found: dict[int, list[int]] = {}

    def calls(number: int) -> None:
        found[number] = [rpc.rpc_sync(1 - rank, echo, (number * 1000 + each,)) for each in range(50)]

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number * 1000 + each for each in range(50)] for number in range(8)}


def test_calls_from_many_threads(kind: str) -> None:
    rpc_workers.run(kind, 2, call_from_many_threads)


def call_async() -> None:
    x = torch.ones(2)
    assert rpc.rpc_sync("worker1", add_later, ("worker2", x, 5)).tolist() == [7, 7]
    assert rpc.remote("worker1", add_later, ("worker0", x, 5)).to_here().tolist() == [7, 7]
    assert rpc.rpc_sync("worker1", Later.static, ("worker2", x)).tolist() == [2, 2]
    assert rpc.rpc_sync("worker1", Later.of_class, ("worker2", x)).tolist() == [3, 3]
    assert rpc.rpc_sync("worker1", Later().bound, ("worker2", x)).tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="late"):  # as which torch's futures raise what callbacks raise
        rpc.rpc_sync("worker1", fail_later, ("worker2",))
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("worker1", not_a_future)
    later = rpc.remote("worker1", Later)
    assert later.rpc_sync().bound("worker2", x).tolist() == [4, 4]
    assert later.rpc_async().static("worker2", x).wait().tolist() == [2, 2]
    assert later.remote().of_class("worker2", x).to_here().tolist() == [3, 3]


def test_async_execution(kind: str) -> None:
    rpc_workers.first(kind, 3, call_async)


class Held:
    """What a frame knows."""

    def fail(self) -> None:
        fail(ValueError("late"))


def call_that_fails(begin: Callable[[], object]) -> weakref.ref[Held]:
    held = Held()
    with pytest.raises(ValueError, match="late"):
        begin()
    return weakref.ref(held)


def fail_and_look() -> None:
    rref = rpc.remote("worker1", Held)
    calls: list[Callable[[], object]] = [
        lambda: rpc.rpc_sync("worker1", fail, (ValueError("late"),)),
        lambda: rpc.remote("worker1", fail, (ValueError("late"),)).to_here(),
        lambda: rref.rpc_sync().fail(),
    ]
    left = [call_that_fails(call) for call in calls]
    deadline = time.monotonic() + WORLD_SECONDS
    while kept := still_kept(left):  # by a thread of the pool, on its way out of what it did with an answer
        assert time.monotonic() < deadline, kept
        time.sleep(0.01)


def still_kept(refs: list[weakref.ref[Held]]) -> list[weakref.ref[Held]]:
    gc.collect()
    return [ref for ref in refs if ref() is not None]


def test_the_error_of_a_call_does_not_keep_the_callers_frames(kind: str) -> None:
    rpc_workers.first(kind, 2, fail_and_look)


def call_too_long() -> None:
    rpc.rpc_sync("worker1", clear_event)
    assert rpc.get_rpc_timeout() == rpc.DEFAULT_RPC_TIMEOUT_SEC
    with pytest.raises(
        RpcTimeoutError, match=r"RPC ran for more than set timeout \(0\.2 s\).*wait_for_event"
    ):
        rpc.rpc_sync("worker1", wait_for_event, timeout=0.2)
    rpc.set_rpc_timeout(0.2)
    assert rpc.get_rpc_timeout() == 0.2
    with pytest.raises(TimeoutError, match="'worker1'"):
        rpc.rpc_async("worker1", wait_for_event).wait()
    with pytest.raises(RpcTimeoutError):
        rpc.remote("worker1", wait_for_event, timeout=0).to_here()
    assert not (endless := rpc.rpc_async("worker1", wait_for_event, timeout=0)).done()
    rpc.set_rpc_timeout(0)
    rpc.rpc_sync("worker1", set_event)
    assert endless.wait() is True
    assert rpc.rpc_sync("worker1", own_name) == "worker1"


def test_time_outs() -> None:
    rpc_workers.first("processes", 2, call_too_long)


def more_threads_than_the_limit() -> None:
    rpc.rpc_sync("worker1", clear_event)
    blocked = [rpc.rpc_async("worker1", wait_for_event) for _ in range(8)]
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", own_name, timeout=0.5)
    assert int(rpc.rpc_sync("worker0", thread_count)) < 8
    rpc.rpc_sync("worker0", set_event)
    assert all(torch.futures.wait_all(blocked))


def thread_count() -> str:
    return rpc.debug_info()["agent.num_threads"]


def test_at_the_limit_of_threads_calls_wait_and_answers_are_still_read() -> None:
    rpc_workers.first("threads", 2, more_threads_than_the_limit, max_worker_threads=5)


def call_oneself() -> None:
    x = torch.ones(3)
    assert rpc.rpc_sync("worker0", echo, (x,)).data_ptr() != x.data_ptr()
    assert rpc.rpc_sync("worker0", call_own_again, (5,)) == 5
    assert rpc.remote("worker0", torch.add, (x, 1)).to_here().tolist() == [2, 2, 2]


def call_own_again(depth: int) -> int:
    return depth and 1 + rpc.rpc_sync("worker0", call_own_again, (depth - 1,))


def test_a_world_of_one_and_calls_to_oneself(kind: str) -> None:
    rpc_workers.first(kind, 1, call_oneself)
    rpc_workers.first(kind, 2, call_oneself)


def wait_in_a_callback() -> None:
    def again(done: torch.futures.Future) -> int:
        # Neither this nor the caller waits for a call, but for futures of futures: nobody receives meanwhile.
        return rpc.rpc_async("worker1", add_one, (done.value(),)).then(lambda more: more.value() + 1).wait()

    assert rpc.rpc_async("worker1", add_one, (1,)).then(again).wait() == 4
    nested = rpc.rpc_async("worker1", add_one, (1,)).then(
        lambda done: rpc.rpc_async("worker1", add_one, (done.value(),)).then(again).wait()
    )
    assert nested.wait() == 5


def add_one(value: int) -> int:
    return value + 1


def test_callbacks_may_wait_for_calls(kind: str) -> None:
    rpc_workers.first(kind, 2, wait_in_a_callback)


CALLS_AT_ONCE = 6
_all_are_in = threading.Barrier(CALLS_AT_ONCE)


def named_when_all_are_in() -> str:
    """Return the name of the worker that this runs on. Every call needs a thread of its own."""
    _all_are_in.wait(60)
    return own_name()


def call_together(to: str) -> list[str]:
    calls = [rpc.rpc_async(to, named_when_all_are_in) for _ in range(CALLS_AT_ONCE)]
    return [call.wait() for call in calls]


def wait_outside() -> None:
    call = rpc.rpc_async("worker1", call_together, ("worker0",))
    # As on a thread of torch.jit.fork, which knows of no rank.
    names = contextvars.Context().run(call.wait)
    assert names == ["worker0"] * CALLS_AT_ONCE


def test_functions_know_their_worker_whichever_thread_receives_the_call() -> None:
    rpc_workers.first("threads", 2, wait_outside)
