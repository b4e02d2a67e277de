"""Process ranks for pytest, forked from a server that is a copy of the collected session.

The server is forked when collection is over, before any test has started a thread, and loads torch and the
kernels once. A rank is a fork of it: it has all tests, fixtures and modules already, and makes its own
fixtures by pytest's own machinery. A rank whose test has passed, and which has left no thread behind,
serves in later tests, as the pytest process itself does; any other ends with its test. When the pytest
process ends, however it does, the server sees its connection close, kills what ranks there are, and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_for_any

import pytest
import torch

from torchestra.engine import warm_up
from torchestra.testing.item_runner import ItemRequest, run_item

__all__ = ["serve"]


@dataclass(eq=False)
class _Worker:
    """A process that can be a rank, and the server's end of the connection to it."""

    pid: int
    connection: Connection


def serve(connection: Connection, items: Mapping[str, pytest.Function]) -> None:
    """Run the worlds that the pytest process asks for, one after the other, until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    warm_up()
    # Else every rank's first collection would touch, and so copy, all that it shares with the server.
    gc.collect()
    gc.freeze()
    idle: list[_Worker] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            _run_world(connection, items, connection.recv(), idle)


def _run_world(
    connection: Connection, items: Mapping[str, pytest.Function], request: ItemRequest, idle: list[_Worker]
) -> None:
    running: dict[Connection, tuple[int, _Worker]] = {}
    for rank in range(request.size):
        worker = _assign(idle.pop(), rank, request) if idle else None
        if worker is None:
            known = [connection, *running, *(each.connection for each in idle)]
            worker = _assign(_fork(items, known), rank, request)
        assert worker is not None, "a process that was forked just now does not listen"
        running[worker.connection] = (rank, worker)
    connection.send([worker.pid for _, worker in running.values()])
    retired: list[_Worker] = []
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
                ready.close()
                _, status = os.waitpid(worker.pid, 0)
                connection.send(("ended", rank, b"", os.waitstatus_to_exitcode(status)))
                continue
            if what == "debugging":
                connection.send((what, rank, *content))
                continue
            payload, stays = content
            del running[ready]
            (idle if stays else retired).append(worker)
            connection.send(("ended", rank, payload, None))
    # Taking a process down takes longer than a test, so the pytest process has not waited for it.
    for worker in retired:
        worker.connection.close()
        os.waitpid(worker.pid, 0)


def _assign(worker: _Worker, rank: int, request: ItemRequest) -> _Worker | None:
    """Make a worker a rank of a world; return None if it died while it was idle."""
    try:
        worker.connection.send((rank, request))
    except OSError:
        worker.connection.close()
        os.waitpid(worker.pid, 0)
        return None
    return worker


def _fork(items: Mapping[str, pytest.Function], known: list[Connection]) -> _Worker:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for each in (ours, *known):
                each.close()
            code = _work(theirs, items)
        finally:
            os._exit(code)
    theirs.close()
    return _Worker(pid, ours)


def _work(connection: Connection, items: Mapping[str, pytest.Function]) -> int:
    """Be a worker until the server is gone; return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = os.getcwd()
    threads = threading.active_count()
    stays = True
    with contextlib.suppress(EOFError):
        while stays:
            rank, request = connection.recv()
            os.chdir(directory)
            _redirect_output(request.output_of(rank))
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
            outcome = run_item(
                items[request.nodeid], rank, request, lambda begins: connection.send(("debugging", begins))
            )
            sys.stdout.flush()
            sys.stderr.flush()
            stays = outcome.error is None and threading.active_count() == threads
            connection.send(("outcome", pickle.dumps(outcome), stays))
    return 0


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
