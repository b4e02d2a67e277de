"""A worker of the benchmark of remote calls: the same calls by torchestra.rpc and by torch.distributed.rpc.

Both libraries' workers live in the same two processes, and take turns. Worker 0 calls, worker 1 answers with
what it was given, or with another tensor of that size. Worker 0 writes the microseconds per call of all
turns as JSON, by workload and library, into the directory that TORCHESTRA_BENCH_DIRECTORY names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc

import torchestra.rpc

Calls = Callable[[int], None]

IN_FLIGHT = 2_000
_OTHER = "worker1"


def echo(value: Any) -> Any:
    """Return what it is called with."""
    return value


def negated(value: torch.Tensor) -> torch.Tensor:
    """Return another tensor than it is called with."""
    return value.neg()


def _one_by_one(library: Any, value: Any, function: Callable[[Any], Any] = echo) -> Calls:
    def calls(count: int) -> None:
        for _ in range(count):
            library.rpc_sync(_OTHER, function, args=(value,))

    return calls


def _in_flight(library: Any, value: Any) -> Calls:
    def calls(count: int) -> None:
        for _ in range(count // IN_FLIGHT):
            futures = [library.rpc_async(_OTHER, echo, args=(value,)) for _ in range(IN_FLIGHT)]
            torch.futures.wait_all(futures)

    return calls


def workloads(library: Any) -> dict[str, tuple[Calls, int]]:
    """Return, by name, a function that makes a number of calls, and the divisor of that number."""
    floats = {
        name: torch.zeros(size // 4) for name, size in (("4 KB", 4096), ("1 MB", 1 << 20), ("64 MB", 1 << 26))
    }
    return {
        "an int": (_one_by_one(library, 3), 1),
        **{f"a tensor of {name}": (_one_by_one(library, value), 1) for name, value in floats.items()},
        **{
            f"a tensor of {name}, negated": (_one_by_one(library, floats[name], negated), 1)
            for name in ("1 MB", "64 MB")
        },
        f"{IN_FLIGHT:,} calls in flight, each": (_in_flight(library, 3), IN_FLIGHT),
    }


def _time(calls: Calls, count: int) -> float:
    """Return the microseconds per call."""
    start = time.perf_counter()
    calls(count)
    return (time.perf_counter() - start) / count * 1e6


def _measure(
    libraries: dict[str, Any], seconds: float, turns: int, least: int
) -> dict[str, dict[str, list[float]]]:
    by_library = {way: workloads(library) for way, library in libraries.items()}
    found: dict[str, dict[str, list[float]]] = {}
    for name in next(iter(by_library.values())):
        counts = {}
        for way, loads in by_library.items():
            calls, unit = loads[name]
            calls(least * unit)
            per_call = _time(calls, least * unit) / 1e6
            counts[way] = unit * max(1 if unit > 1 else least, round(seconds / per_call / unit))
        taken: dict[str, list[float]] = {way: [] for way in libraries}
        for turn in range(turns):
            for way in sorted(libraries, reverse=turn % 2 == 1):
                taken[way].append(_time(by_library[way][name][0], counts[way]))
        found[name] = taken
    return found


def main(seconds: float, turns: int, least: int) -> None:
    """Measure every workload, each library in so many turns of so many seconds, or of ``least`` calls."""
    directory = Path(os.environ["TORCHESTRA_BENCH_DIRECTORY"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torchestra.rpc.init_rpc(f"worker{rank}")
    torch.distributed.rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=torch.distributed.rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{directory / 'meeting'}"
        ),
    )
    if rank == 0:
        libraries = {"torchestra": torchestra.rpc, "tensorpipe": torch.distributed.rpc}
        (directory / "found.json").write_text(json.dumps(_measure(libraries, seconds, turns, least)))
    torch.distributed.rpc.shutdown()
    torchestra.rpc.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
