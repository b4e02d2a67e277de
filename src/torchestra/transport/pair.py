"""A rank on another host, as its connection sees it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.framing import MessageAssembler, frames

ALIVE = b""
GOODBYE = b"\0"
HELLO = b"\0\0"  # all its connections are there
WELCOME = b"\0\0\0"  # it has heard our hello
FRAMES_IN_ADVANCE = 64  # that ZeroMQ keeps at either end of a connection
_MOST_QUEUED = 1 << 26  # bytes
ENDED_SECONDS = 0.15
_ENDED_TICK = 0.05
AGAIN_FOR_SECONDS = 10.0  # who is turned away tries again
_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this rank's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what answers there is another program",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended the handshake",
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_DISCONNECTED: "it ended the connection",
}
_TURNED_AWAY = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILED)


class _Waiting(NamedTuple):
    """A message that is to be sent: its bytes, what makes its frames, and what to call when they are sent."""

    size: int
    frames: Callable[[], Iterator[bytes | memoryview]]
    done: Callable[[], None] | None


_NOTHING = _Waiting(0, lambda: iter(()), None)


class PairConnection:
    """What one rank knows of another one. All but :meth:`post` is for the thread of the connections.

    Times are by the clock of that thread, which stands still while the process does.

    Attributes:
        joined: the handshake has succeeded.
        greeted: it has said hello.
        settled: it has heard our hello; so our connection is not a stranger's to it any more.
        refused: why there is no connection, while none has been.
        began: when the connection was last tried to be made, by the time of the host.
        how: what has become of the rank, once it is gone.
        heard, told: when something came from it, and was sent to it.
        blocked: ZeroMQ takes no more at the moment.
    """

    def __init__(self, rank: int, socket: zmq.Socket[Any], card: EndpointRecord) -> None:
        self.rank = rank
        self.card = card
        self.socket = socket
        self.joined = False
        self.greeted = self.settled = False
        self.refused = ""
        self.how = ""
        self.heard = self.told = 0.0
        self.blocked = False
        self.assembly = MessageAssembler(rank)
        self._monitor: zmq.Socket[Any] | None = None
        self._ended: float | None = None  # for how long the connection has been ended, with nothing heard
        self._looked = 0.0
        self._queue: deque[_Waiting] = deque()
        self._frames: Iterator[bytes | memoryview] | None = None
        self._frame: bytes | memoryview | None = None
        self._current = _NOTHING  # the message that is being sent
        self._said_hello = False
        # Callers may come again from a finaliser that interrupts them.
        self._lock = threading.RLock()
        self._posted = 0
        self._sent = 0
        self._room = threading.Event()
        self._first = self.began = time.monotonic()
        self.connect(socket)

    # -- every thread

    def post(
        self, kind: int, tag: int, parts: Any, keep: object, done: Callable[[], None] | None = None
    ) -> None:
        """Queue a message; ``done`` is called when all of it has been sent."""
        size = sum(length for _, length in parts)
        with self._lock:
            self._posted += size
        self._queue.append(_Waiting(size, lambda: frames(kind, tag, parts, keep), done))

    @property
    def is_full(self) -> bool:
        """Whether so much is queued that callers should wait."""
        return self._posted - self._sent > _MOST_QUEUED and not self.how

    def await_room(self, seconds: float) -> None:
        """Wait until something has been sent, or for so long."""
        self._room.clear()
        if self.is_full:
            self._room.wait(seconds)

    def say(self, control: bytes) -> None:
        """Queue one of the frames above, which are shorter than the first of any message."""
        self._said_hello |= control == HELLO
        self._queue.append(_Waiting(0, lambda: iter((control,)), None))

    # -- the thread of the connections

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Connect, in place of what may have been refused."""
        if self.refused:
            self._close_socket(0)
        self.socket, self.refused = socket, ""
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self.began = time.monotonic()
        socket.connect(self.card.address)

    @property
    def is_given_up(self) -> bool:
        """Whether it has been refused, and for so long that it is not tried again."""
        final = self.refused == _FAILED[zmq.EVENT_HANDSHAKE_FAILED_AUTH]
        return bool(self.refused) and (final or time.monotonic() - self._first > AGAIN_FOR_SECONDS)

    @property
    def is_ending(self) -> bool:
        """Whether the connection has ended, and what came over it may not all have been read."""
        return self._ended is not None

    @property
    def has_mail(self) -> bool:
        """Whether anything is to be sent."""
        return bool(self._queue) or self._frames is not None

    def flush(self, clock: float) -> None:
        """Send what ZeroMQ takes."""
        self.blocked = False
        while True:
            if self._frame is None:
                if self._frames is None:
                    if not self._queue:
                        return
                    self._current = self._queue.popleft()
                    self._frames = self._current.frames()
                self._frame = next(self._frames, None)
                if self._frame is None:
                    self._frames = None
                    self._sent += self._current.size
                    self._room.set()
                    done, self._current = self._current.done, _NOTHING
                    if done is not None:
                        done()
                    continue
            try:
                self.socket.send(self._frame, zmq.NOBLOCK)
            except zmq.Again:
                self.blocked = True
                return
            self._frame = None
            self.told = clock

    def show_life(self, clock: float) -> None:
        """Let it hear something, if there is nothing else."""
        if self.has_mail:
            return
        try:
            self.socket.send(ALIVE, zmq.NOBLOCK)
        except zmq.Again:
            return
        self.told = clock

    def look(self, clock: float, heartbeat: float | None, grace: float = ENDED_SECONDS) -> None:
        """Note what has become of the connection. ``grace``: see :class:`Transport`."""
        while self._monitor is not None and self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._introduce()
                self.joined, self.heard = True, clock
            elif self.joined and not self.settled and event in _TURNED_AWAY:
                # With too many strangers, before it knew who this is. What was said can be repeated.
                self.joined, self.refused = False, _FAILED[event]
            elif self.joined:
                if self._ended is None:
                    self._ended = 0.0
            elif not self.refused:
                self.refused = _FAILED.get(event, str(event))
        if self.how or not self.joined:
            return
        if self._ended is not None:
            # What it sent before may still be on its way from ZeroMQ, on a connection of its own. So it takes
            # some looks: after a pause of this process ZeroMQ is as far behind as this thread.
            passed = min(clock - self._looked, _ENDED_TICK)
            self._ended = 0.0 if self.heard >= self._looked else self._ended + passed
            if self._ended > grace:
                self.how = "died (its connection has ended)"
        elif heartbeat is not None and clock - self.heard > heartbeat:
            self.how = f"died or is cut off (nothing has been heard of it for {clock - self.heard:.1f} s)"
        self._looked = clock

    def _introduce(self) -> None:
        """Say at once whose connection this is, and again what was said on one before."""
        self.say(HELLO if self._said_hello else ALIVE)
        if self.greeted:
            self.say(WELCOME)

    def close(self, linger: int) -> None:
        """End the connection; ``linger``: milliseconds for what ZeroMQ still has."""
        self._queue.clear()
        self._frames = self._frame = None
        self._room.set()
        self._close_socket(linger)

    def _close_socket(self, linger: int) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self.socket.close(linger)
