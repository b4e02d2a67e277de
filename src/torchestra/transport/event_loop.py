"""The thread of a transport: receives, sends what callers could not, and looks after the connections.

The thread never waits for a connection or for a callback, so large messages in both directions do not block
each other. An error with one rank (invalid frames, an exception in here) ends the connection to that rank
only. Time in which this process itself was stopped does not count.

*Receiving.* The thread receives, unless another thread that waits for a short message does so itself
(:meth:`EventLoop.receive_for`), which saves a switch of threads. Only the holder of the lock ``_receiving``
uses the inbox. The transport's thread sleeps on the inbox's descriptor by way of an epoll set, from which the
other thread removes it meanwhile, so that a frame wakes only one of them. The other thread handles only its
own message, and leaves any other frame in the inbox for the transport's thread.

*Many peers.* What happens on a connection wakes the thread, which then looks at that one, and at all only
once in a tick: to look at all at each event would cost the cube of a job's ranks while they meet.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import zmq

from torchestra.system.limits import start_thread
from torchestra.system.try_lock import TryLock
from torchestra.transport.connection_events import ConnectionEvents
from torchestra.transport.control_frames import ASK_TO_CONFIRM, CONTROL_BYTES, GOODBYE
from torchestra.transport.endpoint import EndpointRecord, ZapAuthenticator
from torchestra.transport.framing import whole_text
from torchestra.transport.inbox import Inbox
from torchestra.transport.listener import Listener
from torchestra.transport.message import Handlers
from torchestra.transport.pair import PairConnection
from torchestra.transport.sockets import incoming_socket, outgoing_socket
from torchestra.transport.source_port import Identity, source_ports

TICK, _IDLE_TICK = 0.05, 0.2
_ROOM_TICK = 0.002
_LONGEST_TICK = 0.5
LINGER_SECONDS = 2.0
_FRAMES_AT_ONCE = 256
_MAX_EXPECTED_AT_ONCE = 64
"""How many ranks that may connect at any time can be in their handshakes at once, besides strangers."""

_log = logging.getLogger(__name__)


class EventLoop:
    """The sockets and connections of a transport, and the thread that serves them.

    Args:
        handlers: the functions that the thread calls.
        grows: see :class:`~torchestra.transport.transport.Transport`.

    Attributes:
        peers: the connections by rank, made or not; replaced as a whole, as other threads iterate over it.
        unsent: connections with something that callers could not send.
        closing: whether the thread ends, or has ended.
        linger_s: how many seconds after the goodbye messages are kept for peers that do not take them.

    Raises:
        DistNetworkError: it cannot listen there.
    """

    def __init__(
        self,
        name: str,
        address: str,
        ports: tuple[int, int] | None,
        heartbeat: float | None,
        handlers: Handlers,
        *,
        grows: bool = False,
    ) -> None:
        self._name = name
        self._grows = grows
        self._heartbeat, self._handlers = heartbeat, handlers
        self._endpoints: dict[int, EndpointRecord] = {}
        self.peers: dict[int, PairConnection] = {}
        self._senders: dict[str, tuple[PairConnection, int]] = {}
        self.unsent: deque[PairConnection] = deque()
        self._reported_lost: set[int] = set()
        self._clock = 0.0
        self._last_check = time.monotonic()
        self._tick = TICK
        self.closing = False
        self._released = False
        self._wake_pending = False
        # Nothing may be written to a closed descriptor; and a finaliser may interrupt a caller in here.
        self._lock = threading.RLock()
        self.linger_s = LINGER_SECONDS
        self._thread: threading.Thread | None = None
        self._listener: Listener | None = None
        self._identity: Identity | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._receiving = TryLock()
        self._missed_input = False  # the thread could not receive, as another one did
        self._sleeps_on_input = True  # False: another one does, or an interrupt came while it did
        try:
            self._context.set(zmq.MAX_SOCKETS, 65536)
            self._identity = Identity(is_ipv6=":" in address, not_from=ports)
            self.authenticator = ZapAuthenticator(self._context)
            self._socket = incoming_socket(self._context, address, self._identity.private)
            self._listener = listener = Listener(self._socket, address, ports)
            self.endpoint = EndpointRecord(listener.endpoint, self._identity.public)
            self._inbox, self._descriptor = Inbox(self._socket), self._socket.fileno()
            self._arrival = select.poll()  # for other threads
            self._arrival.register(self._descriptor, select.POLLIN)
            self._arrivals = select.epoll()  # for the thread
            self._arrivals.register(self._descriptor, select.EPOLLIN)
            self._poller = zmq.Poller()
            self._events = ConnectionEvents(self._poller)
        except BaseException:
            self._release()
            raise

    # -- every thread

    def expect(self, endpoints: Mapping[int, EndpointRecord], *, connect: bool) -> bool:
        """Admit ranks, and start the thread; return False if the loop has been closed."""
        with self._lock:
            if self.closing:
                return False
            new = {rank: each for rank, each in endpoints.items() if rank not in self._endpoints}
            self._endpoints |= new
            self._admit_endpoints()
            if connect:
                self.want(new)
            if self._thread is None:
                assert self._listener is not None
                self._listener.open(self._expected())
                name = f"transport of {self._name}"
                self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
                start_thread(self._thread)
        self.wake()
        return True

    def want(self, ranks: Iterable[int]) -> None:
        """Have the thread connect to ranks that are known; the caller wakes it."""
        for rank in ranks:
            peer = self.peer(rank)
            peer.wanted = True
            self.unsent.append(peer)

    def forget(self, rank: int, how: str) -> None:
        """Admit a rank no more, and take nothing that still comes from it."""
        with self._lock:
            if self.closing:
                return  # it may have come after that, and not have been admitted
            peer = self.peer(rank)
            peer.end_reason = peer.end_reason or how
            self._endpoints.pop(rank, None)
            self._admit_endpoints()
        self.wake()

    def _admit_endpoints(self) -> None:
        assert self._listener is not None
        self.authenticator.ranks = {each.key: rank for rank, each in self._endpoints.items()}
        self._listener.known_ports = frozenset(
            port for each in self._endpoints.values() for port in source_ports(each.key)
        )

    def peer(self, rank: int) -> PairConnection:
        """Return the connection to a rank, which may not be made yet."""
        if (peer := self.peers.get(rank)) is None:
            with self._lock:
                if (peer := self.peers.get(rank)) is None:
                    reconnects = self._handlers.broken is not None
                    again_for = self._heartbeat if self._grows else None
                    peer = PairConnection(rank, self._endpoints[rank], reconnects, again_for)
                    self.peers = {**self.peers, rank: peer}
        return peer

    def send(self, to: PairConnection) -> None:
        """Send what is queued for a rank now, or have the thread send it."""
        if not to.try_flush():
            self.unsent.append(to)
            self.wake()

    def receive_for(self, take: Callable[[int, int, int, bytes], bool], timeout_s: float) -> bool:
        """Receive on the calling thread until a message comes that it waits for.

        Args:
            take: called with the source, kind, tag and text of a message that is one whole frame; deals with
                it and returns True, or returns False. If an interrupt stops it, it gets the message again.
            timeout_s: for how long to wait, in seconds.

        Returns:
            False if something else came, which the thread of the transport deals with now, or if another
            thread receives.
        """
        claim, lock, is_left = object(), self._receiving, True
        deadline = time.monotonic() + timeout_s
        try:
            if self._missed_input or self.closing or not lock.take(claim):
                is_left = False
                return False
            self._sleeps_on_input = False
            self._arrivals.modify(self._descriptor, 0)
            while not self.closing and (remaining := deadline - time.monotonic()) > 0:
                if not self._inbox.receive():
                    self._arrival.poll(1000 * remaining)
                elif not self._take(take):
                    return False
                else:
                    # Only after the socket was empty does its descriptor signal the next frame.
                    is_left = self._inbox.receive()
                    return True
            is_left = False
            return not self.closing
        finally:
            # Should an interrupt come here, the thread looks by itself after a tick.
            try:
                if lock.holder is claim:
                    self._sleep_on_input()
            finally:
                if lock.holder is claim:
                    del lock.holder
            if is_left:
                self.wake()

    def _sleep_on_input(self) -> None:
        """Let what comes wake the transport's thread again."""
        self._arrivals.modify(self._descriptor, select.EPOLLIN)
        self._sleeps_on_input = True

    def _take(self, take: Callable[[int, int, int, bytes], bool]) -> bool:
        """Deal with a frame if it is what the calling thread waits for; return whether it is."""
        inbox = self._inbox
        frame = inbox.frame
        peer, accepted = self._senders.get(inbox.sender, (None, 0))
        if peer is None or peer.end_reason or accepted != peer.accepted or peer.assembler.under_way:
            return False
        message = whole_text(frame)
        if message is None or message.sequence <= peer.received:
            return False
        if not take(peer.rank, message.kind, message.tag, message.text):
            return False
        peer.received_at = self._clock
        peer.note_received(message.sequence, len(message.text))
        inbox.release()
        if peer.has_output:
            self.unsent.append(peer)
            self.wake()
        return True

    def ask_to_confirm(self, peer: PairConnection) -> None:
        """Ask a rank to confirm now which messages it has received."""
        if peer.hello_acked:
            peer.queue_control(ASK_TO_CONFIRM)
            self.unsent.append(peer)
            self.wake()

    def lost(self) -> dict[int, str]:
        """Return how each rank ended that is gone, and all of whose messages have come."""
        return {rank: peer.end_reason for rank, peer in self.peers.items() if peer.end_reason}

    def wake(self) -> None:
        """Make the thread look for work."""
        if not self._wake_pending:
            with self._lock:
                if not self._released:
                    self._wake_pending = True
                    os.eventfd_write(self._wake, 1)

    def close(self, linger_s: float, wait: float) -> None:
        """End the thread after a goodbye to all; wait for it at most ``wait`` seconds."""
        if self._released:
            return
        self.linger_s = linger_s
        with self._lock:
            self.closing = True
            if self._thread is None:
                self._release()
                return
        if self._thread is not threading.current_thread():
            self.wake()
            self._thread.join(wait)

    def _expected(self) -> int:
        """Return how many ranks may still connect now; at least one if any may reconnect."""
        peers = self.peers.values()
        now = sum(peer.wanted and not (peer.hello_received or peer.end_reason) for peer in peers)
        later = (
            len(self._endpoints) - now - sum(bool(peer.hello_received or peer.end_reason) for peer in peers)
        )
        return max(self._grows or self._handlers.broken is not None, now + min(later, _MAX_EXPECTED_AT_ONCE))

    # -- the thread

    def _serve(self) -> None:
        try:
            self._exchange()
            self._say_goodbye()
        except BaseException as error:
            _log.exception("the connections of %s end after an error", self._name)
            for peer in self.peers.values():
                peer.end_reason = (
                    peer.end_reason or f"cannot be reached any more ({type(error).__name__}: {error})"
                )
            self._report_lost()
        finally:
            self.closing = True
            self._release()

    def _exchange(self) -> None:
        listener = self._listener
        assert listener is not None
        for source in (self._wake, self._arrivals.fileno(), self.authenticator.socket, listener.monitor):
            self._poller.register(source, zmq.POLLIN)
        last_check, is_more = -math.inf, True
        while not self.closing:
            pause = 0.0 if is_more or self.unsent else self._tick
            ready = dict(self._poller.poll(round(1000 * pause)))
            # Even if nothing woke the thread: an interrupted caller may have set this without a wake-up.
            self._wake_pending = False
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for peer in self._events.changed(ready):
                self._guarded(peer, self._read_events, peer)
            is_more, gone = self._receive(listener)
            for peer in self._to_flush(ready):
                self._flush(peer)
            if self.authenticator.socket in ready:
                self.authenticator.answer(listener.hold)
            is_time = gone or time.monotonic() - last_check >= self._tick
            if (is_time or listener.monitor in ready) and not listener.is_shut:
                listener.check(self._expected())
                if listener.is_shut:
                    self._poller.unregister(listener.monitor)
            if is_time:
                self._check_peers()
                last_check = time.monotonic()

    def _to_flush(self, ready: Mapping[Any, int]) -> set[PairConnection]:
        """Return the connections that may have something to send."""
        peers = set(self._events.with_room(ready))
        while self.unsent:
            peer = self.unsent.popleft()
            if not self._events.is_awaiting_room(peer):
                peers.add(peer)
        return peers

    def _read_events(self, peer: PairConnection) -> None:
        """Act on what has happened on the connection to a rank."""
        if peer.read_events(self._clock):
            self.unsent.append(peer)  # there may be a hello to send
            if peer.is_ending:
                self._tick = TICK

    def _flush(self, peer: PairConnection) -> None:
        """Send what ZeroMQ takes."""
        if peer.end_reason:
            return
        if peer.is_wanted:
            self._connect(peer)
            return
        self._guarded(peer, peer.flush, self._clock)
        self._events.note_room(peer)

    def _connect(self, peer: PairConnection) -> None:
        identity = self._identity
        assert identity is not None
        socket = outgoing_socket(self._context, peer.endpoint, identity.public, identity.private)
        self._events.end(peer)
        self._guarded(peer, peer.connect, socket, identity.ports)
        self._events.begin(peer)
        self._tick = TICK

    def _guarded(self, peer: PairConnection, action: Callable[..., None], *args: object) -> None:
        """Call ``action`` for a rank; an error ends the connection to that rank, and no other."""
        try:
            action(*args)
        except ValueError as error:
            peer.end_reason = f"speaks another version of the protocol than this rank ({error})"
        except Exception as error:
            _log.exception("the connection of %s to rank %d ends after an error", self._name, peer.rank)
            peer.end_reason = f"cannot be reached any more ({type(error).__name__}: {error})"

    def _receive(self, listener: Listener) -> tuple[bool, bool]:
        """Handle the frames that came; return whether there may be more, and whether one ended a rank."""
        gone, claim = False, object()
        self._missed_input = not self._receiving.take(claim)
        if self._missed_input:
            return False, False
        try:
            if not self._sleeps_on_input:  # an interrupted caller may have left it so
                self._sleep_on_input()
            for _ in range(_FRAMES_AT_ONCE):
                if not self._inbox.receive():
                    return False, gone
                gone |= self._handle_frame(listener)
                self._inbox.release()
        finally:
            del self._receiving.holder
        return True, gone

    def _handle_frame(self, listener: Listener) -> bool:
        """Handle a frame; return whether its sender is gone after it."""
        peer, accepted = self._sender(self._inbox.sender)
        if peer.end_reason or accepted < peer.accepted:
            return False
        if accepted > peer.accepted:
            # An answer to the hello of a connection that has ended would have the peer take that for good.
            if (incoming := listener.prove(self._inbox.descriptor, accepted)) is None:
                return False
            peer.accept(accepted, incoming)
        peer.received_at = self._clock
        self._guarded(peer, self._handle_data, peer, self._inbox.frame)
        return bool(peer.end_reason)

    def _sender(self, user: str) -> tuple[PairConnection, int]:
        """Return the connection that a frame came over, and its number, as the authenticator named it."""
        sender = self._senders.get(user)
        if sender is None:
            rank, _, accepted = user.partition(" ")
            sender = self._senders[user] = self.peer(int(rank)), int(accepted)
        return sender

    def _handle_data(self, peer: PairConnection, frame: memoryview) -> None:
        if not peer.assembler.under_way and len(frame) <= CONTROL_BYTES:
            if peer.handle_control(bytes(frame)):
                self.unsent.append(peer)
            return
        message = peer.assembler.feed(frame)
        if message is not None:
            if peer.note_received(peer.assembler.sequence, message.nbytes):
                self._handlers.arrived(message)
            if peer.has_output:
                self.unsent.append(peer)

    def _check_peers(self) -> None:
        now = time.monotonic()
        self._clock += min(_LONGEST_TICK, now - self._last_check)
        self._last_check = now
        is_busy = self._heartbeat is not None
        for peer in self.peers.values():
            if peer.is_wanted:
                self._connect(peer)
            if peer.socket is None:
                continue
            self._guarded(peer, self._read_events, peer)
            self._guarded(peer, peer.check, self._clock, self._heartbeat)
            if peer.broken and not peer.end_reason and self._handlers.broken is not None:
                how = peer.broken
                self._guarded(peer, peer.break_off)
                self._handlers.broken(peer.rank, how)
            if peer.end_reason:
                self._events.end(peer)
                peer.close(linger=0)
            elif peer.is_to_connect_again(now):
                self._connect(peer)
            elif peer.joined and self._heartbeat and self._clock - peer.sent_at > self._heartbeat / 4:
                peer.show_life(self._clock)
            is_busy |= peer.is_ending or peer.is_meeting
        self._tick = TICK if is_busy else _IDLE_TICK
        self._report_lost()

    def _report_lost(self) -> None:
        for rank, how in self.lost().items():
            if rank not in self._reported_lost:
                self._reported_lost.add(rank)
                self._handlers.lost(rank, how)

    def _say_goodbye(self) -> None:
        """Send the remaining messages and a goodbye to all ranks that take them."""
        there = [peer for peer in self.peers.values() if peer.hello_acked and not peer.end_reason]
        for peer in there:
            peer.queue_control(GOODBYE)
        deadline = time.monotonic() + self.linger_s
        while any(peer.has_output and not peer.end_reason for peer in there):
            for peer in there:
                if not peer.end_reason:
                    self._guarded(peer, peer.flush, self._clock)
            if time.monotonic() > deadline:
                break
            time.sleep(_ROOM_TICK)

    def _release(self) -> None:
        claim = object()
        while not self._receiving.take(claim):  # the holder sees that this end is closing
            time.sleep(_ROOM_TICK)
        for peer in self.peers.values():
            peer.close(linger=int(1000 * self.linger_s))
        if self._listener is not None:
            self._listener.close()
        self._context.destroy()
        if self._identity is not None:
            self._identity.close()
        with self._lock:
            self._released = True
            os.close(self._wake)
