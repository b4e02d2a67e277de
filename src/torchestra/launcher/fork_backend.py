"""The ranks of a job on this host: forked from its fork server, and connected by sockets and pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial

from torchestra.errors import DistBackendError, DistError
from torchestra.launcher.backend import LaunchBackend
from torchestra.launcher.channel import Message, channel, receive, send
from torchestra.launcher.fork_server_client import ForkServerClient
from torchestra.launcher.port_reservation import PortReservation
from torchestra.launcher.spec import (
    Ended,
    Failure,
    Forked,
    PhaseReached,
    Ready,
    Replace,
    Returned,
    SignalRanks,
    StoreServed,
)
from torchestra.system.limits import check_free_descriptors, naming_limits

_READ_SIZE = 1 << 16
_FINAL_READS = 17
"""The most reads of one pipe: enough for the largest, and finite if a child of a rank never stops writing."""

_FILES_OF_RANK = 5  # that the fork server has open for each at a time; the launcher has fewer
_FILES_OF_SERVER = 16


class ForkBackend(LaunchBackend):
    """Ranks that are forked processes.

    Args:
        server: forks them; serves no other job while this one runs.
        ports: the ports where they meet; closed with the backend.
        stdin: the input of rank 0; by default nothing.
        changed: returns the variables of a replacement's environment that have changed since the job began.
    """

    def __init__(
        self,
        server: ForkServerClient,
        ports: PortReservation,
        stdin: int | None = None,
        changed: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._changed = changed
        self._server = server
        self._ports = ports
        self._stdin = stdin
        self._begun = False
        self._alive: dict[int, int] = {}  # process by rank
        self._controls: dict[int, socket.socket] = {}  # our end of each rank's control channel
        self._outputs: dict[int, tuple[int, int]] = {}  # rank and stream, by the descriptor that is read

    def _start(self) -> None:
        self.listener.loop.watch(self._server.end, self._on_server)
        if self._server.ready:
            self._start_ranks()

    def replace(self, rank: int) -> None:
        self.drain()
        self._close_control(rank)
        null = os.open(os.devnull, os.O_RDONLY)
        self._send_with_files(rank, Replace(rank, self._changed()), null)
        os.close(null)

    def signal(self, signum: signal.Signals, final: bool, rank: int | None = None) -> None:
        send(self._server.end, SignalRanks(signum, final, rank))

    def drain(self) -> None:
        for descriptor in list(self._outputs):
            for _ in range(_FINAL_READS):
                if not self._on_output(descriptor):
                    break

    def close(self) -> None:
        for control in self._controls.values():
            control.close()
        for descriptor in self._outputs:
            os.close(descriptor)
        self._ports.close()

    def _start_ranks(self) -> None:
        spec = self.listener.spec
        with naming_limits(f"{spec.nproc} ranks cannot be started"):
            check_free_descriptors(_FILES_OF_RANK * spec.nproc + _FILES_OF_SERVER)
        send(self._server.end, spec, [each.fileno() for each in self._ports.listeners])
        self._begun = True
        self.listener.begun()
        null = os.open(os.devnull, os.O_RDONLY)
        for rank in range(spec.nproc):
            stdin = self._stdin if rank == 0 and self._stdin is not None else null
            self._send_with_files(rank, rank, stdin)
        os.close(null)

    def _send_with_files(self, rank: int, message: object, stdin: int) -> None:
        """Open a rank's control channel and pipes, and send their other ends to the server with a message."""
        loop = self.listener.loop
        control, ranks_control = channel()
        control.setblocking(False)
        self._controls[rank] = control
        loop.watch(control, partial(self._on_rank, rank))
        ends = []
        for stream in range(2):
            descriptor, ranks_end = os.pipe()
            os.set_blocking(descriptor, False)
            self._outputs[descriptor] = rank, stream
            loop.watch(descriptor, partial(self._on_output, descriptor))
            ends.append(ranks_end)
        send(self._server.end, message, [ranks_control.fileno(), stdin, *ends])
        ranks_control.close()
        for ranks_end in ends:
            os.close(ranks_end)

    def _on_server(self) -> None:
        message = receive(self._server.end)
        content = None if message is None else message.content
        if isinstance(content, Ready):
            self._server.ready = True
            self._start_ranks()
        elif isinstance(content, StoreServed):
            self.listener.store_served(content)
        elif isinstance(content, Forked):
            self._alive.update(content.pids)
            for rank, pid in content.pids.items():
                self.listener.forked(rank, pid)
        elif isinstance(content, Ended):
            for rank in tuple(self._controls):  # what happened before this end is noted before it
                self._receive_all(rank)
            self._alive.pop(content.rank, None)
            self.listener.ended(content)
        else:
            self._lose_server()

    def _lose_server(self) -> None:
        """Kill what the ranks started: the server has died, so the kernel has killed the ranks."""
        for pid in self._alive.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.listener.lost()
        self._server.ready = False
        if not self._begun:
            raise DistError("the ranks could not be started: the process that loads torch for them failed")
        raise DistError("the launcher's fork server was killed, and its ranks with it; start the job again")

    def _on_rank(self, rank: int) -> None:
        if not self._receive_all(rank):
            self._close_control(rank)

    def _close_control(self, rank: int) -> None:
        control = self._controls.pop(rank, None)
        if control is not None:
            self.listener.loop.unwatch(control)
            control.close()

    def _receive_all(self, rank: int) -> bool:
        """Take every message that a rank has sent so far; return False when no more can come.

        Raises:
            DistBackendError: a rank has sent something else.
        """
        with contextlib.suppress(BlockingIOError):
            while (message := self._receive(rank)) is not None:
                if isinstance(message.content, PhaseReached):
                    self.listener.reached(rank, message.content)
                elif isinstance(message.content, Failure):
                    self.listener.failed(rank, message.content)
                elif isinstance(message.content, Returned) and message.files:
                    self.listener.returned(rank, os.fdopen(message.files[0], "rb"))
                else:
                    raise DistBackendError(f"rank {rank} has sent its launcher {message.content!r:.200}")
            return False
        return True

    def _receive(self, rank: int) -> Message | None:
        try:
            return receive(self._controls[rank])
        except DistBackendError as error:
            raise DistBackendError(f"rank {rank}: {error}") from error

    def _on_output(self, descriptor: int) -> bool:
        """Pass on a rank's output; return False when there was none."""
        if descriptor not in self._outputs:  # closed by another event of this turn of the loop
            return False
        try:
            data = os.read(descriptor, _READ_SIZE)
        except BlockingIOError:
            return False
        self.listener.printed(*self._outputs[descriptor], data)
        if data:
            return True
        self.listener.loop.unwatch(descriptor)
        del self._outputs[descriptor]
        os.close(descriptor)
        return False
