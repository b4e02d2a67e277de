"""Process ranks for pytest: forked, test by test, from a server that is a copy of the collected session.

The server is forked when collection is over, before any test has started a thread, and loads torch and the
kernels once. A rank is a fork of it: it has all tests, fixtures and modules already, makes its own
fixtures by pytest's own machinery, and ends with the test. When the pytest process ends, however it does,
the server sees its connection close, kills what ranks there are, and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest
import torch

from torchestra.engine import warm_up
from torchestra.testing.as_rank import Told, run_item

__all__ = ["RankEnding", "RankPool", "RankWorld", "Request"]

OUTPUT = "rank-{}.out"
_DUMP_SECONDS = 1.0


@dataclass
class Request:
    """A test that the server shall run.

    Attributes:
        nodeid: which.
        size, timeout, init, may_die: as in the marker.
        directory: for the ranks' store and output.
        values: the pickled values of the fixtures that the world shares, by name.
        debug_rank: whose failure a debugger shall look at, or None.
    """

    nodeid: str
    size: int
    timeout: float
    init: bool
    may_die: tuple[int, ...]
    directory: str
    values: dict[str, bytes]
    environment: dict[str, str]
    debug: bool
    debug_rank: int | None


@dataclass
class RankEnding:
    """How one process rank ended: what it has told, or if that is nothing, its exit code."""

    payload: bytes
    exit_code: int | None
    time: float = field(default_factory=time.monotonic)

    @property
    def told(self) -> Told | None:
        """What it has told."""
        told: Told | None = pickle.loads(self.payload) if self.payload else None
        return told

    @property
    def failed(self) -> bool:
        """Whether it ended badly."""
        told = self.told
        return told is None or told.error is not None


class RankPool:
    """The pytest process's end of the server.

    Args:
        items: the tests, by node id.
    """

    def __init__(self, items: Mapping[str, pytest.Function]) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                ours.close()
                _serve(theirs, items)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._connection = ours

    def start(self, request: Request) -> RankWorld:
        """Start the ranks of a test."""
        self._connection.send(request)
        pids = self._connection.recv()
        return RankWorld(self._connection, pids, request)

    def close(self) -> None:
        """End the server. Nothing happens in a process that is not the one that made it."""
        if self._owner == os.getpid():
            self._connection.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._owner = -1


class RankWorld:
    """The running ranks of one test."""

    def __init__(self, connection: Connection, pids: list[int], request: Request) -> None:
        self.endings: dict[int, RankEnding] = {}
        self.first_failed: float | None = None
        self.debugging = False
        self._connection = connection
        self._pids = pids
        self._request = request

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._request.size) if rank not in self.endings]

    def wait(self, seconds: float) -> bool:
        """Wait for the next thing that a rank tells, at most so long; whether there was one."""
        if not self._connection.poll(max(0.0, seconds)):
            return False
        what, rank, *told = self._connection.recv()
        if what == "debugging":
            self.debugging = told[0]
        else:
            ending = RankEnding(*told)
            self.endings[rank] = ending
            forgiven = ending.told is None and rank in self._request.may_die
            if ending.failed and not forgiven and self.first_failed is None:
                self.first_failed = ending.time
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that still run."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def dump(self) -> None:
        """Have the ranks that still run write where they are, into their output."""
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_SECONDS
        while self.running and self.wait(deadline - time.monotonic()):
            pass

    def kill(self) -> None:
        """Kill the ranks that still run, and wait until they are gone."""
        self.signal(signal.SIGKILL)
        while self.running:
            self.wait(60.0)

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        path = os.path.join(self._request.directory, OUTPUT.format(rank))
        try:
            with open(path, errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""


@contextlib.contextmanager
def rank_directory() -> Any:
    """A directory that is gone afterwards."""
    directory = tempfile.mkdtemp(prefix="torchestra-test-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# -- the server


def _serve(connection: Connection, items: Mapping[str, pytest.Function]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    warm_up()
    # Else every rank's first collection would touch, and so copy, all that it shares with the server.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        while True:
            _fork_world(connection, items, connection.recv())


def _fork_world(connection: Connection, items: Mapping[str, pytest.Function], request: Request) -> None:
    pipes: dict[int, int] = {}  # descriptor to read from: rank
    pids = []
    for rank in range(request.size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                connection.close()
                for descriptor in (read, *pipes):
                    os.close(descriptor)
                code = _be_rank(write, rank, items[request.nodeid], request)
            finally:
                os._exit(code)
        os.close(write)
        pipes[read] = rank
        pids.append(pid)
    connection.send(pids)
    received: list[bytearray] = [bytearray() for _ in pids]
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # only its end is looked for: the pytest process is gone
    for descriptor in pipes:
        poll.register(descriptor, select.POLLIN)
    while pipes:
        for descriptor, _ in poll.poll():
            if descriptor not in pipes:
                for rank in pipes.values():
                    os.kill(pids[rank], signal.SIGKILL)
                os._exit(1)
            rank = pipes[descriptor]
            piece = os.read(descriptor, 1 << 20)
            if piece and not received[rank] and piece[:1] in (b"d", b"e"):
                connection.send(("debugging", rank, piece[:1] == b"d"))
                piece = piece[1:]
                if not piece:
                    continue
            if piece:
                received[rank] += piece
                continue
            poll.unregister(descriptor)
            os.close(descriptor)
            del pipes[descriptor]
            # Taking a process down takes longer than a test. One that has told its end is not waited for now.
            exit_code = None if received[rank] else os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            connection.send(("ended", rank, bytes(received[rank]), exit_code))
    for rank, pid in enumerate(pids):
        if received[rank]:
            os.waitpid(pid, 0)


def _be_rank(write: int, rank: int, item: pytest.Function, request: Request) -> int:
    """The whole life of a rank; its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect_output(os.path.join(request.directory, OUTPUT.format(rank)))
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    told = run_item(item, rank, request, lambda begins: os.write(write, b"d" if begins else b"e"))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError), os.fdopen(write, "wb") as file:
        file.write(pickle.dumps(told))
    return 0


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
