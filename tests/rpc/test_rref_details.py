"""Test what programs written for torch.distributed.rpc rely on beyond the values that references give."""

from __future__ import annotations

import gc
import logging
import time

import pytest
import torch

import rpc_workers
import worlds
from torchestra import rpc
from torchestra.errors import RemoteError, RemoteReferenceError, RpcError, RpcTimeoutError


def take_twice(first: rpc.RRef, second: rpc.RRef) -> None:
    """References that come with a call go with it."""


def leave_nothing() -> None:
    gc.collect()
    gc.disable()
    try:
        rref = rpc.remote("worker2", torch.ones, (2,))
        rpc.rpc_sync("worker1", take_twice, (rref, rref))
        deadline = time.monotonic() + 20
        while (found := rpc.rpc_sync("worker2", rpc.debug_info))["num_forks"] != "1":
            assert time.monotonic() < deadline, found
    finally:
        gc.enable()


def test_references_in_a_call_do_not_wait_for_the_garbage_collector() -> None:
    rpc_workers.first("threads", 3, leave_nothing)


def is_confirmed(rref: rpc.RRef) -> bool:
    return rref.confirmed_by_owner()


def confirmed_in_a_call() -> None:
    rref = rpc.remote("worker2", torch.ones, (2,))
    assert rpc.rpc_sync("worker1", is_confirmed, (rref,))
    assert rpc.remote("worker1", is_confirmed, (rref,)).to_here()


def test_a_reference_of_a_third_worker_is_confirmed_when_the_function_begins(kind: str) -> None:
    rpc_workers.first(kind, 3, confirmed_in_a_call)


@rpc.functions.async_execution
def held_up() -> torch.futures.Future[None]:
    _held_up.append(torch.futures.Future())
    return _held_up[-1]


_held_up: list[torch.futures.Future[None]] = []


def let_go() -> None:
    """Let the one call end that is held up; it may come a moment later than this one."""
    deadline = time.monotonic() + worlds.WORLD_SECONDS
    while not _held_up:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    _held_up.pop().set_result(None)


def ask_for_types() -> None:
    rref = rpc.remote("worker1", torch.ones, (2,))
    assert rref._get_type() is torch.Tensor
    asked = rref._get_type(blocking=False)
    assert rref._get_type(blocking=False) is asked
    late = rpc.remote("worker1", held_up, timeout=0)
    with pytest.raises(RpcTimeoutError):
        late._get_type(timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        late.remote(timeout=0.05).numel()
    rpc.rpc_sync("worker1", let_go)
    failed = rpc.remote("worker1", fail_with_two)
    for blocking in (True, False):
        with pytest.raises(NeedsTwo):
            failed._get_type(blocking=blocking).wait()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.remote().nothing()
    module = rpc.remote("worker1", torch.nn.Sequential, (torch.nn.Identity(),))
    inner = rpc.remote("worker1", torch.nn.ModuleDict, ({"inner": torch.nn.Identity()},))
    assert module.remote().forward(torch.ones(1)).to_here() == 1
    assert inner.remote().inner(torch.ones(1)).to_here() == 1  # an attribute of the value, not of its class


def test_the_type_of_a_value_is_asked_for_once() -> None:
    rpc_workers.first("threads", 2, ask_for_types)


def time_out_in_the_making() -> None:
    rref = rpc.remote("worker1", held_up, timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        rref._get_future().wait()
    with pytest.raises(RpcTimeoutError, match="RRef creation"):
        rref.to_here()
    rpc.rpc_sync("worker1", let_go)


def test_a_value_that_was_not_made_in_time_is_told_as_that() -> None:
    rpc_workers.first("threads", 2, time_out_in_the_making)


def identities() -> None:
    own, there = rpc.RRef(1), rpc.remote("worker1", torch.ones, (2,))
    number = "GloballyUniqueId(created_on=0, local_id={})".format
    assert str(own) == f"OwnerRRef({number(0)})"
    assert str(there) == f"UserRRef(RRefId = {number(1)}, ForkId = {number(2)})"
    with pytest.raises(RuntimeError, match=r"localValue\(\) on user WorkerInfo\(id=0, name=worker0\)"):
        there.local_value()


def test_references_have_numbers() -> None:
    rpc_workers.first("threads", 2, identities)


def await_owned(number: int) -> None:
    deadline = time.monotonic() + 20
    while (found := rpc.debug_info()["num_owner_rrefs"]) != str(number):
        assert time.monotonic() < deadline, f"owns {found}, expected {number}"


def count_owned() -> None:
    own = rpc.RRef(torch.ones(1))
    assert rpc.debug_info()["num_owner_rrefs"] == "0"
    kept = rpc.remote("worker1", echo, (own,))
    kept.to_here()
    await_owned(1)
    del kept
    await_owned(0)
    assert own.local_value() == 1


def echo(value: object) -> object:
    return value


def test_a_value_counts_as_owned_while_others_refer_to_it() -> None:
    rpc_workers.first("threads", 2, count_owned)


def use_after_the_end() -> None:
    rank = rpc_workers.begin()
    rref = rpc.remote(f"worker{1 - rank}", torch.ones, (2,))
    rref.to_here()
    agent = rref._agent
    rpc.shutdown()
    with pytest.raises(RemoteReferenceError, match=r"Cannot call to_here\(\) on it after deletion"):
        rref.to_here()
    with pytest.raises(RemoteReferenceError, match="Cannot call fork an UserRRef after deletion"):
        agent.rrefs.fork(rref, 0, [])


def test_a_reference_is_of_no_use_after_the_end() -> None:
    worlds.run("threads", 2, use_after_the_end)


class NeedsTwo(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def fail_with_two() -> None:
    raise NeedsTwo(3, "a\nb")


def pass_on() -> None:
    rpc.rpc_sync("worker2", fail_with_two)


def catch(caplog: pytest.LogCaptureFixture) -> None:
    for function in (fail_with_two, pass_on):  # and through a worker between
        for kind in (NeedsTwo, RemoteError):
            with pytest.raises(kind, match="Original exception on remote side was"):
                rpc.rpc_sync("worker1", function)
    with pytest.raises(NeedsTwo) as caught:
        rpc.rpc_sync("worker1", fail_with_two)
    assert caught.value.code == 3
    assert "a\nb" in str(caught.value)


def test_an_exception_that_needs_more_than_a_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchestra.rpc"):
        rpc_workers.first("threads", 3, catch, caplog)
    assert "in fail_with_two" in caplog.text  # where it failed, it is in the log


@pytest.mark.parametrize(
    ("name", "says"), [("a*", "must match"), (" ", "must match"), ("", "non-empty"), ("a" * 128, "than 128")]
)
def test_names_that_no_worker_can_have(name: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        rpc.WorkerInfo(name, 0)


def test_without_a_worker_there_are_no_references() -> None:
    with pytest.raises(RpcError, match="Current RPC agent is not set! Did you initialize the RPC framework"):
        rpc.RRef(1)


def profile_calls() -> None:
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        assert rpc.rpc_sync("worker1", echo, (1,)) == 1
        assert rpc.rpc_async("worker1", echo, (2,)).wait() == 2
        rref = rpc.remote("worker1", echo, (3,))
        assert rref.to_here() == 3
        rref._get_future().then(lambda _: None).wait()  # its range has ended, maybe later than the value came
    names = [event.name for event in profile.function_events]
    for mode in ("sync", "async", "remote"):
        assert f"rpc_{mode}#echo(worker0 -> worker1)" in names


def test_calls_are_ranges_of_the_profiler() -> None:
    rpc_workers.first("processes", 2, profile_calls)
