"""RRefs: what they refer to, who knows of them, and when they end."""

from __future__ import annotations

import gc
import pickle
import threading
import time

import pytest
import torch

import rpc_workers
from torchestra import rpc
from torchestra.errors import RemoteReferenceError, RpcTimeoutError
from torchestra.rpc.current import current_agent


class Box:
    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value

    def put(self, value: int) -> None:
        self.value = value

    def other(self, rref: rpc.RRef) -> int:
        return rref.to_here().get() + self.value

    def fail(self) -> None:
        raise ValueError("in the box")


def counts() -> dict[str, int]:
    found = current_agent().rrefs.counts()
    return {name: found[name] for name in NOTHING}


NOTHING = {"num_values": 0, "num_owner_rrefs": 0, "num_forks": 0, "num_users": 0, "num_kept": 0}


def await_counts(worker: int, expected: dict[str, int]) -> None:
    """Wait until a worker's counts are these: dropped references are told of when they are dropped."""
    deadline = time.monotonic() + 20
    while (found := rpc.rpc_sync(worker, counts)) != expected:
        assert time.monotonic() < deadline, f"worker {worker} has {found}, expected {expected}"


def use_in_every_way() -> None:
    own = rpc.RRef(Box(3))
    assert own.is_owner()
    assert own.confirmed_by_owner()
    assert own.owner() == rpc.get_worker_info()
    assert own.local_value() is own.to_here()
    assert own.rpc_sync().get() == 3
    there = rpc.remote("worker1", Box, (4,))
    assert not there.is_owner()
    assert there.owner_name() == "worker1"
    assert there.owner().id == 1
    assert there.to_here().value == 4
    there._get_future().wait()  # that it is confirmed may be heard after the value
    assert there.confirmed_by_owner()
    there.rpc_sync().put(5)
    assert there.rpc_async().get().wait() == 5
    assert there.remote().get().to_here() == 5
    assert there.rpc_sync().other(own) == 8
    with pytest.raises(RemoteReferenceError, match=r"Cannot call localValue\(\) on a non-local reference"):
        there.local_value()
    with pytest.raises(ValueError, match="in the box"):
        there.rpc_sync().fail()
    with pytest.raises(AttributeError, match="nothing"):
        there.rpc_sync().nothing()
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(there)
    assert "worker1" in repr(there)


def test_every_way_to_use_one(kind: str) -> None:
    rpc_workers.first(kind, 2, use_in_every_way)


def take(rref: rpc.RRef) -> int:
    return rref.to_here().get()


def take_list(rrefs: list[rpc.RRef]) -> list[int]:
    return [rref.to_here().get() for rref in rrefs]


def give_new(value: int) -> rpc.RRef:
    return rpc.RRef(Box(value))


def give_back(rref: rpc.RRef) -> rpc.RRef:
    return rref


def owned_here(rref: rpc.RRef) -> bool:
    return rref.is_owner() and rref.local_value() is not None


def pass_on(rref: rpc.RRef, to: str) -> rpc.RRef:
    return rpc.rpc_sync(to, give_back, (rref,))


def ask_through(rref: rpc.RRef, to: str) -> int:
    return rpc.rpc_sync(to, take, (rref,))


_held: list[rpc.RRef] = []


def hold(rref: rpc.RRef) -> None:
    _held.append(rref)


def let_go() -> None:
    _held.clear()


def pass_around(rank: int) -> None:
    box = rpc.remote("worker1", Box, (rank,))
    own = rpc.RRef(Box(10 + rank))
    assert rpc.rpc_sync("worker2", take, (box,)) == rank
    assert rpc.rpc_sync("worker1", take, (box,)) == rank
    assert rpc.rpc_sync("worker1", owned_here, (box,))
    assert rpc.rpc_sync("worker2", take_list, ([box, own, box],)) == [rank, 10 + rank, rank]
    assert rpc.rpc_sync("worker0", give_new, (7,)).rpc_sync().get() == 7
    assert rpc.rpc_sync("worker2", give_back, (box,)).to_here().get() == rank
    returned = rpc.rpc_sync("worker2", pass_on, (own, "worker1"))
    assert returned.is_owner()
    assert returned.local_value() is own.local_value()
    for _ in range(20):
        assert rpc.rpc_sync("worker2", ask_through, (box, "worker0")) == rank
    nested = rpc.remote("worker2", give_back, (box,)).to_here()
    assert nested.to_here().get() == rank
    del box, own, returned, nested


def test_they_can_be_passed_anywhere_and_leave_nothing(kind: str) -> None:
    """The shutdown warns of counts that are not zero, and a warning is an error."""
    rpc_workers.run(kind, 3, pass_around)


def live_and_die() -> None:
    rref = rpc.remote("worker1", Box, (1,))
    assert rref.to_here().get() == 1
    one = {**NOTHING, "num_values": 1, "num_owner_rrefs": 1}
    assert rpc.rpc_sync("worker1", counts) == {**one, "num_forks": 1}
    rpc.rpc_sync("worker2", hold, (rref,))
    await_counts(1, {**one, "num_forks": 2})
    await_counts(0, {**NOTHING, "num_users": 1})
    del rref
    gc.collect()
    await_counts(1, {**one, "num_forks": 1})
    assert rpc.rpc_sync("worker2", held_value) == 1
    rpc.rpc_sync("worker2", let_go)
    await_counts(1, NOTHING)
    await_counts(0, NOTHING)
    await_counts(2, NOTHING)
    for _ in range(50):
        rpc.remote("worker1", Box, (1,))  # dropped at once, before it is confirmed
    await_counts(1, NOTHING)
    await_counts(0, NOTHING)


def held_value() -> int:
    return _held[0].to_here().get()


def test_a_value_lives_as_long_as_a_reference_and_no_longer() -> None:
    rpc_workers.first("processes", 3, live_and_die)


def fail_to_create() -> None:
    raise KeyError("no value")


_lock = threading.Event()


def close_gate() -> None:
    _lock.clear()


def open_gate() -> None:
    _lock.set()


def pass_gate() -> None:
    assert _lock.wait(60)


def use_what_has_no_value() -> None:
    rref = rpc.remote("worker1", fail_to_create)
    for _ in range(2):
        with pytest.raises(KeyError, match="no value"):
            rref.to_here()
    with pytest.raises(KeyError):
        rref.rpc_sync().get()
    own = rpc.remote("worker0", fail_to_create)
    with pytest.raises(KeyError):
        own.to_here()
    for worker in ("worker0", "worker1"):
        rpc.rpc_sync(worker, close_gate)
        late = rpc.remote(worker, pass_gate)
        with pytest.raises(RpcTimeoutError, match="to_here"):
            late.to_here(timeout=0.05)
        rpc.rpc_sync(worker, open_gate)
        assert late.to_here() is None


def test_errors_and_time_outs_reach_whoever_wants_the_value(kind: str) -> None:
    rpc_workers.first(kind, 2, use_what_has_no_value)


def refuse_to_send() -> None:
    rref = rpc.remote("worker1", Box, (1,))
    with pytest.raises(AttributeError):
        rpc.rpc_sync("worker1", take_list, ([rref, lambda: 3],))
    assert rref.to_here().get() == 1
    del rref
    await_counts(1, NOTHING)
    await_counts(0, NOTHING)


def test_a_reference_in_a_message_that_is_not_sent_is_not_lost() -> None:
    rpc_workers.first("threads", 2, refuse_to_send)


def keep_at_shutdown(rank: int) -> None:
    global _kept
    rpc.leaks.ignored = False
    _kept = rpc.remote(1 - rank, torch.ones, (2,))
    _kept.to_here()
    try:
        with pytest.raises(RemoteReferenceError, match=r"Leaking RRefs.*1 references"):
            rpc.shutdown()
    finally:
        rpc.leaks.ignored = True
    rpc_workers.begin(rank, init_method=None, **_second_store())
    with pytest.raises(RuntimeError):
        _kept.to_here()


def _second_store():
    import os

    from torchestra.store import FileStore

    return {"store": FileStore(os.path.join(os.environ["WORLD_DIRECTORY"], "second"), 2)}


def test_a_leak_is_told_if_wanted_and_rpc_can_begin_again() -> None:
    rpc_workers.run("processes", 2, keep_at_shutdown)


def die_at_any_moment() -> None:
    agent = current_agent()
    rref = rpc.remote("worker1", Box, (1,))
    rref.to_here()
    here, calls = threading.get_ident(), []
    call = agent.call

    def watched_call(*args, **kwargs):
        calls.append(threading.get_ident())
        return call(*args, **kwargs)

    agent.call = watched_call
    with agent.pool._lock:  # as if the garbage collector ran while a thread of the pool is added
        del rref
        assert here not in calls
    await_counts(1, NOTHING)


def test_a_reference_that_dies_sends_nothing_from_where_it_dies() -> None:
    """The thread may hold any lock, and others may need that to receive what the send waits for."""
    rpc_workers.first("threads", 2, die_at_any_moment)
