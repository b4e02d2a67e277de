"""Time single requests to a TCPStore and to a ReplicatedStore, whose servers are processes of this host.

``python -m tools.store_latency`` prints the median and the 99th percentile of each, in microseconds, and
after how long a request is answered whose primary was killed just before it.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from torchestra.store import ReplicatedStore, Store, StoreReplica, TCPStore, TCPStoreServer

REQUESTS, KILLS = 3000, 10
_context = multiprocessing.get_context("fork")


def serve_tcp(listener: socket.socket) -> None:
    """Serve a TCPStore until killed."""
    TCPStoreServer(listen_fd=listener.detach())
    time.sleep(1e6)


def serve_replica(index: int, addresses: list[str], listeners: list[socket.socket]) -> None:
    """Serve a replica until killed."""
    own = listeners.pop(index)
    for other in listeners:  # else they would listen when their own process has ended
        other.close()
    StoreReplica(index, addresses, listen_fd=own.detach())
    time.sleep(1e6)


def started(target: Callable[..., None], *args: object) -> BaseProcess:
    """Start a process."""
    process = _context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def replicated(count: int) -> tuple[ReplicatedStore, list[BaseProcess]]:
    """Return a store and the processes of its replicas."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
    processes = [started(serve_replica, index, addresses, listeners) for index in range(count)]
    for each in listeners:
        each.close()
    return ReplicatedStore(addresses, 30), processes


def report(name: str, store: Store) -> None:
    """Time requests and print how long they take."""
    requests: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("key", b"value"),
        "get": lambda: store.get("key"),
        "add": lambda: store.add("number", 1),
    }
    for what, request in requests.items():
        times = []
        for _ in range(REQUESTS):
            began = time.perf_counter()
            request()
            times.append((time.perf_counter() - began) * 1e6)
        late = statistics.quantiles(times, n=100)[98]
        print(f"{name:28} {what:4} {statistics.median(times):8.0f} us, 99 %: {late:8.0f} us", flush=True)


def main() -> None:
    """Time both stores."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = started(serve_tcp, listener)
    report("TCPStore", TCPStore("127.0.0.1", listener.getsockname()[1]))
    server.kill()
    for count in (3, 5):
        store, processes = replicated(count)
        report(f"ReplicatedStore, {count} replicas", store)
        for each in processes:
            each.kill()
    pauses = []
    for _ in range(KILLS):
        store, processes = replicated(3)
        store.add("number", 1)
        processes[0].kill()
        began = time.perf_counter()
        store.add("number", 1)
        pauses.append((time.perf_counter() - began) * 1e3)
        for each in processes:
            each.kill()
    print(f"after kill -9 of the primary: {statistics.median(pauses):.1f} ms, at most {max(pauses):.1f} ms")


if __name__ == "__main__":
    main()
