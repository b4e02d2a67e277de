"""The pytest process's end of the process ranks: start the ranks of a test, hear how they end."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe

import pytest

from torchestra.testing.fork_server import serve
from torchestra.testing.item_runner import ItemResult
from torchestra.testing.messages import ItemRequest

__all__ = ["RankExit", "RankPool", "RankWorld", "rank_directory"]

_DUMP_SECONDS = 1.0


@dataclass
class RankExit:
    """How one process rank ended: what it has told, or if that is nothing, its exit code."""

    payload: bytes
    exit_code: int | None
    time: float = field(default_factory=time.monotonic)

    @property
    def told(self) -> ItemResult | None:
        """What it has told."""
        told: ItemResult | None = pickle.loads(self.payload) if self.payload else None
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
                serve(theirs, items)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._connection = ours

    def start(self, request: ItemRequest) -> RankWorld:
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

    def __init__(self, connection: Connection, pids: list[int], request: ItemRequest) -> None:
        self.endings: dict[int, RankExit] = {}
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
            ending = RankExit(*told)
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
        try:
            with open(self._request.output_of(rank), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""


@contextlib.contextmanager
def rank_directory() -> Iterator[str]:
    """A directory that is gone afterwards."""
    directory = tempfile.mkdtemp(prefix="torchestra-test-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
