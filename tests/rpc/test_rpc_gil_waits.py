"""How long a worker's threads wait for the GIL, as it tells when asked to measure that."""

from __future__ import annotations

import sys
import threading

import pytest

import rpc_workers
from torchestra import rpc

NAME = "agent.gil_average_wait_time_us"
INTERVAL = 0.05  # for which a thread in Python keeps the GIL
CALLS = 10

_stop = threading.Event()


def average() -> str | None:
    return rpc.debug_info().get(NAME)


def begin_to_compute() -> None:
    sys.setswitchinterval(INTERVAL)
    threading.Thread(target=compute, daemon=True).start()


def end_to_compute() -> None:
    _stop.set()


def compute() -> None:
    while not _stop.is_set():
        pass


def measure_and_stop() -> None:
    assert average() is None
    rpc.enable_gil_profiling(True)
    rpc.rpc_sync("worker0", average)
    found = average()
    assert found is not None
    assert float(found) >= 0
    rpc.enable_gil_profiling(False)
    assert average() is None


def test_is_measured_only_when_asked_for(kind: str) -> None:
    rpc_workers.first(kind, 2, measure_and_stop)
    rpc_workers.first(kind, 1, measure_and_stop)


def call_a_worker_that_computes() -> float:
    rpc.rpc_sync("worker1", rpc.enable_gil_profiling, (True,))
    rpc.rpc_sync("worker1", begin_to_compute)
    for _ in range(CALLS):
        found = rpc.rpc_sync("worker1", average)
    rpc.rpc_sync("worker1", end_to_compute)
    return float(found)


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="Python runs without the GIL here"
)
def test_a_function_in_python_makes_calls_wait() -> None:
    """Each wait that was measured lasts an interval at least; the few before the computation began do not."""
    assert rpc_workers.first("processes", 2, call_a_worker_that_computes) > INTERVAL * 1e6 / CALLS
