"""torch.futures.wait_all and collect_all in renamed programs: they end at the first error."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import torchestra.compat as dist
from torchestra.compat import rpc
from torchestra.compat.futures import collect_all, wait_all
from torchestra.compat.testing import worker_name
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.testing import spawn_threads_and_init_comms

Future = torch.futures.Future


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def test_values_and_futures_come_in_order() -> None:
    late: Future[Any] = Future()
    futures = [done(1), late, done(3)]
    collected = collect_all(futures)
    assert not collected.done()
    late.set_result(2)
    assert collected.wait() == futures
    assert wait_all(futures) == [1, 2, 3]
    assert wait_all([late, late]) == [2, 2]
    assert wait_all([]) == collect_all([]).wait() == []


def test_the_first_error_ends_the_wait() -> None:
    never: Future[Any] = Future()
    with pytest.raises(ValueError, match="on purpose"):
        wait_all([never, failed(ValueError("on purpose"))])
    collected = collect_all([never, failed(ValueError("on purpose")), failed(TypeError("a later one"))])
    with pytest.raises(ValueError, match="on purpose"):
        collected.value()
    never.set_result(None)  # too late to change it
    with pytest.raises(ValueError, match="on purpose"):
        collected.wait()


def test_what_is_no_future_is_refused_before_anything_is_waited_for() -> None:
    with pytest.raises(TypeError, match=r"expected torch\.futures\.Future, got int"):
        wait_all([Future(), 1])  # type: ignore[list-item]


waits = threading.Event()


def wait_for_the_caller() -> None:
    waits.wait()


def fail() -> None:
    raise ValueError("on purpose")


def make_calls_that_are_waited_for() -> None:
    with rpc.api._wait_all():
        rpc.rpc_async("worker1", wait_for_the_caller)
        rpc.rpc_async("worker1", fail)


def test_a_call_that_fails_is_told_while_another_runs() -> None:
    """Also one of ``rpc._wait_all``, which waits for the calls of a block."""
    waits.clear()

    @spawn_threads_and_init_comms(world_size=2)
    def on_each() -> None:
        here = current_thread_rank()
        assert here is not None
        options = rpc.TensorPipeRpcBackendOptions()
        options.store = dist.PrefixStore("compat-futures", dist.distributed_c10d._get_default_store())
        rpc.init_rpc(worker_name(here.rank), None, here.rank, 2, options)
        if here.rank == 0:
            try:
                running = rpc.rpc_async("worker1", wait_for_the_caller)
                with pytest.raises(ValueError, match="on purpose"):
                    wait_all([running, rpc.rpc_async("worker1", fail), rpc.rpc_async("worker1", fail)])
                with pytest.raises(ValueError, match="on purpose"):
                    make_calls_that_are_waited_for()
                assert not running.done()
            finally:
                waits.set()
            assert running.wait() is None
        dist.barrier()
        rpc.shutdown()

    on_each()
