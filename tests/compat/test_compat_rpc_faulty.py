"""Workers that lose and delay messages, by torch's names for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import torchestra.compat as dist
from torchestra.compat import rpc
from torchestra.compat.rpc import _testing, backend_registry
from torchestra.compat.testing import (
    wait_until_owners_and_forks_on_rank,
    wait_until_pending_futures_and_users_flushed,
    worker_name,
)
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.rpc import current
from torchestra.rpc.faulty import MESSAGES, FaultyAgent
from torchestra.testing import spawn_threads_and_init_comms

REFERENCES = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "CLEANUP_AUTOGRAD_CONTEXT_REQ"]


def options(fail: Sequence[str] = (), delay: Mapping[str, float] | None = None) -> Any:
    return backend_registry.construct_rpc_backend_options(
        backend_registry.BackendType["FAULTY_TENSORPIPE"],
        init_method="env://",
        num_worker_threads=4,
        messages_to_fail=fail,
        messages_to_delay=delay or {},
        num_fail_sends=3,
    )


def as_workers(fn: Any, size: int, given: Any) -> None:
    @spawn_threads_and_init_comms(world_size=size)
    def on_each() -> None:
        here = current_thread_rank()
        assert here is not None
        chosen = given()
        chosen.store = dist.PrefixStore("faulty-rpc", dist.distributed_c10d._get_default_store())
        rpc.init_rpc(worker_name(here.rank), None, here.rank, size, chosen)
        assert isinstance(current.current_agent(), FaultyAgent)
        fn(here.rank)
        dist.barrier()
        rpc.shutdown()

    on_each()


def twice(value: Any) -> Any:
    return value + value


def through(rref: Any, value: Any) -> Any:
    return rref.to_here() + value


def test_what_a_worker_is_told_to_lose() -> None:
    made = options(REFERENCES, {"PYTHON_CALL": 1.5})
    assert isinstance(made, _testing.FaultyTensorPipeRpcBackendOptions)
    assert (made.messages_to_fail, made.messages_to_delay) == (REFERENCES, {"PYTHON_CALL": 1.5})
    assert (made.num_fail_sends, made.num_worker_threads) == (3, 4)
    assert {*REFERENCES} < {*MESSAGES}
    with pytest.raises(RuntimeError, match="No mapping to a kind of message exists for NONSENSE"):
        options(["NONSENSE"])
    with pytest.raises(ValueError, match="must not be negative"):
        options((), {"PYTHON_CALL": -1})


def test_what_is_said_of_references_arrives_though_it_is_lost_at_first() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            rref = rpc.remote(worker_name(1), twice, (torch.ones(2),))
            passed = rpc.remote(worker_name(2), through, (rref, 1))
            assert passed.to_here().tolist() == [3, 3]

    as_workers(work, 3, lambda: options(REFERENCES))


@pytest.mark.parametrize("to", [0, 1])
def test_a_lost_call_makes_no_value(to: int) -> None:
    """Neither on another worker nor on the own; nothing is left behind, so that shutdown() ends."""

    def work(rank: int) -> None:
        if rank:
            return
        for function in (twice, torch.neg):
            rref = rpc.remote(worker_name(to), function, (torch.ones(2),))
            wait_until_pending_futures_and_users_flushed()
            for use in (rref.to_here, rref._serialize, partial(rpc.rpc_async, 1, through, (rref, 1))):
                with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
                    use()
        assert rpc.rpc_sync(worker_name(to), twice, (1,)) == 2
        with pytest.raises(RuntimeError, match="lost on purpose"):
            rpc.rpc_sync(worker_name(to), torch.neg, (torch.ones(1),))

    kinds = ["PYTHON_REMOTE_CALL", "SCRIPT_REMOTE_CALL", "SCRIPT_CALL"]
    as_workers(work, 2, lambda: options(kinds))


def faulty_agent() -> FaultyAgent:
    """Return this worker."""
    agent = current.current_agent()
    assert isinstance(agent, FaultyAgent)
    return agent


def send_late_calls() -> None:
    """Send at once the calls of this worker that would be sent much later."""
    for timer in tuple(faulty_agent()._timers):
        timer.function()
        timer.cancel()


def test_a_late_call_is_late_for_who_does_not_wait_long() -> None:
    def work(rank: int) -> None:
        if rank:
            return
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync(worker_name(1), twice, (1,), timeout=0.05)
        send_late_calls()  # whose answer nobody waits for any more
        late = rpc.rpc_async(worker_name(1), twice, (1,), timeout=0)
        send_late_calls()
        assert late.wait() == 2
        assert rpc.rpc_sync(worker_name(1), torch.neg, (torch.ones(1),)).item() == -1
        faulty_agent()._late.clear()  # for shutdown(), which makes calls as well

    as_workers(work, 2, lambda: options((), {} if dist.get_rank() else {"PYTHON_CALL": 600}))


def test_a_reference_whose_creation_is_late_is_of_no_use() -> None:
    def work(rank: int) -> None:
        if rank:
            return
        for to in (0, 1):
            rref = rpc.remote(worker_name(to), torch.neg, (torch.ones(1),), timeout=0.001)
            with pytest.raises(RuntimeError, match="RPC ran for more than"):
                rref._get_future().wait()
            send_late_calls()
            wait_until_pending_futures_and_users_flushed()
            with pytest.raises(RuntimeError, match="RRef creation"):
                rref.to_here()
            if to:
                wait_until_owners_and_forks_on_rank(1, 1, rank=1)

    as_workers(work, 2, lambda: options((), {"SCRIPT_REMOTE_CALL": 600}))


def test_a_late_call_is_sent_when_its_time_has_come() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            began = time.monotonic()
            assert rpc.rpc_sync(worker_name(1), twice, (1,)) == 2
            assert time.monotonic() - began >= 0.1
            assert not faulty_agent()._timers

    as_workers(work, 2, lambda: options((), {"PYTHON_CALL": 0.1}))
