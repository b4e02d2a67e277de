"""Process ranks for pytest, forked from a server that is a copy of the collected session.

The server is forked when collection is over, before any test has started a thread, and loads torch and the
kernels once. A rank is a fork of it: it has all tests, fixtures and modules already, and sets up its
fixtures with pytest's own machinery. A rank whose test has passed, and which has left no thread behind,
serves in later tests, as the pytest process itself does; any other ends with its test. When the pytest
process ends in any way, the server sees its connection close and ends, and the ranks die with it. None
outlives it: they have the pipes of the pytest process, by whose end xdist notices that this has crashed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_for_any

import pytest
import torch

from torchestra.engine import warm_up
from torchestra.interop.rank_world import load_world
from torchestra.testing.item_runner import ItemRequest, run_item
from torchestra.testing.stacks import dump_on_signal

_THREADS_S = 1.0  # even on a busy machine
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class Child:
    """A forked process, and this process's end of the connection to it."""

    pid: int
    connection: Connection

    @classmethod
    def fork(cls, body: Callable[[Connection], object], inherited: Iterable[Connection] = ()) -> Child:
        """Fork a process that closes ``inherited`` and calls ``body`` with its end of the connection.

        It is killed when the calling thread ends.
        """
        ours, theirs = Pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of threads, as xdist and torch have. The child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(code)
                for each in (ours, *inherited):
                    each.close()
                body(theirs)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        return cls(pid, ours)

    def end(self) -> int:
        """Close the connection, wait until the process has ended, and return its exit code."""
        self.connection.close()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def serve(items: Mapping[str, pytest.Function], worlds: Iterable[str], connection: Connection) -> None:
    """Run the worlds that the pytest process requests, one after another, until it is gone.

    Args:
        worlds: the worlds whose default groups the ranks will join; their modules are loaded here once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.disable()  # in what is imported a collection finds nothing, and takes a fifth of the time
    warm_up()
    for world in worlds:
        load_world(world)
    # Else every rank's first collection would touch, and so copy, everything it shares with the server.
    gc.collect()
    gc.freeze()
    gc.enable()
    idle: list[Child] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            _run_world(connection, items, connection.recv(), idle)


def _run_world(
    connection: Connection, items: Mapping[str, pytest.Function], request: ItemRequest, idle: list[Child]
) -> None:
    running: dict[Connection, tuple[int, Child]] = {}
    for rank in range(request.size):
        worker = _assign(idle.pop(), rank, request) if idle else None
        if worker is None:
            paths = [connection, *running, *(each.connection for each in idle)]
            worker = _assign(Child.fork(partial(_work, items), paths), rank, request)
        assert worker is not None, "a process that was forked just now does not listen"
        running[worker.connection] = (rank, worker)
    connection.send([worker.pid for _, worker in running.values()])
    retired: list[Child] = []
    while running:
        for ready in wait_for_any([connection, *running]):
            if ready is connection:  # it has nothing to say now, so it is closed: the pytest process is gone
                for _, worker in running.values():
                    os.kill(worker.pid, signal.SIGKILL)
                os._exit(1)
            assert isinstance(ready, Connection)
            rank, worker = running[ready]
            try:
                what, *content = ready.recv()
            except (EOFError, OSError):
                del running[ready]
                connection.send(("ended", rank, b"", worker.end()))
                continue
            if what in ("raised", "debugging"):
                connection.send((what, rank, *content))
                continue
            payload, stays = content
            del running[ready]
            (idle if stays else retired).append(worker)
            connection.send(("ended", rank, payload, None))
    # Taking a process down takes longer than a test, so the pytest process has not waited for it.
    for worker in retired:
        worker.end()


def _assign(worker: Child, rank: int, request: ItemRequest) -> Child | None:
    """Make a worker a rank of a world; return None if it died while it was idle."""
    try:
        worker.connection.send((rank, request))
    except OSError:
        worker.end()
        return None
    return worker


def _work(items: Mapping[str, pytest.Function], connection: Connection) -> None:
    """Serve as a worker until a test leaves something behind or the server is gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = os.getcwd()
    threads = threading.active_count()
    stays = True
    with contextlib.suppress(EOFError):
        while stays:
            rank, request = connection.recv()
            os.chdir(directory)
            _redirect_output(request.output_of(rank))
            dump_on_signal(request.stack_of(rank))
            outcome = run_item(
                items[request.nodeid], rank, request, lambda what, told: connection.send((what, told))
            )
            sys.stdout.flush()
            sys.stderr.flush()
            stays = outcome.error is None and _threads_are(threads)
            connection.send(("outcome", pickle.dumps(outcome), stays))


def _threads_are(number: int) -> bool:
    """Return whether ``number`` threads run, after waiting for those of groups that the rank has left."""
    for thread in threading.enumerate():
        if thread.name.startswith("torchestra-"):
            thread.join(_THREADS_S)
    return threading.active_count() == number


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    faulthandler.enable(2)  # pytest's handler writes to pytest's output
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
