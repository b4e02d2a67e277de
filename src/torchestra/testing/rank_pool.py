"""The pytest process's connection to the process ranks: start ranks, receive their outcomes."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from traceback import FrameSummary
from typing import Any

import pytest

from torchestra.errors import GroupAbortedError
from torchestra.interop.world_names import TORCH_WORLDS
from torchestra.testing.fork_server import Child, serve
from torchestra.testing.item_runner import ItemRequest
from torchestra.testing.marker import RanksSpec, show_as
from torchestra.testing.outcomes import Outcome, RankFailure
from torchestra.testing.stacks import read_dump

_DUMP_S = 10.0  # for a rank to write its stack, even on a busy machine
_DUMP_POLL_S = 0.01


class Released(GroupAbortedError):
    """Raised on a rank that failed because another rank was gone."""


class RankPool:
    """The pytest process's connection to the server, which it starts.

    Args:
        items: the tests, by node id.
        worlds: the worlds whose default groups the ranks will be in.
    """

    def __init__(self, items: Mapping[str, pytest.Function], worlds: Iterable[str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._owner = os.getpid()
        self._server = Child.fork(partial(serve, items, worlds))
        self._store: tuple[Any, int] | None = None
        self._worlds = itertools.count()

    def start(self, request: ItemRequest) -> RankWorld:
        """Start the ranks of a test."""
        connection = self._server.connection
        connection.send(request)
        return RankWorld(connection, connection.recv(), request)

    def store_environment(self, spec: RanksSpec) -> dict[str, str]:
        """Return the environment variables with which ranks that make a group themselves find its store."""
        if spec.init and spec.world not in TORCH_WORLDS:
            return {}
        from torchestra.interop.torch_distributed import worlds

        if self._store is None:
            self._store = worlds.serve_store()
        return worlds.store_environment(self._store[1], str(next(self._worlds)))

    def close(self) -> None:
        """End the server; do nothing in a process that did not start it."""
        if self._owner == os.getpid():
            with contextlib.suppress(ChildProcessError):
                self._server.end()
            self._owner = -1


class RankWorld:
    """The running ranks of one test.

    Attributes:
        outcomes: of the ranks that have ended.
        raised: by rank, the exception in one line, from when a rank raised it.
        first_failed: ``time.monotonic()`` when the first rank raised, or ended unsuccessfully.
        debugging: whether a debugger has the terminal.
    """

    def __init__(self, connection: Connection, pids: list[int], request: ItemRequest) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.raised: dict[int, str] = {}
        self.first_failed: float | None = None
        self.debugging = False
        self._released: set[int] = set()
        self._has_cause = False  # a rank has failed, not only because another one was gone
        self._connection = connection
        self._pids = pids
        self._request = request

    @property
    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank in range(self._request.size) if rank not in self.outcomes]

    @property
    def in_the_test(self) -> list[int]:
        """Return the ranks that have neither ended nor raised."""
        return [rank for rank in self.running if rank not in self.raised]

    def wait(self, timeout_s: float) -> bool:
        """Wait for a rank's next message, at most ``timeout_s`` seconds; return whether there was one."""
        if not self._connection.poll(max(0.0, timeout_s)):
            return False
        what, rank, *content = self._connection.recv()
        if what == "debugging":
            self.debugging = content[0]
            return True
        if what == "raised":
            self.raised[rank], is_released = content[0]
            if is_released:
                self._released.add(rank)
            self._has_cause = self._has_cause or not is_released
            self.first_failed = self.first_failed or time.monotonic()
            return True
        payload, exit_code = content
        outcome: Outcome = pickle.loads(payload) if payload else self._died(rank, exit_code)
        outcome.time = time.monotonic()
        self.outcomes[rank] = outcome
        if outcome.error is not None:
            show_as(outcome.error, outcome.report or outcome.text)
            self.first_failed = self.first_failed or outcome.time
            self._has_cause = self._has_cause or not outcome.consequence
        return True

    def _died(self, rank: int, exit_code: int) -> Outcome:
        """Return the outcome of a rank whose process ended before its test did."""
        if rank in self._request.may_die:
            return Outcome(rank)
        if rank in self.raised:
            message = f"{self.raised[rank]}(the process of rank {rank} ended before it had told where)"
            failure = Released if rank in self._released else RankFailure
            return Outcome(rank, failure(message), message, report=message)
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        message = f"the process of rank {rank} ended with {how}, before the test did"
        # What a rank raises because this one is gone may be told before its end is.
        error = Released(message) if self._has_cause else RankFailure(message)
        return Outcome(rank, error, message, report=message)

    def signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal to ranks that are still running."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def stacks(self, ranks: Sequence[int]) -> dict[int, list[FrameSummary]]:
        """Return the stacks of running ranks, by rank; empty or cut for one that is not done in time."""
        self.signal(signal.SIGUSR1, ranks)
        deadline = time.monotonic() + _DUMP_S
        while True:
            dumps = {rank: read_dump(self._request.stack_of(rank)) for rank in ranks}
            waited_for = [rank for rank in self.running if rank in dumps and not dumps[rank][1]]
            if not waited_for or time.monotonic() > deadline:
                return {rank: frames for rank, (frames, _) in dumps.items()}
            self.wait(_DUMP_POLL_S)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks that are still running, and wait until they are gone."""
        self.signal(signal.SIGKILL, ranks)
        while not self.outcomes.keys() >= set(ranks):
            self.wait(60.0)

    def output(self, rank: int) -> str:
        """Return a rank's output so far."""
        try:
            with open(self._request.output_of(rank), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
