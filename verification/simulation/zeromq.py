"""The seam of ZeroMQ: PUSH and PULL sockets with CURVE keys, their monitors and the ZAP authenticator.

What is simulated is what libzmq does between ``send`` and ``recv``: connections that begin with a handshake,
which the receiver's authenticator decides, one stream of frames each, room for so many frames, events. What
the product builds on it (transport/event_loop.py, pair.py, framing.py, endpoint.py) is the product's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.utils import z85

from verification.simulation.network import Source, Watch
from verification.simulation.scheduler import active
from verification.simulation.sockets import Machine, connect_later, here
from verification.simulation.threads import SeededSecrets

_HANDSHAKE_SECONDS = 3.0
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_ROOM = 128  # frames: 64 at either end


class _Monitor(Source):
    """The events of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.events: deque[int] = deque()
        self._number = Machine.open(self)

    def fileno(self) -> int:
        return self._number

    def is_readable(self) -> bool:
        return bool(self.events)

    def poll(self, timeout: float = 0) -> int:
        return int(bool(self.events))

    def close(self, linger: int = 0) -> None:
        self.events.clear()


def recv_monitor_message(monitor: _Monitor, flags: int = 0) -> dict[str, int]:
    """Return the next event, as zmq.utils.monitor's function."""
    return {"event": monitor.events.popleft()}


class _Socket(Source):
    """What all kinds of sockets have."""

    curve_publickey = curve_secretkey = curve_serverkey = b""

    def __init__(self, context: SimulatedContext) -> None:
        super().__init__()
        self.context = context
        self.network = Machine.network
        self.run = self.network.run
        self.process = here()
        self._number = Machine.open(self)

    def set(self, option: int, value: Any) -> None:
        pass

    def fileno(self) -> int:
        return self._number

    def bind(self, address: str) -> None:
        pass

    def close(self, linger: int | None = None) -> None:
        pass


class _Incoming:
    """A connection as its receiver sees it, in place of listener.IncomingConnection.

    Attributes:
        has_ended: all that the sender had sent before the end has come.
    """

    has_ended = False

    def end(self) -> None:
        self.has_ended = True


class _Connection:
    """A connection of a PUSH socket to a PULL socket, after its handshake has begun."""

    def __init__(self, push: PushSocket, pull: PullSocket) -> None:
        self.push, self.pull = push, pull
        self.forth = pull.network.flow(push.process, pull.process)
        self.back = pull.network.flow(pull.process, push.process)
        self.user = ""
        self.has_ended = False
        self.incoming = _Incoming()
        pull.connections.append(self)
        hosts = push.process.host, pull.process.host
        pull.network.connections.append((*hosts, self.reset))

    def admit(self, user: str | None) -> None:
        """At the receiver: the authenticator has decided."""
        if self.has_ended:
            return
        if user is None:
            self.has_ended = True
            self.back.put(partial(self.push.refuse, self, zmq.EVENT_HANDSHAKE_FAILED_AUTH))
            return
        self.user = user
        self.back.put(partial(self.push.succeed, self))

    def end(self) -> None:
        """End it at the receiver, which tells the sender."""
        if not self.has_ended:
            self.has_ended = True
            self.back.put(partial(self.push.lose, self))

    def reset(self) -> None:
        """Lose what is under way, and tell both ends."""
        if not self.has_ended:
            self.has_ended = True
            self.forth.cut()
            self.incoming.end()
            self.push.lose(self)


class PushSocket(_Socket):
    """A socket that sends, to one other."""

    def __init__(self, context: SimulatedContext) -> None:
        super().__init__(context)
        self._monitor: _Monitor | None = None
        self._connection: _Connection | None = None
        self._is_up = self._is_over = False
        self._in_flight = 0
        self.process.on_crash.append(self._crash)

    def get_monitor_socket(self, events: int) -> _Monitor:
        self._monitor = _Monitor()
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def connect(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        machine = self.network.host(host)
        arrive = partial(self._reach, (host, int(port)))
        connect_later(self.network, self.process, machine, arrive, lambda _: self._event(zmq.EVENT_CLOSED))

    def _reach(self, where: tuple[str, int]) -> None:
        """Arrive at the other machine."""
        if self._is_over:
            return
        pull = self.network.bound.get(where)
        if not isinstance(pull, PullSocket):
            delay = self.network.delay(self.network.host(where[0]), self.process.host)
            self.run.call_later(delay, partial(self._event, zmq.EVENT_CLOSED))
            return
        pull.accept(partial(self._shake_hands, pull))

    def _shake_hands(self, pull: PullSocket) -> None:
        if self._is_over:
            return
        connection = self._connection = _Connection(self, pull)
        pull.context.authenticate(connection, self.curve_publickey)
        self.run.call_later(_HANDSHAKE_SECONDS, partial(self._time_out, connection))

    def _time_out(self, connection: _Connection) -> None:
        if connection is self._connection and not self._is_up and not connection.has_ended:
            connection.has_ended = True
            self._event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

    def succeed(self, connection: _Connection) -> None:
        """The other end has let this one in."""
        if connection is self._connection and not connection.has_ended:
            self._is_up = True
            self._event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self.changed(self.run)

    def refuse(self, connection: _Connection, event: int) -> None:
        if connection is self._connection:
            self._event(event)

    def lose(self, connection: _Connection) -> None:
        """The connection has ended."""
        if connection is self._connection:
            self._is_up = False
            self._event(zmq.EVENT_DISCONNECTED)

    def _event(self, event: int) -> None:
        if self._monitor is not None and not self._is_over:
            self._monitor.events.append(event)
            self._monitor.changed(self.run)

    def is_writable(self) -> bool:
        return self._is_up and self._in_flight < _ROOM

    def send(self, frame: Any, flags: int = 0) -> None:
        self.run.seam()
        if not self.is_writable():
            raise zmq.Again
        connection = self._connection
        assert connection is not None
        self._in_flight += 1
        connection.forth.put(partial(connection.pull.take, connection, bytes(frame)))

    def taken(self) -> None:
        """The other end has read a frame."""
        self._in_flight -= 1
        if self._in_flight == _ROOM - 1:
            self.changed(self.run)

    def close(self, linger: int | None = None) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.forth.end(self._connection.incoming.end)
        self._connection = None

    def _crash(self) -> None:
        if not self._is_over and self._connection is not None:
            self._connection.forth.cut(all_at_once=False)
        self.close()


class PullSocket(_Socket):
    """A socket that receives from many. Its descriptor tells of a frame only after the socket was empty."""

    def __init__(self, context: SimulatedContext) -> None:
        super().__init__(context)
        self.connections: list[_Connection] = []
        self._where: tuple[str, int] | None = None
        self._frames: deque[tuple[_Connection, bytes]] = deque()
        self._is_asleep, self._is_signalled = True, False
        self._backlog: list[Callable[[], None]] | None = []  # None: it is open
        self.process.on_crash.append(self.close)

    def listen(self, where: tuple[str, int]) -> None:
        """Have connections come; they wait until :meth:`open`."""
        self._where = where
        self.network.bound[where] = self

    def open(self) -> None:
        """Take the connections that wait, and all later ones."""
        waiting, self._backlog = self._backlog or [], None
        for each in waiting:
            each()

    def accept(self, shake_hands: Callable[[], None]) -> None:
        """Take a connection, now or when this is open."""
        if self._backlog is None:
            shake_hands()
        else:
            self._backlog.append(shake_hands)

    def is_readable(self) -> bool:
        return self._is_signalled

    def take(self, connection: _Connection, frame: bytes) -> None:
        """A frame has come."""
        self._frames.append((connection, frame))
        if self._is_asleep:
            self._is_asleep, self._is_signalled = False, True
            self.changed(self.run)

    def receive(self) -> tuple[_Connection, bytes] | None:
        """Return the next frame and the connection that it came over."""
        self.run.seam()
        self._is_signalled = False
        if not self._frames:
            self._is_asleep = True
            return None
        connection, frame = self._frames.popleft()
        connection.push.taken()
        return connection, frame

    def close(self, linger: int | None = None) -> None:
        if self._where is not None:
            self.network.bound.pop(self._where, None)
            self._where = None
        if not self.run.is_ending:
            for connection in self.connections:
                connection.end()
        self.connections.clear()


class ReplySocket(_Socket):
    """The socket of the ZAP authenticator."""

    def __init__(self, context: SimulatedContext) -> None:
        super().__init__(context)
        self._requests: deque[tuple[_Connection, bytes]] = deque()
        self._asked: _Connection | None = None

    def bind(self, address: str) -> None:
        self.context.authenticator = self

    def ask(self, connection: _Connection, key: bytes) -> None:
        self._requests.append((connection, key))
        self.changed(self.run)

    def is_readable(self) -> bool:
        return bool(self._requests)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self._requests:
            raise zmq.Again
        self._asked, key = self._requests.popleft()
        return [b"1.0", b"1", b"torchestra", b"", b"", b"CURVE", z85.decode(key)]

    def send_multipart(self, parts: list[bytes]) -> None:
        connection, self._asked = self._asked, None
        assert connection is not None
        connection.admit(parts[4].decode() if parts[2] == b"200" else None)


class SimulatedContext:
    """A ``zmq.Context``."""

    def __init__(self) -> None:
        self.authenticator: ReplySocket | None = None
        self._sockets: list[_Socket] = []

    def set(self, option: int, value: Any) -> None:
        pass

    def socket(self, kind: int) -> _Socket:
        kinds = {zmq.PUSH: PushSocket, zmq.PULL: PullSocket, zmq.REP: ReplySocket}
        made = kinds[zmq.SocketType(kind)](self)
        self._sockets.append(made)
        return made

    def authenticate(self, connection: _Connection, key: bytes) -> None:
        """Ask whether a key may come in."""
        assert self.authenticator is not None
        self.authenticator.ask(connection, key)

    def destroy(self) -> None:
        for each in self._sockets:
            each.close()


class SimulatedPoller:
    """A ``zmq.Poller``."""

    def __init__(self) -> None:
        self._given: dict[Source, Any] = {}
        self._watch = Watch()

    def register(self, source: Any, events: int) -> None:
        polled = source if isinstance(source, Source) else Machine.descriptors[source]
        self._given[polled] = source
        self._watch.add(polled, reads=bool(events & _POLLIN), writes=bool(events & _POLLOUT))

    def unregister(self, source: Any) -> None:
        polled = source if isinstance(source, Source) else Machine.descriptors[source]
        del self._given[polled]
        self._watch.remove(polled)

    def poll(self, milliseconds: float | None = None) -> list[tuple[Any, int]]:
        run = active()
        assert run is not None
        seconds = None if milliseconds is None else milliseconds / 1000
        return [
            (self._given[source], _POLLIN * reads + _POLLOUT * writes)
            for source, reads, writes in self._watch.wait(run, seconds)
        ]


class SimulatedListener:
    """In place of transport/listener.py, which is about strangers and the kernel's sockets."""

    def __init__(self, inbox: PullSocket, address: str, ports: tuple[int, int] | None) -> None:
        self._inbox, self._where = inbox, (address, Machine.network.new_port())
        self.endpoint = f"tcp://{address}:{self._where[1]}"
        self.monitor = _Monitor()
        self.is_shut = False
        if Machine.listens_at_once:
            inbox.listen(self._where)

    def open(self, expected: int) -> None:
        self._inbox.listen(self._where)
        self._inbox.open()

    def hold(self, number: int) -> None:
        pass

    def prove(self, descriptor: _Connection, number: int) -> _Incoming:
        return descriptor.incoming

    def check(self, expected: int) -> None:
        if not expected:
            self.is_shut = True

    def close(self) -> None:
        pass


class SimulatedInbox:
    """In place of transport/inbox.py, which calls libzmq by its C interface."""

    def __init__(self, socket: PullSocket) -> None:
        self._socket = socket
        self._frame: tuple[_Connection, bytes] | None = None

    def receive(self) -> bool:
        if self._frame is None or not self._frame[1]:
            self._frame = self._socket.receive()
        return self._frame is not None

    @property
    def is_full(self) -> bool:
        return bool(self._frame and self._frame[1])

    @property
    def frame(self) -> memoryview:
        assert self._frame is not None
        return memoryview(self._frame[1])

    @property
    def sender(self) -> str:
        assert self._frame is not None
        return self._frame[0].user

    @property
    def descriptor(self) -> _Connection:
        assert self._frame is not None
        return self._frame[0]

    def release(self) -> None:
        self._frame = None


class SimulatedZeroMQ:
    """The module ``zmq``."""

    Poller = SimulatedPoller

    def __init__(self, secrets: SeededSecrets) -> None:
        self._secrets = secrets

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)

    def Context(self) -> Any:
        return zmq.Context() if active() is None else SimulatedContext()

    def curve_keypair(self) -> tuple[bytes, bytes]:
        if active() is None:
            return zmq.curve_keypair()
        return z85.encode(self._secrets.token_bytes(32)), z85.encode(self._secrets.token_bytes(32))
