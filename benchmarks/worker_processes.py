"""The processes of one peer: started together, told what to do, and gone in the end whatever happens.

Each rank connects to a socket (an MPI's launcher leaves its ranks no usable standard input) whose name is
random and not in the file system, so that nothing stays behind if this process is killed; connections of
other users are refused. Every wait has a deadline, and a rank that ends is noticed at once, because
its connection closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.peers import Peer, rank_environment, torchestra_environment
from benchmarks.ranks.session import SOCKET_VARIABLE
from torchestra.errors import DistError

__all__ = ["PeerError", "WorkerProcesses", "free_port", "last_line"]

_START_SECONDS = 120.0
_QUIT_SECONDS = 10.0
_POLL_SECONDS = 0.05
_TAIL_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")
_ENTRY = Path(__file__).resolve().parent / "ranks" / "__main__.py"


class PeerError(DistError):
    """A peer did not start, broke down, or did not answer in time. It takes no part any more."""


class _Rank:
    """The driver's end of the connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.number = -1
        self._received = b""
        self._process: int | None = None
        about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        number, user, _ = _CREDENTIALS.unpack(about)
        if user != os.geteuid():
            connection.close()
            raise PermissionError(f"user {user} connected to the benchmark of user {os.geteuid()}")
        # The process itself, not its number, which may be someone else's later. Python may lack the call.
        with contextlib.suppress(OSError, AttributeError):
            self._process = os.pidfd_open(number)

    @property
    def name(self) -> str:
        return f"rank {self.number}" if self.number >= 0 else "a rank"

    def tell(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """Return the answer, or None while it is incomplete.

        Raises:
            ConnectionError: the rank has ended.
        """
        chunk = self.connection.recv(1 << 16)
        if not chunk:
            raise ConnectionResetError("the process has ended")
        self._received += chunk
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None


class WorkerProcesses:
    """The ranks of one peer. Use it as a context manager: on leaving, no process of it is left.

    Args:
        peer: what to start.
        world: how many ranks.
        start_seconds: how long the ranks may take until all have joined.

    Attributes:
        description: what the ranks say they are, with version.

    Raises:
        PeerError: the ranks did not start in time; the message ends with the last line of their output.
    """

    def __init__(self, peer: Peer, world: int, start_seconds: float = _START_SECONDS) -> None:
        self.peer = peer
        self.world = world
        self.description = ""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the processes
        self._address = f"torchestra-bench-{secrets.token_hex(16)}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[_Rank] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind("\0" + self._address)
            self._listener.listen(world)
            self._start()
            self._gather(time.monotonic() + start_seconds)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Tell every rank to do something, and collect what they answer, by rank.

        Raises:
            PeerError: a rank ended, raised, or has not answered after ``seconds``.
        """
        what = f"{command['do']} {command.get('operation', '')}".strip()
        for rank in self._ranks:
            try:
                rank.tell(command)
            except OSError as error:
                raise self._error(f"{rank.name} is gone at {what}: {error}") from None
        return self._collect(self._ranks, what, time.monotonic() + seconds)

    def close(self) -> None:
        """Let the ranks leave, and end those that do not within 10 seconds."""
        with contextlib.suppress(OSError):
            for rank in self._ranks:
                rank.tell({"do": "quit", "slot": ""})
            deadline = time.monotonic() + _QUIT_SECONDS
            while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
                time.sleep(_POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End every process of this peer now."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                # An MPI's launcher ends its ranks when it is asked to end.
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and any(p.poll() is None for p in self._processes):
                time.sleep(_POLL_SECONDS)
        for process in self._processes:
            process.wait()
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._listener.close()
        self._output.close()

    def _start(self) -> None:
        peer, entry = self.peer, [str(self.peer.python), str(_ENTRY), self.peer.kind]
        extra = {**peer.environment, SOCKET_VARIABLE: self._address}
        if peer.mpiexec is not None:
            command = [str(peer.mpiexec), "-n", str(self.world), *entry]
            self._spawn(command, rank_environment(extra))
            return
        complete = torchestra_environment if peer.kind == "torchestra" else rank_environment
        extra |= {"WORLD_SIZE": str(self.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(self.world):
            self._spawn(entry, complete({**extra, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def _spawn(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environment,
                # A group, to be killed as one, but not a session: Linux schedules sessions apart, so that a
                # rank of one could not yield its core to a rank of another (an mpiexec's share one anyhow).
                preexec_fn=os.setpgrp,  # noqa: PLW1509 - this process has one thread
            )
        )

    def _gather(self, deadline: float) -> None:
        """Accept a connection from every rank, and learn its number."""
        self._listener.settimeout(_POLL_SECONDS)
        while len(self._ranks) < self.world:
            with contextlib.suppress(TimeoutError, PermissionError):
                connection, _ = self._listener.accept()
                self._ranks.append(_Rank(connection))
                continue
            if any(process.poll() is not None for process in self._processes):
                raise self._error("a rank ended before it had joined")
            if time.monotonic() > deadline:
                raise self._error(f"only {len(self._ranks)} of {self.world} ranks came")
        for rank, hello in zip(self._ranks, self._collect(self._ranks, "start", deadline), strict=True):
            rank.number = hello["rank"]
            self.description = hello["description"]
            if hello["world"] != self.world:
                raise self._error(f"{hello['world']} ranks were started, not {self.world}")
        self._ranks.sort(key=lambda rank: rank.number)
        if [rank.number for rank in self._ranks] != list(range(self.world)):
            raise self._error(f"the ranks are {[rank.number for rank in self._ranks]}")

    def _collect(self, ranks: Sequence[_Rank], what: str, deadline: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for position, rank in enumerate(ranks):
                selector.register(rank.connection, selectors.EVENT_READ, position)
            while len(answers) < len(ranks):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    late = ", ".join(ranks[p].name for p in range(len(ranks)) if p not in answers)
                    raise self._error(f"{late} did not finish {what} in time")
                for key, _ in selector.select(min(remaining, 1.0)):
                    rank = ranks[key.data]
                    try:
                        answer = rank.read()
                    except OSError as error:
                        raise self._error(f"{rank.name} is gone at {what}: {error}") from None
                    if answer is None:
                        continue
                    selector.unregister(rank.connection)
                    answers[key.data] = answer
                    if "error" in answer:
                        raise self._error(f"{rank.name} failed at {what}: {answer['error']}", tail=False)
        return [answers[position] for position in range(len(ranks))]

    def _error(self, reason: str, tail: bool = True) -> PeerError:
        """Return the reason, and the last line that the ranks printed, unless the reason says it all."""
        line = last_line(self._output) if tail else ""
        output = f" (last output: {line})" if line else ""
        return PeerError(f"{self.peer.columns[0].title}, {self.world} ranks: {reason}{output}")


def last_line(output: IO[bytes]) -> str:
    """Return the last line with something in it of what processes wrote into a file."""
    # Read without moving the position that the processes write at.
    size = os.fstat(output.fileno()).st_size
    start = max(0, size - _TAIL_BYTES)
    text = os.pread(output.fileno(), size - start, start).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def free_port() -> str:
    """Return a TCP port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
