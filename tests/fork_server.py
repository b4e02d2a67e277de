"""The server that forks the ranks of the tests that are processes.

It is forked from the test process once, before there are any threads, and has torch, the kernels and all test
modules loaded. It finds functions by module and name, so they must be at a module's top level.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

import torch

from forking import die_with_parent
from rank_process import Request, Result, serve
from torchestra.arguments.annotations import prepare_checks
from torchestra.engine import warm_up

_LOOK_S = 1.0  # how often the server looks whether the test process has ended
_MOST_IDLE = 8  # processes that wait for a world

_server: tuple[int, int, Connection] | None = None


class World(NamedTuple):
    """What the test process asks for.

    Attributes:
        fresh: whether its ranks are processes that have served no world, and serve no other.
        call: the pickled function and its arguments.
    """

    path: list[str]
    size: int
    directory: str
    timeout: float
    init: bool
    fresh: bool
    call: bytes


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
                _Server(theirs, tests).run()
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


class _Process(NamedTuple):
    """A process that is a rank, or waits to be one."""

    pid: int
    connection: Connection

    def end(self) -> int:
        """Have it end, if it does not by itself; return its status."""
        self.connection.close()
        return os.waitpid(self.pid, 0)[1]


class _Server:
    """Make worlds, one after the other, until the other end is closed or the test process has ended.

    Another child of the test process may hold the other end open: so it is looked for its end as well. The
    ranks die with this process, whatever ends it.
    """

    def __init__(self, connection: Connection, tests: int) -> None:
        self._connection = connection
        self._tests = tests
        self._idle: list[_Process] = []
        self._running: dict[Connection, tuple[int, _Process]] = {}  # rank and process

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        prepare_checks()
        with contextlib.suppress(EOFError, OSError):
            while True:
                while not self._connection.poll(_LOOK_S):
                    self._end_with_tests()
                world: World = self._connection.recv()
                sys.path[:] = world.path
                try:
                    pickle.loads(world.call)  # imports, once, what it needs
                except BaseException:
                    self._connection.send(traceback.format_exc())
                    continue
                self._serve(world)
        os._exit(0)

    def _end_with_tests(self) -> None:
        if os.getppid() != self._tests:
            os._exit(1)

    def _serve(self, world: World) -> None:
        ranks = [self._start(rank, world) for rank in range(world.size)]
        self._connection.send([each.pid for each in ranks])
        stay: list[_Process] = []
        while self._running:
            ready = wait([self._connection, *self._running], _LOOK_S)
            self._end_with_tests()
            for connection in ready:
                if connection is self._connection:  # it has nothing to say now: the test process is gone
                    os._exit(1)
                assert isinstance(connection, Connection)
                self._receive(connection, stay)
        untouched: bool = self._connection.recv()  # a signal may arrive after the rank's end
        # Others of a world that failed may be in any state.
        reusable = untouched and not world.fresh and len(stay) == world.size
        kept = stay[: max(0, _MOST_IDLE - len(self._idle))] if reusable else []
        self._idle += kept
        for each in stay[len(kept) :]:
            each.end()

    def _receive(self, connection: Connection, stay: list[_Process]) -> None:
        """Tell the tests how a rank ended, once it stays for another world or its process has ended."""
        rank, process = self._running[connection]
        try:
            result: Result = connection.recv()
        except (EOFError, OSError):
            result = Result(b"", stays=False)
        del self._running[connection]
        if result.stays:
            stay.append(process)
        self._connection.send((rank, result.payload, 0 if result.stays else process.end()))

    def _start(self, rank: int, world: World) -> _Process:
        request = Request(
            rank, world.size, world.directory, world.timeout, world.init, world.path, world.call
        )
        process = self._idle.pop() if self._idle and not world.fresh else self._fork()
        process.connection.send(request)
        self._running[process.connection] = (rank, process)
        return process

    def _fork(self) -> _Process:
        # A collection in a rank would write into all that the rank shares with the server, and so copy it.
        gc.collect()
        gc.freeze()
        ours, theirs = Pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(server)
            for each in (ours, self._connection, *self._running, *(idle.connection for idle in self._idle)):
                each.close()
            serve(theirs)
        theirs.close()
        return _Process(pid, ours)
