"""The connection of one rank to another: its queue of messages, and its state.

Frames leave in the order of the queue, and the thread that has the connection's lock sends them. A caller
sends on its own thread if each queued message fits in one frame, as that saves a switch of threads; the
transport's thread sends all else. An interrupt between the sending of a frame and noting it makes that frame
leave twice: so messages have sequence numbers, and the receiver drops what it has already.

The sender keeps reliable messages until the other rank has confirmed them. When the connection breaks though
both ranks live, the transport makes a new one, and resends what is not confirmed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchestra.transport import control_frames
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.framing import MessageAssembler
from torchestra.transport.message import Sending
from torchestra.transport.outgoing import ControlFrame, OutgoingMessage, Parts
from torchestra.transport.source_port import source_address

if TYPE_CHECKING:
    from torchestra.transport.listener import IncomingConnection

FRAMES_IN_ADVANCE = 64  # that ZeroMQ keeps at either end of a connection
_MAX_QUEUED = 1 << 26  # bytes
_CONFIRM_MESSAGES, _CONFIRM_BYTES = 64, 1 << 18
ENDED_SECONDS = 0.15
"""For so long after a rank has ended its connections without a goodbye what has come of it may be found."""
_ENDED_TICK = 0.05
_LONGEST_END = 1.0
_AGAIN_SECONDS = 0.25
_ANSWER_SECONDS, _MOST_PATIENCE = 0.5, 6
RETRY_SECONDS = 10.0  # a rank that is refused tries again for so long
_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this rank's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what answers there is another program",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended the handshake",
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_DISCONNECTED: "it ended the connection",
}
_HANDSHAKE_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED)
_CROWDED = tuple(_FAILED[event] for event in _HANDSHAKE_FAILED)  # what a rank says that is among strangers
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_FAILED)
_BROKEN = "died (its connection has ended)"


class PairConnection:
    """One rank's view of another one. All but posting and :meth:`try_flush` is for the transport's thread.

    Times are by the clock of that thread, which stands still while the process does.

    Args:
        reconnects: another connection is made if this one breaks.
        again_for: for how many seconds to try again to connect to a rank that does not let this one in yet,
            but has listened since before it was made known: if nobody listens there, it is gone. None: it
            may not listen yet, and refuses only keys that it will never know.

    Attributes:
        socket: of this rank's connection to the other; None before it connects.
        monitor: tells what becomes of that connection.
        joined: the handshake has succeeded.
        hello_received: the other has said hello.
        hello_acked: it has received the hello of our present connection, so it does not take that for a
            stranger's any more. No message is sent before.
        wanted: connect at once, whether or not there is something to send.
        refused: why connecting failed, while there has been no connection.
        began: when this rank last tried to connect, by the clock of the host.
        end_reason: how the rank ended, once it is gone.
        broken: why the connection has ended, if another one is to be made.
        received_at, sent_at: when something came from it, and was sent to it.
        blocked: ZeroMQ takes no more at the moment.
        received: the sequence number of the last message that has come.
        accepted: the number of the other's connection that it came over; numbers grow.
    """

    def __init__(
        self, rank: int, endpoint: EndpointRecord, reconnects: bool = False, again_for: float | None = None
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.reconnects = reconnects
        self._retry_for = again_for
        self._port: int | None = None  # that it connects from
        self._incoming: IncomingConnection | None = None
        self.socket: zmq.Socket[Any] | None = None
        self.wanted = self.joined = False
        self.hello_received = self.hello_acked = False
        self._number = 0  # of the connection to the other, which a hello has
        self._others_number = 0
        self.refused = ""
        self.end_reason = self.broken = ""
        self.received_at = self.sent_at = 0.0
        self.blocked = False
        self.received = self.accepted = 0
        self.assembler = MessageAssembler(rank)
        self.monitor: zmq.Socket[Any] | None = None
        self._attempts = 0
        self._is_answered = False
        self._ended: float | None = None  # for how long the connection has been ended, with nothing heard
        self._since_end = 0.0
        self._last_check = 0.0
        self._controls: deque[bytes] = deque()
        self._queue: deque[OutgoingMessage] = deque()
        self._unconfirmed: deque[OutgoingMessage] = deque()
        self._frames: Iterator[bytes | memoryview] | None = None  # of the message that is being sent
        self._frame: bytes | memoryview | None = None
        # A finaliser that interrupts a caller may call again; then `_flushing` is set.
        self._lock = threading.RLock()
        self._flushing = False
        self._posted = self._sent = 0  # bytes
        self._frames_sent = 0
        self._sequence = 0
        self._to_confirm, self._to_confirm_bytes = 0, 0
        self._first = self.began = time.monotonic()

    # -- every thread

    def post(
        self,
        kind: int,
        tag: int,
        parts: Parts,
        keep: object,
        done: Callable[[], None] | None = None,
        reliable: bool = False,
        sending: Sending | None = None,
    ) -> None:
        """Queue a message; ``done`` is called when it was sent. A reliable one is kept until confirmed."""
        self._put(OutgoingMessage(kind, tag, parts, keep, done=done, reliable=reliable), sending)

    def post_text(self, kind: int, tag: int, text: bytes) -> None:
        """Queue a message of one part, which is kept until it is confirmed."""
        self._put(OutgoingMessage(kind, tag, (), None, text, reliable=True))

    def _put(self, message: OutgoingMessage, sending: Sending | None = None) -> None:
        with self._lock:  # nothing is called in here, so an interrupt comes before all of it, or after it
            self._posted += message.size
            self._sequence += 1
            message.sequence = self._sequence
            self._queue += (message,)
            if sending is not None:
                sending.is_sent = True

    @property
    def is_full(self) -> bool:
        """Return whether so much is queued that callers should wait."""
        return self._posted - self._sent > _MAX_QUEUED and not self.end_reason

    def queue_control(self, control: bytes) -> None:
        """Queue one of the control frames: before all messages, except a goodbye."""
        if control.startswith(control_frames.SENT_FIRST):
            self._controls.append(control)
        else:
            self._queue.append(ControlFrame(control))

    @property
    def posted(self) -> int:
        """Return the number of the last message that has been posted."""
        return self._sequence

    def is_owed(self, last: int) -> bool:
        """Return whether the other rank may still confirm reliable messages up to number ``last``."""
        if self.end_reason:
            return False
        with self._lock:
            return any(each.reliable and each.sequence <= last for each in (*self._unconfirmed, *self._queue))

    @property
    def _is_for_callers(self) -> bool:
        """Return whether callers may send. What forbids it is set by the holder of the lock.

        A hello comes before all messages.
        """
        return not (self.blocked or self._controls) and self.hello_acked

    def try_flush(self) -> bool:
        """Send what is queued, if short, on the thread of a caller; return whether all has been sent."""
        if not self._is_for_callers:
            return False
        ended: list[Callable[[], None]] = []
        try:
            if not self._lock.acquire(blocking=False) or self._flushing:
                return False
            # Once more, with the lock: since the first look the transport's thread may have found that ZeroMQ
            # takes no more, and poll the socket now, or have begun to replace it. Two threads in one socket
            # of ZeroMQ's crash the process.
            if not self._is_for_callers:
                return False
            self._flushing = True
            try:
                while self._queue:
                    if self._frames is not None or not self._queue[0].is_short or self.socket is None:
                        return False
                    if not self._send(next(self._queue[0].frames())):
                        return False
                    self._note_sent(self._queue.popleft(), ended)
            finally:
                self._flushing = False
        finally:
            try:  # not in contextlib.suppress(): an interrupt could come before the next line
                self._lock.release()
            except RuntimeError:
                pass  # another thread has it
        for done in ended:
            done()
        return True

    # -- the holder of the lock

    def _send(self, frame: bytes | memoryview) -> bool:
        assert self.socket is not None
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.blocked = True
            return False
        self._frames_sent += 1
        return True

    def _note_sent(self, message: OutgoingMessage, ended: list[Callable[[], None]]) -> None:
        self._sent += message.size
        if message.reliable and self.reconnects:
            self._unconfirmed.append(message)
        if message.done is not None:
            ended.append(message.done)

    # -- the transport's thread

    def connect(self, socket: zmq.Socket[Any], ports: Sequence[int] = ()) -> None:
        """Connect, in place of a connection that was refused or has broken, if there was one.

        Args:
            ports: of this host to connect from, one after the other, and then from any, as the system may
                refuse each of them.
        """
        if self.socket is not None:
            self._close_socket(0)
        self.socket, self.refused, self._is_answered = socket, "", False
        self.monitor = socket.get_monitor_socket(_EVENTS)
        self.began = time.monotonic()
        address = self.endpoint.address
        self._port = port = (*ports, None)[self._attempts % (len(ports) + 1)]
        self._attempts += 1
        socket.connect(source_address(address, port) if port else address)

    def is_to_connect_again(self, now: float) -> bool:
        """Return whether the last attempt has failed, or got no answer, and it is time for another one.

        The other host may have dropped the request among those of strangers, or this one has not sent it.
        """
        patience = min(self._attempts, _MOST_PATIENCE) * _ANSWER_SECONDS
        waits_for = _AGAIN_SECONDS if self.refused else math.inf if self._is_answered else patience
        waits_for = 0.0 if self._may_be_own_port else waits_for
        return now - self.began > waits_for and not self.is_given_up

    @property
    def _may_be_own_port(self) -> bool:
        """Return whether nobody was asked, perhaps: a program listens at the port to connect from, say."""
        return self._port is not None and self.refused == _FAILED[zmq.EVENT_CLOSED]

    @property
    def is_met(self) -> bool:
        """Return whether this rank is connected to the other, and the other to it."""
        return self.joined and self.hello_received and self.hello_acked

    @property
    def is_given_up(self) -> bool:
        """Return whether it has refused this rank for so long that there is no other attempt."""
        if self._retry_for is not None:
            is_closed = self.refused == _FAILED[zmq.EVENT_CLOSED] and not self._may_be_own_port
            return is_closed or (bool(self.refused) and time.monotonic() - self._first > self._retry_for)
        if not self.refused or (self.wanted and self.refused in _CROWDED):
            return False  # whoever wants the connection has a time-out
        final = self.refused == _FAILED[zmq.EVENT_HANDSHAKE_FAILED_AUTH]
        return final or time.monotonic() - self._first > RETRY_SECONDS

    @property
    def is_ending(self) -> bool:
        """Return whether the connection has ended, though the thread may not have read all that came."""
        return self._ended is not None

    @property
    def has_output(self) -> bool:
        """Return whether there is something that can be sent now."""
        return bool(self._controls) or (self.hello_acked and (bool(self._queue) or self._frames is not None))

    @property
    def is_wanted(self) -> bool:
        """Return whether there is no connection yet, and a reason for one."""
        return (
            self.socket is None
            and not self.end_reason
            and (self.wanted or self.hello_received or bool(self._queue))
        )

    @property
    def is_meeting(self) -> bool:
        """Return whether the two are about to be connected."""
        return (
            self.socket is not None
            and not (self.hello_received and self.hello_acked)
            and not (self.end_reason or self.is_given_up)
        )

    def flush(self, clock: float) -> None:
        """Send what ZeroMQ takes."""
        ended: list[Callable[[], None]] = []
        with self._lock:
            sent_before = self._frames_sent
            self._flush(ended)
            if self._frames_sent > sent_before:  # else a sign of life is still due
                self.sent_at = clock
        for done in ended:
            done()

    def _flush(self, ended: list[Callable[[], None]]) -> None:
        self.blocked = False
        if self.socket is None or not self.joined:
            return
        while True:
            if self._frame is None and self._frames is None and self._controls:
                if not self._send(self._controls[0]):
                    return
                self._controls.popleft()
                continue
            if self._frame is None:
                if self._frames is None:
                    if not (self._queue and self.hello_acked):
                        return
                    self._frames = self._queue[0].frames()
                self._frame = next(self._frames, None)
                if self._frame is None:
                    self._frames = None
                    self._note_sent(self._queue.popleft(), ended)
                    continue
            if not self._send(self._frame):
                return
            self._frame = None

    def show_life(self, clock: float) -> None:
        """Send a sign of life, if there is nothing else to send."""
        if self.has_output or self.socket is None:
            return
        with self._lock:
            blocked = self.blocked
            if self._send(control_frames.ALIVE):
                self.sent_at = clock
            self.blocked = blocked

    def accept(self, number: int, connection: IncomingConnection) -> None:
        """Begin to receive over another connection, and drop a message that the last one left incomplete."""
        self.accepted, self._incoming = number, connection
        self.assembler = MessageAssembler(self.rank)

    def note_received(self, sequence: int, size: int) -> bool:
        """Note that a message has come; return False if it had come before. Confirm several at once."""
        if sequence <= self.received:
            return False
        self.received = sequence
        if self.reconnects:
            self._to_confirm += 1
            self._to_confirm_bytes += size
            if self._to_confirm >= _CONFIRM_MESSAGES or self._to_confirm_bytes >= _CONFIRM_BYTES:
                self.confirm()
        return True

    def handle_control(self, control: bytes) -> bool:
        """Act on a control frame of the other rank; return whether there may be something to send now."""
        if (number := control_frames.number_of(control, control_frames.HELLO)) is not None:
            self.hello_received, self._others_number = True, number
            self.queue_control(control_frames.numbered(control_frames.HELLO_ACK, number))
        elif (number := control_frames.number_of(control, control_frames.HELLO_ACK)) is not None:
            # It may have received the hello of a connection that has broken since.
            self.hello_acked = self.joined and number == self._number
        elif control == control_frames.GOODBYE:
            self.end_reason = "has shut down"
        elif control == control_frames.ASK_TO_CONFIRM:
            self.confirm()
        elif (number := control_frames.number_of(control, control_frames.CONFIRM)) is not None:
            self.note_confirmed(number)
            return False
        return True

    def confirm(self) -> None:
        """Queue the number of the last message that has come."""
        self._to_confirm = self._to_confirm_bytes = 0
        self.queue_control(control_frames.numbered(control_frames.CONFIRM, self.received))

    def note_confirmed(self, sequence: int) -> None:
        """Forget the messages up to this one, which the other rank has."""
        with self._lock:
            while self._unconfirmed and self._unconfirmed[0].sequence <= sequence:
                self._unconfirmed.popleft()

    def break_off(self) -> None:
        """Prepare for another connection: queue again what is not confirmed, drop unreliable messages."""
        with self._lock:
            self.wanted = self.joined = self.hello_acked = False
            self._ended, self._frames, self._frame, self.broken = None, None, None, ""
            self._since_end = 0.0
            kept = [each for each in self._queue if each.reliable or isinstance(each, ControlFrame)]
            kept[:0] = self._unconfirmed
            self._unconfirmed.clear()
            self._controls.clear()
            self._queue.clear()
            self._queue.extend(kept)
            self._posted, self._sent = sum(each.size for each in kept), 0
            self._first, self.refused = time.monotonic(), _FAILED[zmq.EVENT_DISCONNECTED]

    def read_events(self, clock: float) -> bool:
        """Act on what ZeroMQ tells of the connection; return whether it has told anything."""
        has_events = False
        while self.monitor is not None and self.monitor.poll(0):
            has_events = True
            self._note_event(zmq.Event(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]), clock)
        return has_events

    def check(self, clock: float, heartbeat: float | None) -> None:
        """Note the state of the connection, after :meth:`read_events`."""
        if (not self.wanted or self._retry_for is not None) and not self.end_reason and self.is_given_up:
            self.end_reason = f"cannot be reached ({self.refused})"
        if self.end_reason or not self.joined:
            return
        if self._ended is not None:
            # What it sent before may still be on its way from ZeroMQ, on a connection of its own. So it takes
            # some looks: after a pause of this process ZeroMQ is as far behind as this thread.
            passed = min(clock - self._last_check, _ENDED_TICK)
            self._since_end += passed
            is_heard = self.received_at >= self._last_check or self._may_be_heard(heartbeat)
            self._ended = 0.0 if is_heard else self._ended + passed
            if self.reconnects:
                # What it sends goes over a connection of its own, which may be as good as ever.
                if self._ended > ENDED_SECONDS or self._since_end > _LONGEST_END:
                    self.broken = _BROKEN
            elif self._ended > ENDED_SECONDS:
                self.end_reason = _BROKEN
        elif heartbeat is not None and clock - self.received_at > heartbeat:
            self.end_reason = (
                f"died or is cut off (nothing has been heard of it for {clock - self.received_at:.1f} s)"
            )
        self._last_check = clock

    def _may_be_heard(self, heartbeat: float | None) -> bool:
        """Return whether more may come of what the other rank sent before it ended this rank's connection.

        The network delays each of the two connections by itself: the end of one tells nothing of the other.
        """
        waits = not self.reconnects and self._since_end < (heartbeat or _LONGEST_END)
        return waits and self._incoming is not None and not self._incoming.has_ended

    def _note_event(self, event: zmq.Event, clock: float) -> None:
        self._is_answered = True
        if event == zmq.EVENT_CONNECTED:
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.joined, self.received_at = True, clock
            self._number += 1
            self._controls.appendleft(control_frames.numbered(control_frames.HELLO, self._number))
            if self.hello_received:
                self.queue_control(control_frames.numbered(control_frames.HELLO_ACK, self._others_number))
        elif self.joined and not self.hello_acked and event in _HANDSHAKE_FAILED:
            # With too many strangers, before it knew who this is. What was said can be repeated.
            self.joined, self.refused = False, _FAILED[event]
            self._controls.clear()
        elif self.joined:
            if self._ended is None:
                self._ended = 0.0
        elif not self.refused:
            self.refused = _FAILED.get(event, str(event))

    def close(self, linger: int) -> None:
        """End the connection; ``linger``: for how many milliseconds ZeroMQ may still send."""
        with self._lock:
            self._queue.clear()
            self._controls.clear()
            self._unconfirmed.clear()
            self._frames = self._frame = None
            self.hello_acked = False
            self._close_socket(linger)

    def _close_socket(self, linger: int) -> None:
        if self.socket is None:
            return
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.monitor = None
        self.socket.close(linger)
        self.socket = None
