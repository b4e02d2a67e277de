"""The seams of sockets: ``socket``, and descriptors of ``os``."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from verification.simulation.network import Flow, Network, Source
from verification.simulation.scheduler import Process, Scheduler, active
from verification.simulation.threads import SeededSecrets

_FIRST_DESCRIPTOR = 1_000_000
_SYN_SECONDS = (1.0, 3.0, 7.0, 15.0, 31.0, 63.0)
_GIVE_UP_SECONDS = 127.0
_ROOM = 1 << 18


class Machine:
    """What the simulated processes of one run share: its network, their open descriptors, and mailboxes.

    Attributes:
        mailboxes: of the ranks that share an arena, by its address.
        listens_at_once: whether connections to a rank wait before it is ready, as in the kernel's queue.
            Where they are refused, both ends try again.
    """

    network: Network
    descriptors: dict[int, Source]
    mailboxes: dict[int, list[Any]]
    listens_at_once = False

    @classmethod
    def begin(cls, network: Network) -> None:
        """Begin another run."""
        cls.network, cls.descriptors, cls.mailboxes = network, {}, {}
        cls.listens_at_once = False

    @classmethod
    def open(cls, source: Source) -> int:
        number = _FIRST_DESCRIPTOR + len(cls.descriptors)
        cls.descriptors[number] = source
        return number


def here() -> Process:
    """Return the simulated process of the calling thread."""
    run = active()
    assert run is not None
    assert run.current is not None
    return run.current.process


def connect_later(
    network: Network, client: Process, server: int, arrive: Callable[[], None], fail: Callable[[int], None]
) -> None:
    """Send the first packet of a connection until it arrives; ``fail`` is called with an error number.

    ``arrive`` is called at the server's machine.
    """

    def attempt(number: int) -> None:
        if client.has_crashed:
            return
        if network.joins(client.host, server) and network.joins(server, client.host):
            network.run.call_later(network.delay(client.host, server), arrive)
        elif number < len(_SYN_SECONDS):
            pause = _SYN_SECONDS[number] - (_SYN_SECONDS[number - 1] if number else 0.0)
            network.run.call_later(pause, partial(attempt, number + 1))
        else:
            network.run.call_later(_GIVE_UP_SECONDS - _SYN_SECONDS[-1], partial(fail, errno.ETIMEDOUT))

    attempt(0)


class SimulatedSocket(Source):
    """A TCP socket, or one of UDP that only asks which address this host has."""

    def __init__(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
    ) -> None:
        super().__init__()
        self.family, self._kind = socket.AddressFamily(family), kind
        self.process = here()
        self._network = Machine.network
        self._run = self._network.run
        self._number = Machine.open(self)
        self._name = (self._network.address(self.process.host), 0)
        self._peer_name: tuple[str, int] | None = None
        self._peer: SimulatedSocket | None = None
        self._flow: Flow | None = None
        self._came = bytearray()
        self._under_way = 0
        self._has_ended = False  # the other end has
        self._error = 0
        self._backlog: list[SimulatedSocket] | None = None
        self._is_closed = False
        self.process.on_crash.append(self.close)

    # -- readiness

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    def detach(self) -> int:
        """Return the descriptor, of which another object is to be made."""
        return self._number

    def is_readable(self) -> bool:
        return bool(self._came or self._has_ended or self._error or self._backlog)

    def is_writable(self) -> bool:
        return bool(self._error or self._has_ended or (self._peer is not None and self._under_way < _ROOM))

    # -- the server

    def bind(self, where: tuple[str, int]) -> None:
        address, port = where
        address = address or self._network.address(self.process.host)
        self._name = (address, port or self._network.new_port())
        if self._name in self._network.bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    def listen(self, backlog: int = 0) -> None:
        if self._backlog is None:
            self._backlog = []
        self._network.bound[self._name] = self

    def accept(self) -> tuple[SimulatedSocket, tuple[str, int]]:
        self._run.seam()
        if not self._backlog:
            raise BlockingIOError
        connection = self._backlog.pop(0)
        assert connection._peer_name is not None
        return connection, connection._peer_name

    # -- the client

    def connect(self, where: tuple[str, int]) -> None:
        assert self._kind == socket.SOCK_DGRAM
        self._peer_name = where[:2]

    def connect_ex(self, where: tuple[str, int]) -> int:
        self._run.seam()
        self._peer_name = where
        self._name = (self._name[0], self._network.new_port())
        host = self._network.host(where[0])
        connect_later(self._network, self.process, host, partial(self._reach, where), self._fail)
        return errno.EINPROGRESS

    def _reach(self, where: tuple[str, int]) -> None:
        """Arrive at the server's machine."""
        listener = self._network.bound.get(where)
        delay = self._network.delay(self._network.host(where[0]), self.process.host)
        if not isinstance(listener, SimulatedSocket):
            self._run.call_later(delay, partial(self._fail, errno.ECONNREFUSED))
            return
        other = listener._accepted(self)
        self._peer, self._flow = other, self._network.flow(self.process, other.process)
        self._run.call_later(delay, partial(self.changed, self._run))
        reset = partial(self._reset_both, other)
        self._network.connections.append((self.process.host, other.process.host, reset))

    def _accepted(self, client: SimulatedSocket) -> SimulatedSocket:
        new = SimulatedSocket.__new__(SimulatedSocket)
        Source.__init__(new)
        new.family, new._kind, new.process = self.family, self._kind, self.process
        new._network, new._run, new._number = self._network, self._run, Machine.open(new)
        new._name, new._peer_name, new._peer = self._name, client._name, client
        new._flow = self._network.flow(self.process, client.process)
        new._came, new._under_way, new._has_ended, new._error = bytearray(), 0, False, 0
        new._backlog, new._is_closed = None, False
        self.process.on_crash.append(new.close)
        assert self._backlog is not None
        self._backlog.append(new)
        self.changed(self._run)
        return new

    def _fail(self, error: int) -> None:
        self._error = error
        self.changed(self._run)

    def _reset_both(self, other: SimulatedSocket) -> None:
        for end in (self, other):
            if end._flow is not None:
                end._flow.cut()
            if not end._is_closed:
                end._fail(errno.ECONNRESET)

    # -- both

    def send(self, data: Any) -> int:
        self._run.seam()
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._error or self._flow is None or self._peer is None:
            raise OSError(self._error or errno.ENOTCONN, os.strerror(self._error or errno.ENOTCONN))
        if self._peer._is_closed and self._has_ended:
            raise BrokenPipeError
        room = _ROOM - self._under_way
        if room <= 0:
            raise BlockingIOError
        sent = bytes(memoryview(data)[:room])
        self._under_way += len(sent)
        self._flow.put(partial(self._peer._take, sent))
        return len(sent)

    def _take(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._came += data
        self.changed(self._run)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._run.seam()
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if not self._came:
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            if self._has_ended:
                return b""
            raise BlockingIOError
        if flags & socket.MSG_PEEK:
            return bytes(self._came[:size])
        data = bytes(self._came[:size])
        del self._came[:size]
        if self._peer is not None:
            peer = self._peer
            was_full = peer._under_way >= _ROOM
            peer._under_way -= len(data)
            if was_full:
                peer.changed(self._run)
        return data

    def _end(self) -> None:
        self._has_ended = True
        self.changed(self._run)

    def shutdown(self, how: int) -> None:
        if self._flow is not None and self._peer is not None:
            self._flow.put(self._peer._end)
        self._end()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._network.bound.get(self._name) is self:
            del self._network.bound[self._name]
        for waiting in self._backlog or ():
            waiting.close()
        if self._flow is not None and self._peer is not None and not self._run.is_ending:
            self._flow.put(self._peer._end)
        self.changed(self._run)

    def setblocking(self, blocking: bool) -> None:
        assert not blocking

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockopt(self, level: int, option: int) -> int:
        assert option == socket.SO_ERROR
        return self._error

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def getpeername(self) -> tuple[str, int]:
        if self._peer_name is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._peer_name

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pair(Source):
    """An end of a socket pair within a process."""

    def __init__(self) -> None:
        super().__init__()
        self._number = Machine.open(self)
        self._came = bytearray()
        self.other = self

    def fileno(self) -> int:
        return self._number

    def is_readable(self) -> bool:
        return bool(self._came)

    def send(self, data: bytes) -> int:
        run = active()
        if run is not None:
            self.other._came += data
            self.other.changed(run)
        return len(data)

    def recv(self, size: int) -> bytes:
        data = bytes(self._came[:size])
        del self._came[:size]
        return data

    def setblocking(self, blocking: bool) -> None:
        pass

    def close(self) -> None:
        pass


def _probe(where: tuple[str, int], timeout: float) -> contextlib.AbstractContextManager[None]:
    """Wait until a connection is made, refused or given up."""
    network, process, answer = Machine.network, here(), Source()
    told: list[int] = []

    def tell(error: int) -> None:
        told.append(error)
        answer.changed(network.run)

    def arrive() -> None:
        error = 0 if where in network.bound else errno.ECONNREFUSED
        network.run.call_later(network.delay(server, process.host), partial(tell, error))

    server = network.host(where[0])
    connect_later(network, process, server, arrive, tell)
    answer.await_change(network.run, timeout)
    error = told[0] if told else errno.ETIMEDOUT
    if error:
        raise OSError(error, os.strerror(error))
    return contextlib.nullcontext()


class SimulatedSockets:
    """The module ``socket``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def socket(self, *arguments: Any, **named: Any) -> Any:
        if active() is None:
            return socket.socket(*arguments, **named)
        return Machine.descriptors[named["fileno"]] if "fileno" in named else SimulatedSocket(*arguments)

    def create_connection(self, where: tuple[str, int], timeout: float) -> Any:
        """Find out whether somebody listens; nothing is ever sent there."""
        if active() is None:
            return socket.create_connection(where, timeout)
        return _probe(where, timeout)

    def socketpair(self) -> Any:
        if active() is None:
            return socket.socketpair()
        one, other = _Pair(), _Pair()
        one.other, other.other = other, one
        return one, other

    def getaddrinfo(self, host: str, port: int, **named: Any) -> Any:
        if active() is None:
            return socket.getaddrinfo(host, port, **named)
        return [(socket.AF_INET, named["type"], 0, "", (host, port))]


class _EventDescriptor(Source):
    """What os.eventfd() makes."""

    count = 0

    def is_readable(self) -> bool:
        return self.count > 0


class SimulatedOS:
    """The module ``os``."""

    def __init__(self, secrets: SeededSecrets) -> None:
        self._secrets = secrets

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def urandom(self, size: int) -> bytes:
        return os.urandom(size) if active() is None else self._secrets.token_bytes(size)

    def eventfd(self, initial: int, flags: int = 0) -> int:
        return os.eventfd(initial, flags) if active() is None else Machine.open(_EventDescriptor())

    def eventfd_write(self, number: int, value: int) -> None:
        run = active()
        source = Machine.descriptors.get(number) if number >= _FIRST_DESCRIPTOR else None
        if isinstance(source, _EventDescriptor):
            source.count += value
            if run is not None and not run.is_ending:
                source.changed(run)
        else:
            os.eventfd_write(number, value)

    def eventfd_read(self, number: int) -> int:
        source = Machine.descriptors.get(number) if number >= _FIRST_DESCRIPTOR else None
        if not isinstance(source, _EventDescriptor):
            return os.eventfd_read(number)
        count, source.count = source.count, 0
        return count

    def pipe(self) -> tuple[int, int]:
        if active() is None:
            return os.pipe()
        read_end, write_end = _Pair(), _Pair()
        write_end.other = read_end
        return read_end.fileno(), write_end.fileno()

    def set_blocking(self, number: int, blocking: bool) -> None:
        if number < _FIRST_DESCRIPTOR:
            os.set_blocking(number, blocking)

    def read(self, number: int, size: int) -> bytes:
        source = Machine.descriptors.get(number)
        return source.recv(size) if isinstance(source, _Pair) else os.read(number, size)

    def write(self, number: int, data: bytes) -> int:
        source = Machine.descriptors.get(number)
        return source.send(data) if isinstance(source, _Pair) else os.write(number, data)

    def close(self, number: int) -> None:
        if number < _FIRST_DESCRIPTOR:
            os.close(number)


def begin(run: Scheduler, network: Network) -> None:
    """Let the sockets of another run begin."""
    assert network.run is run
    Machine.begin(network)
