"""Measure what it costs many ranks to join, in requests to the store and in seconds: `make bench-join`.

The ranks are simulated, their joining is not: each is a thread of one of a few processes, with a client of
its own of one TCPStore, and goes through what ``init_process_group`` does on several hosts up to where bytes
begin to move: meet (rendezvous/gathering.py), find the ranks of its host by attaching (host_discovery.py),
and fetch the memory of its host (joining.py). Hosts are told apart by their ids. The store's server is in the
process that prints, and counts what it is asked.

Left out is what needs a machine per host: the kernels' first barrier, and the rails of Gloo. An end of a rail
asks the store a few things more, whatever the number of hosts (tests/multihost/test_requests.py). What a
process does once, however many ranks it is, is done before the time is taken: imports, and loading a kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import resource
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.membership import joining
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory import fd_passing
from torchestra.engine.memory.fd_passing import DescriptorServer, request_descriptor
from torchestra.engine.multihost import host_discovery
from torchestra.engine.multihost.host_discovery import find_hosts
from torchestra.engine.recorder.clock import Moment, best_clock
from torchestra.rendezvous.gathering import gather
from torchestra.store import PrefixStore, TCPStore, TCPStoreServer
from torchestra.store.tcp import server as serving
from torchestra.store.tcp.protocol import Request
from torchestra.system.deadline import Deadline
from torchestra.world.registry import thread_rank

SECRET = "a secret of this benchmark"
LIMIT = 600.0
STACK = 256 << 10
STEPS = ("connect", "meet", "find hosts", "fetch memory")


class Turn:
    """Lets one rank of a process run until it waits for others.

    Real ranks have a core each. A thousand threads that all want the one lock of the interpreter spend most
    of their time handing it over.
    """

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._mine = threading.local()

    def __enter__(self) -> None:
        self._taken.acquire()
        self._mine.turn = True

    def __exit__(self, *_: object) -> None:
        self._mine.turn = False
        self._taken.release()

    @contextlib.contextmanager
    def given_away(self) -> Iterator[None]:
        """Release this rank's turn while it waits for others."""
        if not getattr(self._mine, "turn", False):
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


TURN = Turn()


class Client(TCPStore):
    """A client that gives its rank's turn away while it waits for a key."""

    def _ask_and_wait(self, *arguments: Any) -> list[bytes]:
        with TURN.given_away():
            return super()._ask_and_wait(*arguments)


def await_end(*arguments: Any) -> bool:
    """Release the turn while waiting in a segment."""
    with TURN.given_away():
        return fd_passing.await_end(*arguments)


class Traffic:
    """Counts a server's requests and their bytes in both directions, by kind of request."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        answer = serving.answer

        def counted(table: Any, code: int, fields: Sequence[bytes], wake: Callable[[Any], bool]) -> Any:
            kind = Request(code).name.lower()
            self.requests[kind] += 1
            self.bytes[kind] += sum(map(len, fields))

            def woken(outcome: Any) -> bool:
                self.bytes[kind] += sum(map(len, outcome[1]))
                return wake(outcome)

            outcome = answer(table, code, fields, woken)
            if isinstance(outcome, tuple):
                self.bytes[kind] += sum(map(len, outcome[1]))
            return outcome

        serving.answer = counted

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """Return what was counted since the last time."""
        taken = self.requests.copy(), self.bytes.copy()
        self.requests.clear()
        self.bytes.clear()
        return taken


class Rank:
    """One simulated rank, on a thread of its own."""

    def __init__(self, rank: int, size: int, per_host: int, port: int) -> None:
        self.rank, self.size, self.port = rank, size, port
        self.host = f"host{rank // per_host}"
        self.ends: list[float] = []
        self.error = ""
        self.context: RankContext | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with TURN:
                self._join()
        except BaseException:
            self.error = traceback.format_exc()

    def _join(self) -> None:
        store = Client("127.0.0.1", self.port, timeout=LIMIT, secret=SECRET)
        self._note()
        own = PrefixStore("torchestra", gather(store, self.rank, self.size, LIMIT))
        self._note()
        with thread_rank(self.rank, self.size, own, self.host):
            hosts = find_hosts(own, self.rank, self.size, "default", LIMIT)
        self._note()
        host = hosts.host_at(self.rank)
        here = hosts.on(host)
        self.context = self._fetch_memory(PrefixStore(f"host/{host}", own), here.index(self.rank), len(here))
        self._note()

    def _fetch_memory(self, store: PrefixStore, local_rank: int, size: int) -> RankContext | None:
        """Return the context of a host's first rank; the others do not map the arena: so many do not fit."""
        deadline = Deadline(LIMIT)
        if local_rank == 0:
            arena = joining._new_arena(size, "default")
            with (
                TURN.given_away(),
                DescriptorServer(range(1, size), store.secret, "default", keeps=True) as server,
            ):
                store.set("arena", f"processes {server.invitation}")
                while server.waited_for:
                    server.serve(arena.descriptor)
            return RankContext(arena, 0, "default", SpinPolicy(0, 1))
        _, invitation = joining._ask_for_arena(store, local_rank, size, "default", deadline)
        descriptor, connection = request_descriptor(invitation, store.secret, local_rank, "default", deadline)
        connection.close()
        os.close(descriptor)
        return None

    def _note(self) -> None:
        self.ends.append(time.monotonic())


def work(pipe: Connection, ranks: range, size: int, per_host: int, port: int) -> None:
    """Run some of the ranks, in a process of its own."""
    raise_limits()
    # Threads that want to run wake up as often as this; thousands of them would do nothing else.
    sys.setswitchinterval(1.0)
    host_discovery.await_end = await_end
    # What one rank makes is too little for a collection; a thousand would have this whole process searched.
    gc.disable()
    threading.stack_size(STACK)
    warm_up()
    mine = [Rank(rank, size, per_host, port) for rank in ranks]
    pipe.send("ready")
    pipe.recv()
    before = time.process_time()
    for rank in mine:
        rank.thread.start()
    for rank in mine:
        rank.thread.join()
    wrong = next((rank.error for rank in mine if rank.error), "")
    pipe.send((wrong, [rank.ends for rank in mine], time.process_time() - before))
    pipe.recv()


def warm_up() -> None:
    """Load the kernel that making an arena calls, which a process does once, however many ranks it is."""
    Moment.now(best_clock())


def raise_limits() -> None:
    """Allow as many open descriptors as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Start the server and the ranks, and show what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=10_000, help="how many; %(default)s")
    parser.add_argument("--per-host", type=int, default=8, help="ranks on each host; %(default)s")
    parser.add_argument("--processes", type=int, default=7, help="that simulate them; %(default)s")
    options = parser.parse_args()
    raise_limits()
    traffic = Traffic()
    with TCPStoreServer("127.0.0.1", 0, secret=SECRET) as server:
        seconds, steps = run(options.ranks, options.per_host, options.processes, server.port, traffic)
    print("\n".join(steps))
    print(f"{options.ranks} ranks joined in {seconds:.1f} s")


def run(size: int, per_host: int, processes: int, port: int, traffic: Traffic) -> tuple[float, list[str]]:
    """Return how long it took all ranks, and what to print."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for number in range(processes):
        here, there = context.Pipe()
        # Neighbours are in different processes, so that memory is handed over between processes.
        arguments = (there, range(number, size, processes), size, per_host, port)
        worker = context.Process(target=work, args=arguments, daemon=True)
        worker.start()
        pipes.append(here)
        workers.append(worker)
    try:
        for pipe in pipes:
            pipe.recv()
        began, before = time.monotonic(), time.process_time()
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        requests, moved = traffic.take()
        for wrong, *_ in answers:
            if wrong:
                raise SystemExit(wrong)
        ends = [each for _, listed, _ in answers for each in listed]
        ranks_cpu = sum(cpu for *_, cpu in answers)
        print(f"CPU: ranks {ranks_cpu:.1f} s, server {time.process_time() - before:.1f} s")
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return max(each[-1] for each in ends) - began, described(size, per_host, began, ends, requests, moved)


def described(
    size: int,
    per_host: int,
    began: float,
    ends: list[list[float]],
    requests: Counter[str],
    moved: Counter[str],
) -> list[str]:
    """Return what to print."""
    lines = [
        f"{size} ranks, {-(-size // per_host)} hosts",
        "",
        f"{'step':<14}{'all ranks were through after':>30}",
    ]
    for number, step in enumerate(STEPS):
        lines.append(f"{step:<14}{max(each[number] for each in ends) - began:>28.1f} s")
    lines += ["", f"{'request':<14}{'number':>10}{'per rank':>10}{'bytes':>14}{'per rank':>10}"]
    for kind in [*sorted(requests, key=lambda kind: -requests[kind]), "all"]:
        number, total = (requests.total(), moved.total()) if kind == "all" else (requests[kind], moved[kind])
        lines.append(f"{kind:<14}{number:>10}{number / size:>10.2f}{total:>14}{total / size:>10.0f}")
    return [*lines, ""]


if __name__ == "__main__":
    main()
