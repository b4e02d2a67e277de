"""The pytest process's end of the process ranks: start the ranks of a test, hear how they end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection

import pytest

from torchestra.errors import GroupAbortedError
from torchestra.testing.fork_server import Child, serve
from torchestra.testing.item_runner import ItemRequest
from torchestra.testing.marker import show_as
from torchestra.testing.outcomes import Outcome, RankFailure

_DUMP_S = 1.0


class Released(GroupAbortedError):
    """A rank that failed because another one was gone."""


class RankPool:
    """The pytest process's end of the server.

    Args:
        items: the tests, by node id.
    """

    def __init__(self, items: Mapping[str, pytest.Function]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._owner = os.getpid()
        self._server = Child.fork(partial(serve, items))

    def start(self, request: ItemRequest) -> RankWorld:
        """Start the ranks of a test."""
        connection = self._server.connection
        connection.send(request)
        return RankWorld(connection, connection.recv(), request)

    def close(self) -> None:
        """End the server. Nothing happens in a process that is not the one that made it."""
        if self._owner == os.getpid():
            with contextlib.suppress(ChildProcessError):
                self._server.end()
            self._owner = -1


class RankWorld:
    """The running ranks of one test.

    Attributes:
        outcomes: of the ranks that have ended.
        first_failed: ``time.monotonic()`` when the first of them did not end well.
        debugging: whether a debugger has the terminal.
    """

    def __init__(self, connection: Connection, pids: list[int], request: ItemRequest) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.first_failed: float | None = None
        self.debugging = False
        self._connection = connection
        self._pids = pids
        self._request = request

    @property
    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank in range(self._request.size) if rank not in self.outcomes]

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next message of a rank, ``timeout_s`` at most; return whether there was one."""
        if not self._connection.poll(max(0.0, timeout_s)):
            return False
        what, rank, *content = self._connection.recv()
        if what == "debugging":
            self.debugging = content[0]
            return True
        payload, exit_code = content
        outcome: Outcome = pickle.loads(payload) if payload else self._died(rank, exit_code)
        outcome.time = time.monotonic()
        self.outcomes[rank] = outcome
        if outcome.error is not None:
            show_as(outcome.error, outcome.text)
            self.first_failed = self.first_failed or outcome.time
        return True

    def _died(self, rank: int, exit_code: int) -> Outcome:
        """Return the outcome of a rank whose process ended before its test did."""
        if rank in self._request.may_die:
            return Outcome(rank)
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        message = f"the process of rank {rank} ended with {how}, before the test did"
        error = RankFailure(message) if self.first_failed is None else Released(message)
        return Outcome(rank, error, message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks that still run."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def dump(self) -> None:
        """Have the ranks that still run write where they are, into their output."""
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while self.running and self.wait(deadline - time.monotonic()):
            pass

    def kill(self) -> None:
        """Kill the ranks that still run, and wait until they are gone."""
        self.signal(signal.SIGKILL)
        while self.running:
            self.wait(60.0)

    def output(self, rank: int) -> str:
        """Return a rank's output so far."""
        try:
            with open(self._request.output_of(rank), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
