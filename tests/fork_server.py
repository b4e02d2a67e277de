"""The server that forks the ranks of the tests that are processes.

It is forked from the test process once, before there are any threads, and has torch and the kernels loaded.
It finds functions by module and name, so they must be at a module's top level; it imports modules that it
does not know once, before it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

import torchestra as dist
from forking import die_with_parent
from torchestra.engine import warm_up
from torchestra.store import FileStore

# How long a rank waits for the others unless a test says otherwise.
OP_SECONDS = 100.0

_LOOK_S = 1.0  # how often the server looks whether the test process has ended

_server: tuple[int, int, Connection] | None = None


def start_server() -> Connection:
    """Start the fork server unless it runs; the end that it is talked to through."""
    global _server
    if _server is None or _server[0] != os.getpid():
        torch.set_num_threads(1)
        warm_up()
        ours, theirs = Pipe()
        tests = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _serve(theirs, tests)
            finally:
                os._exit(1)  # whatever ends it must not go on in a copy of the tests' process
        theirs.close()
        _server = (os.getpid(), pid, ours)
        atexit.register(_stop_server)
    return _server[2]


def _stop_server() -> None:
    global _server
    if _server is not None and _server[0] == os.getpid():
        _server[2].close()
        os.waitpid(_server[1], 0)
        _server = None


def _serve(connection: Connection, tests: int) -> None:
    """Fork worlds, one after the other, until the other end is closed or the test process has ended.

    Another child of the test process may hold the other end open: so it is looked for its end as well. The
    ranks die with this process, whatever ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not connection.poll(_LOOK_S):
                if os.getppid() != tests:
                    os._exit(1)
            path, size, directory, timeout, init = pickle.loads(connection.recv_bytes())
            sys.path[:] = path
            request = connection.recv_bytes()
            try:
                fn, args = pickle.loads(request)
            except BaseException:
                connection.send(traceback.format_exc())
                continue
            _fork_world(connection, tests, size, directory, timeout, init, fn, args)
    os._exit(0)


def _fork_world(
    connection: Connection,
    tests: int,
    size: int,
    directory: str,
    timeout: float,
    init: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    pipes: dict[int, int] = {}  # descriptor to read from: rank
    pids = []
    # A collection in a rank would write into all that the rank shares with the server, and so copy it.
    gc.collect()
    gc.freeze()
    server = os.getpid()
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent(server)
            connection.close()
            for descriptor in (read, *pipes):
                os.close(descriptor)
            _be_rank(write, rank, size, directory, timeout, init, fn, args)
        os.close(write)
        pipes[read] = rank
        pids.append(pid)
    connection.send(pids)
    chunks: list[list[bytes]] = [[] for _ in range(size)]
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # only its end is looked for: the test process is gone
    for descriptor in pipes:
        poll.register(descriptor, select.POLLIN)
    while pipes:
        ready = poll.poll(1000 * _LOOK_S)
        if os.getppid() != tests:
            os._exit(1)
        for descriptor, _ in ready:
            if descriptor not in pipes:
                os._exit(1)
            rank = pipes[descriptor]
            if piece := os.read(descriptor, 1 << 20):
                chunks[rank].append(piece)
                continue
            poll.unregister(descriptor)
            os.close(descriptor)
            del pipes[descriptor]
            _, status = os.waitpid(pids[rank], 0)
            connection.send((rank, b"".join(chunks[rank]), status))


def _be_rank(
    write: int,
    rank: int,
    size: int,
    directory: str,
    timeout: float,
    init: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The whole life of a rank."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    os.environ["WORLD_DIRECTORY"] = directory
    value, error, text = None, None, ""
    try:
        torch.set_num_threads(1)
        store = FileStore(os.path.join(directory, "store"), size)
        if init:
            dist.init_process_group(store=store, rank=rank, world_size=size, timeout=OP_SECONDS)
            dist.group.WORLD.set_timeout(timeout)
            value = fn(*args)
        else:
            value = fn(store, rank, size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as caught:
        error, text = caught, traceback.format_exc()
    try:
        payload = pickle.dumps((value, error, text))
        pickle.loads(payload)
    except Exception as unpicklable:
        payload = pickle.dumps(
            (None, AssertionError(f"{unpicklable!r} while pickling {value!r}, {error!r}\n{text}"), text)
        )
    with contextlib.suppress(OSError), os.fdopen(write, "wb") as file:
        file.write(payload)
    os._exit(0 if error is None else 1)
