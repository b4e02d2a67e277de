"""Running a function on every rank of a world, for tests: ranks as threads, or as processes.

``run("threads", 4, fn, *args)`` calls ``fn(*args)`` on four ranks, in a default group, and returns what they
returned, by rank; the first rank's exception is raised. ``outcomes(...)`` returns results and exceptions
instead, and :func:`processes` gives ranks that can be killed while they run. Every world has a hard time
limit, after which its stacks are printed and it is ended.

Process ranks are forked by a server (``fork_server.py``), so the functions must be at a module's top level;
a process serves several worlds (``rank_process.py``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import torchestra as dist
from fork_server import World, start_server
from rank_process import OP_SECONDS
from torchestra.engine import layout
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank

KINDS = ("threads", "processes")

# Whether a process may be a rank of several worlds; a folder's conftest.py may say no.
processes_are_shared = True

# How long a whole world may take.
WORLD_SECONDS = 200.0


class Outcome(NamedTuple):
    """Describe how one rank ended."""

    value: Any = None
    error: BaseException | None = None
    exit_code: int = 0

    def result(self) -> Any:
        """Return what it returned; its exception is raised."""
        if self.error is not None:
            raise self.error
        return self.value

    @property
    def message(self) -> str:
        """Return what its exception said."""
        assert self.error is not None, f"the rank returned {self.value!r}"
        return str(self.error)


class RankDied(Exception):
    """The process of a rank ended without a result."""


class Remote(Exception):
    """The traceback of a rank, as the cause of the exception that came from it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def results(ended: Sequence[Outcome]) -> list[Any]:
    """Return what the ranks returned; if some failed, what all of those said, in full."""
    errors = {rank: outcome.error for rank, outcome in enumerate(ended) if outcome.error is not None}
    told = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
    assert not errors, "\n".join(["some ranks failed", *told])
    return [outcome.value for outcome in ended]


def run(kind: str, size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call ``fn(*args)`` on every rank; the results, by rank. Options as for :func:`outcomes`."""
    ended = outcomes(kind, size, fn, *args, **options)
    for rank, outcome in enumerate(ended):
        if outcome.error is not None:
            if hasattr(outcome.error, "add_note"):
                outcome.error.add_note(f"on rank {rank} of {size} {kind}")
                for other, each in enumerate(ended[rank + 1 :], rank + 1):
                    outcome.error.add_note(f"rank {other}: {each.error!r}")
            raise outcome.error
    return [outcome.value for outcome in ended]


def outcomes(
    kind: str,
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = OP_SECONDS,
    limit: float = WORLD_SECONDS,
    init: bool = True,
    hosts: Sequence[str] = (),
    fresh: bool = False,
) -> list[Outcome]:
    """Call ``fn(*args)`` on every rank; how each ended.

    Args:
        timeout: of the default group, in seconds.
        limit: for the whole, in seconds.
        init: whether the ranks are in a default group already. Without, a thread may call
            ``init_process_group()``, and ``fn`` in a process is given a FileStore, rank and size first.
        hosts: for threads, which host each pretends to be on; default: all on one.
        fresh: whether processes are forked for this world and end with it. For functions that change what
            ``rank_process.py`` does not undo, and such that look at a process's beginning or end.
    """
    if kind == "threads":
        return _run_threads(size, fn, args, timeout, limit, init, hosts or [""] * size)
    with processes(size, fn, *args, timeout=timeout, init=init, fresh=fresh) as world:
        return world.finish(limit)


# -- threads


def kind_that_compiles() -> str:
    """Return what kind of ranks can compile at once: torch 2.10 notes what it compiles once per process."""
    from torch._dynamo import utils

    return "processes" if hasattr(utils, "_METRICS_CONTEXT") else "threads"


def guard_absent_devices() -> None:
    """Do in this thread, which stays, what the first FakeTensorMode of the process does.

    Where torch is for CUDA and there is no GPU, that makes the process's device guard. In torch 2.10 it
    goes with its thread: when that has ended, the next FakeTensorMode crashes the process.
    Autograd starts a thread for the guard's device, so ranks that are processes cannot be forked after that.
    """
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def _run_threads(
    size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    limit: float,
    init: bool,
    hosts: Sequence[str],
) -> list[Outcome]:
    store = HashStore()
    ended: list[Outcome | None] = [None] * size

    def body(rank: int) -> None:
        try:
            with thread_rank(rank, size, store, hosts[rank]):
                if init:
                    dist.init_process_group(timeout=OP_SECONDS)
                    set_timeout(timeout)
                ended[rank] = Outcome(fn(*args))
        except BaseException as error:
            ended[rank] = Outcome(error=error)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        faulthandler.dump_traceback(sys.__stderr__)
        others = {rank: outcome for rank, outcome in enumerate(ended) if outcome is not None}
        raise AssertionError(
            f"ranks {late} of {size} threads have not ended after {limit} s; of the others: {others}"
        )
    return [outcome or Outcome() for outcome in ended]


# -- processes, in the test


class ProcessWorld:
    """Ranks that are processes and run; end with :meth:`finish`.

    Attributes:
        pids: their process ids, by rank.
    """

    def __init__(self, connection: Connection, pids: list[int], directory: str) -> None:
        self.pids = pids
        self._connection = connection
        self._directory = directory
        self._told: list[Outcome | None] = [None] * len(pids)
        self._running = set(range(len(pids)))
        self._signalled = self._closed = False

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, if it still runs."""
        self._signalled = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def path(self, name: str) -> str:
        """A path in a directory that only this world uses; ranks find it in WORLD_DIRECTORY."""
        return os.path.join(self._directory, name)

    def await_file(self, name: str, limit: float = WORLD_SECONDS) -> str:
        """Wait until a rank has called :func:`leave_note`; what it wrote."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError), open(self.path(name)) as file:
                return file.read()
            if self._connection.poll(0.002):
                self._receive()
                for outcome in self._told:
                    if outcome is not None and isinstance(outcome.error, AssertionError):
                        raise outcome.error
        raise AssertionError(f"no rank has written {name} after {limit} s; how they ended: {self._told}")

    def wait(self, rank: int, limit: float = WORLD_SECONDS) -> Outcome:
        """Wait until one rank has ended; how it did."""
        self._collect({rank}, limit)
        return self._told[rank] or Outcome()

    def finish(self, limit: float = WORLD_SECONDS) -> list[Outcome]:
        """Wait until all have ended; how they did."""
        self._collect(set(range(len(self.pids))), limit)
        return [outcome or Outcome() for outcome in self._told]

    def _collect(self, wanted: set[int], limit: float) -> None:
        deadline = time.monotonic() + limit
        while self._running & wanted:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                late = sorted(self._running & wanted)
                for rank in late:
                    self.signal(rank, signal.SIGUSR1)
                time.sleep(0.5)
                self.close()
                raise AssertionError(
                    f"ranks {late} of {len(self.pids)} processes have not ended after {limit} s; of the"
                    f" others: {[each for each in self._told if each is not None]}"
                )
            self._receive()

    def _receive(self) -> None:
        rank, payload, status = self._connection.recv()
        self._running.discard(rank)
        self._told[rank] = _outcome_of(payload, os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Kill what still runs, and wait until it is gone."""
        if self._closed:
            return
        self._closed = True
        for rank in self._running:
            self.signal(rank, signal.SIGKILL)
        while self._running:
            self._running.discard(self._connection.recv()[0])
        self._connection.send(not self._signalled)  # whether the processes may serve other worlds
        shutil.rmtree(self._directory, ignore_errors=True)


def _outcome_of(payload: bytes, exit_code: int) -> Outcome:
    if not payload:
        return Outcome(
            error=RankDied(f"ended with exit code {exit_code} and without a result"), exit_code=exit_code
        )
    value, error, text = pickle.loads(payload)
    if error is not None:
        error.__cause__ = Remote(text)
    return Outcome(value, error, exit_code)


@contextlib.contextmanager
def processes(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = OP_SECONDS,
    init: bool = True,
    fresh: bool = False,
) -> Iterator[ProcessWorld]:
    """Ranks that run ``fn(*args)`` in processes while the block runs; what then still runs is killed."""
    connection = start_server()
    directory = tempfile.mkdtemp(prefix="torchestra-test-")
    try:
        call = pickle.dumps((fn, args))
        own = fresh or not processes_are_shared
        connection.send(World(list(sys.path), size, directory, timeout, init, own, call))
        pids = connection.recv()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if isinstance(pids, str):
        raise AssertionError(f"the fork server could not start the ranks: {pids}")
    world = ProcessWorld(connection, pids, directory)
    try:
        yield world
    finally:
        world.close()


# -- for functions that run on ranks


def set_timeout(timeout: float) -> None:
    """Give the default group its time-out, once the ranks have met: on a busy machine that takes longer."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timeout)


def meet_and_set_timeout(timeout: float) -> None:
    """Meet in a barrier, and give the default group a short time-out for the operations after it.

    No rank is in the barrier any more when another one's time is over.
    """
    dist.barrier()
    store_barrier("short time-out")
    set_timeout(timeout)


def store_barrier(name: str = "here") -> None:
    """Wait for all ranks without an operation of the group; once for each name in a world.

    For a rank that then dies, leaves, aborts or is interrupted: others may still be in the last operation
    when it has completed it, and would meet the error there. After this none of them is.
    """
    rank, size, here = dist.get_rank(), dist.get_world_size(), current_thread_rank()
    names = [f"{name} of rank {each}" for each in range(size)]
    if here is None:
        leave_note(names[rank])
        for each in names:
            await_note(each)
    else:
        here.store.set(names[rank], b"")
        here.store.wait(names, WORLD_SECONDS)


def await_arrival(rank: int, limit: float = WORLD_SECONDS) -> None:
    """Wait until another rank waits in the operation of the default group that is the next of this rank."""
    context: Any = dist.group.WORLD.communicator.engine.context
    upcoming = context.load_word(layout.SEQUENCE) + 1
    deadline = time.monotonic() + limit
    while context.arena.progress(rank) <= upcoming << layout.STEP_BITS:
        assert time.monotonic() < deadline, f"rank {rank} has begun no operation after {limit} s"
        time.sleep(0.002)


def leave_note(name: str, text: str = "") -> None:
    """Write a note for the test, from a process rank (see :meth:`ProcessWorld.await_file`)."""
    path = os.path.join(os.environ["WORLD_DIRECTORY"], name)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def await_note(name: str, limit: float = WORLD_SECONDS) -> None:
    """From a process rank: wait until the test, or another rank, has left a note."""
    path = os.path.join(os.environ["WORLD_DIRECTORY"], name)
    deadline = time.monotonic() + limit
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise AssertionError(f"nobody has written {name} after {limit} s")
        time.sleep(0.002)


def collect_until(condition: Callable[[], bool], limit: float = WORLD_SECONDS) -> None:
    """Collect garbage until a condition holds: a collection does nothing while another thread collects."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"still referred to after {limit} s"
        gc.collect()
        time.sleep(0.002)


def mappings() -> list[str]:
    """Return the parts of torchestra's memory files that this process has mapped."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:torchestra" in line]


def mapped_files() -> set[str]:
    """The memory files of torchestra of which this process has anything mapped, by inode and name."""
    return {" ".join(line.split()[4:]) for line in mappings()}


def descriptors() -> set[str]:
    """Return what this process has open, by descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found
