"""The connections of one rank to those on other hosts, and the one thread that looks after them.

A rank listens at one port, where it only receives (PULL), and has a connection of its own to each of the
others, where it only sends (PUSH). Callers leave messages in queues (pair.py); short ones they send on their
own thread if they can. The transport's thread sends the rest, and hands on what has come. It never waits for
a connection or for anybody's function, so large messages in both directions do not stop each other, and an
interrupted caller leaves nothing halfway.

*Who is connected.* :meth:`Transport.join` connects ranks that all need each other, and returns when all have
met. Ranks that :meth:`Transport.expect` has made known are connected when one of the two first sends the
other something.

*Who lives.* A connection that has ended is the end of that rank here, and what was on its way over it is
lost; nothing is to be lost in silence. Where the owner knows from elsewhere who lives, it asks for another
connection to be made instead (``broken``), and reliable messages go again over that. A rank that says goodbye
has shut down. And each lets the others hear of it now and then, where that is wanted, so one is missed whose
host is gone without a word. Time in which this process itself was stopped does not count.

*What goes wrong with one rank* (frames that make no sense, an error in here) ends that rank, and nothing
else.

*Strangers.* Nobody gets a message through without a key of one of the ranks that are expected (endpoint.py).
The port is open only until all of these are connected, for those that connect when they like as long as the
transport is. While it is, whoever connects has some seconds to prove his key, and there are never many of
them (listener.py). A rank whose connection is lost among them comes again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from torchestra.errors import DistNetworkError
from torchestra.transport.endpoint import EndpointRecord, ZapAuthenticator
from torchestra.transport.listener import Listener
from torchestra.transport.message import Message
from torchestra.transport.pair import (
    ASK_TO_CONFIRM,
    CONFIRM,
    CONTROL_BYTES,
    ENDED_SECONDS,
    GOODBYE,
    HELLO,
    WELCOME,
    PairConnection,
)
from torchestra.transport.sockets import await_confirmed, await_met, incoming_socket, outgoing_socket

__all__ = ["Transport"]

_TICK, _IDLE_TICK = 0.05, 0.2
_MEETING_TICK = 0.002
_LONGEST_TICK = 0.5
_FLUSH_SECONDS = 2.0
_JOIN_SECONDS = 5.0
_AGAIN_SECONDS = 0.25
_FRAMES_AT_ONCE = 256
_MOST_EXPECTED_AT_ONCE = 64
"""Of ranks that connect when they like: how many may be in their handshakes, besides strangers."""

_log = logging.getLogger(__name__)


class Transport:
    """Connections to ranks on other hosts.

    Args:
        name: of this rank, for messages; its thread is named after it.
        address: of this host's interface to listen at.
        ports: the first and the last that may be used, or None for any.
        heartbeat: after how many seconds of silence a rank is given up; None where others see to that.
        arrived: called with each message that comes. It must not wait for anything that another message may
            bring.
        lost: called with each rank that is gone, all that it had sent having come, and what has become of it.
        advice: what to do where one cannot be reached, for messages.
        grace: for how long after a rank has ended its connection without a goodbye what it has sent before
            may still come: that comes over another connection, which a bad link may have delayed.
        broken: called with a rank whose connection has ended without a goodbye, and how; then another one is
            made.
            Default: the rank is lost.

    All three are called by the thread of the transport.

    Attributes:
        endpoint: how this rank is reached.

    Raises:
        DistNetworkError: it cannot listen there.
    """

    def __init__(
        self,
        name: str,
        address: str,
        ports: tuple[int, int] | None,
        heartbeat: float | None,
        arrived: Callable[[Message], None],
        lost: Callable[[int, str], None] = lambda rank, how: None,
        advice: str = "",
        grace: float = ENDED_SECONDS,
        broken: Callable[[int, str], None] | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._name = name
        self._heartbeat, self._grace = heartbeat, grace
        self._arrived, self._lost, self._broken = arrived, lost, broken
        self._advice = advice
        self._endpoints: dict[int, EndpointRecord] = {}
        self._peers: dict[int, PairConnection] = {}
        self._senders: dict[str, tuple[PairConnection, int]] = {}
        self._unsent: deque[PairConnection] = deque()  # what callers could not send
        self._reported_lost: set[int] = set()
        self._clock = 0.0
        self._looked = time.monotonic()
        self._closing = False
        self._released = False
        self._roused = False
        # Nothing may be written to a closed descriptor; and a finaliser may interrupt a caller in here.
        self._gate = threading.RLock()
        self._patience = _FLUSH_SECONDS
        self._thread: threading.Thread | None = None
        self._listener: Listener | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._context.set(zmq.MAX_SOCKETS, 65536)
            self._public, self._private = zmq.curve_keypair()
            self._door = ZapAuthenticator(self._context)
            self._inbox = inbox = incoming_socket(self._context, address, self._private)
            self._listener = listener = Listener(inbox, address, ports)
            self.endpoint = EndpointRecord(listener.endpoint, self._public)
        except BaseException:
            self._release()
            raise

    # -- every thread

    def join(
        self, endpoints: Mapping[int, EndpointRecord], names: Mapping[int, str], timeout_s: float
    ) -> None:
        """Connect to the others; returns when all have let this rank in. They all must call it.

        Args:
            endpoints: of the ranks on other hosts.
            names: what to call them in messages.
            timeout_s: how long that may take.

        Raises:
            DistNetworkError: one of them does not answer, or does not let this rank in.
        """
        self.expect(endpoints, connect=True)
        peers = [self._peers[rank] for rank in endpoints]
        await_met(peers, self._name, names, timeout_s, lambda: self._closing, self._advice)

    def expect(self, endpoints: Mapping[int, EndpointRecord], *, connect: bool = False) -> None:
        """Let ranks in, and be able to send to them; those that are known already are left as they are.

        Args:
            endpoints: of ranks on other hosts.
            connect: whether to connect to them now, not when there is something to send.

        Raises:
            DistNetworkError: this end was closed.
        """
        with self._gate:
            if self._closing:
                raise DistNetworkError("this end was closed")
            new = {rank: each for rank, each in endpoints.items() if rank not in self._endpoints}
            self._endpoints |= new
            self._door.ranks = {each.key: rank for rank, each in self._endpoints.items()}
            if connect:
                for rank in new:
                    self._peer(rank).wanted = True
            if self._thread is None:
                assert self._listener is not None
                self._listener.open(self._expected())
                self._thread = threading.Thread(
                    target=self._serve, daemon=True, name=f"transport of {self._name}"
                )
                self._thread.start()
        self._rouse()

    def _expected(self) -> int:
        """How many ranks may come now that have not; one at least if any may come again."""
        peers = self._peers.values()
        now = sum(peer.wanted and not (peer.greeted or peer.how) for peer in peers)
        later = len(self._endpoints) - now - sum(bool(peer.greeted or peer.how) for peer in peers)
        return max(self._broken is not None, now + min(later, _MOST_EXPECTED_AT_ONCE))

    def _peer(self, rank: int) -> PairConnection:
        """The connection to a rank, which may be not made yet."""
        peer = self._peers.get(rank)
        if peer is None:
            with self._gate:
                peer = self._peers.get(rank)
                if peer is None:
                    reconnects = self._broken is not None
                    peer = PairConnection(rank, self._endpoints[rank], reconnects=reconnects)
                    self._peers = {**self._peers, rank: peer}  # another thread may be going through them
        return peer

    def send(self, peer: int, kind: int, tag: int, parts: Sequence[tuple[int, int]], keep: object) -> None:
        """Send a message, see :meth:`~torchestra.engine.p2p.Endpoint.send`.

        Waits while 64 MB are under way to that rank.
        """
        self.post(peer, kind, tag, parts, keep)
        to = self._peers[peer]
        while to.is_full and not self._closing:
            to.await_room(_TICK)

    def post(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Sequence[tuple[int, int]],
        keep: object,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Begin to send a message; never waits. To a rank that is gone nothing is sent.

        Args:
            peer, kind, tag, parts, keep: see :meth:`send`.
            done: called when the parts may be changed, by the thread of the transport or before this returns.
        """
        to = self._peers.get(peer) or self._peer(peer)
        if not (to.how or self._closing):
            to.post(kind, tag, parts, keep, done)
            self._begin_to_send(to)

    def post_text(self, peer: int, kind: int, tag: int, text: bytes) -> None:
        """Begin to send a reliable message of one part; never waits.

        It arrives even if the connection breaks meanwhile, as long as both ranks live, see :meth:`flush`.
        """
        to = self._peers.get(peer) or self._peer(peer)
        if not (to.how or self._closing):
            to.post_text(kind, tag, text)
            self._begin_to_send(to)

    def _begin_to_send(self, to: PairConnection) -> None:
        if not to.try_flush():
            self._unsent.append(to)
            self._rouse()

    def flush(self, timeout_s: float, is_vain: Callable[[int], bool]) -> bool:
        """Wait until all reliable messages have come, so many seconds at most; whether they have.

        Args:
            timeout_s: how long to wait.
            is_vain: tells of a rank whether it will receive nothing more.
        """
        owed = [peer for peer in self._peers.values() if peer.is_owed]
        for peer in owed:
            peer.say(ASK_TO_CONFIRM)
            self._begin_to_send(peer)
        return await_confirmed(owed, timeout_s, lambda rank: self._closing or is_vain(rank))

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has been called, or the thread has ended."""
        return self._closing

    @property
    def strangers(self) -> int:
        """How many wanted in with a key of nobody that is expected."""
        return self._door.refused

    def lost(self) -> dict[int, str]:
        """Return which ranks are gone, all that they had sent having come, and what has become of them."""
        return {rank: peer.how for rank, peer in self._peers.items() if peer.how}

    def close(self, patience: float = _FLUSH_SECONDS, wait: float = _JOIN_SECONDS) -> None:
        """Say goodbye to the others and end all connections. What has been sent still arrives.

        Args:
            patience: for so many seconds at most while they do not take what is for them.
            wait: for how long to wait for that; the rest is done by the thread of the transport.
        """
        if os.getpid() != self._owner or self._released:
            return  # a forked child has the sockets of its parent, which it must not touch
        self._patience = patience
        with self._gate:
            self._closing = True
            if self._thread is None:
                self._release()
                return
        if self._thread is not threading.current_thread():
            self._rouse()
            self._thread.join(wait)

    def _rouse(self) -> None:
        if not self._roused:
            with self._gate:
                if not self._released:
                    self._roused = True
                    os.eventfd_write(self._wake, 1)

    # -- the thread

    def _serve(self) -> None:
        try:
            self._exchange()
            self._say_goodbye()
        except BaseException as error:
            _log.exception("the connections of %s end after an error", self._name)
            for peer in self._peers.values():
                peer.how = peer.how or f"cannot be reached any more ({type(error).__name__}: {error})"
            self._tell_lost()
        finally:
            self._closing = True
            self._release()

    def _exchange(self) -> None:
        listener = self._listener
        assert listener is not None
        poller = zmq.Poller()
        for source in (self._wake, self._inbox, self._door.socket, listener.monitor):
            poller.register(source, zmq.POLLIN)
        blocked: dict[Any, PairConnection] = {}  # by socket
        next_look = 0.0
        while not self._closing:
            meeting = any(peer.is_meeting for peer in self._peers.values())
            watches = self._heartbeat is not None or any(peer.is_ending for peer in self._peers.values())
            tick = _TICK if watches else _IDLE_TICK
            ready = dict(poller.poll(round(1000 * (_MEETING_TICK if meeting else tick))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._roused = False
            if self._inbox in ready and self._receive(listener):
                next_look = 0.0
            for peer in self._to_flush(ready, blocked, meeting=meeting):
                self._flush(peer, poller, blocked)
            if self._door.socket in ready:
                self._door.answer()
            is_time = meeting or time.monotonic() >= next_look
            if is_time or listener.monitor in ready:
                self._look_at_port(poller, listener)
            if is_time:
                self._look(poller, blocked)
                next_look = time.monotonic() + tick

    def _look_at_port(self, poller: zmq.Poller, listener: Listener) -> None:
        if not listener.is_shut:
            listener.look(self._expected())
            if listener.is_shut:
                poller.unregister(listener.monitor)

    def _to_flush(
        self, ready: Mapping[Any, int], blocked: Mapping[Any, PairConnection], *, meeting: bool
    ) -> set[PairConnection]:
        """The connections that there is something to send over."""
        peers = {peer for socket, peer in blocked.items() if socket in ready}
        while self._unsent:
            peer = self._unsent.popleft()
            if not peer.blocked or peer.socket not in blocked:
                peers.add(peer)
        if meeting:
            peers.update(
                peer for peer in self._peers.values() if peer.has_mail and peer.socket not in blocked
            )
        return peers

    def _flush(self, peer: PairConnection, poller: zmq.Poller, blocked: dict[Any, PairConnection]) -> None:
        """Send what ZeroMQ takes; look out for room in a connection that has none, and only in such."""
        if peer.how:
            return
        if peer.is_wanted:
            self._guarded(
                peer, peer.connect, outgoing_socket(self._context, peer.endpoint, self._public, self._private)
            )
            return
        self._guarded(peer, peer.flush, self._clock)
        socket = peer.socket
        if peer.blocked and socket not in blocked:
            poller.register(socket, zmq.POLLOUT)
            blocked[socket] = peer
        elif not peer.blocked and socket in blocked:
            poller.unregister(socket)
            del blocked[socket]

    def _guarded(self, peer: PairConnection, action: Callable[..., None], *args: object) -> None:
        """Do something for a rank; whatever goes wrong ends that rank here, and no other."""
        try:
            action(*args)
        except ValueError as error:
            peer.how = f"speaks another language than this rank ({error}): the versions differ"
        except Exception as error:
            _log.exception("the connection of %s to rank %d ends after an error", self._name, peer.rank)
            peer.how = f"cannot be reached any more ({type(error).__name__}: {error})"

    def _receive(self, listener: Listener) -> bool:
        """Hand on what has come; whether a rank has gone by it."""
        gone = False
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer, accepted = self._sender(frame)
            if peer.how or accepted < peer.accepted:
                continue
            peer.heard = self._clock
            if accepted > peer.accepted:
                listener.prove(int(frame.get("__fd")))
                peer.accept(accepted)
            self._guarded(peer, self._hear, peer, frame)
            gone |= bool(peer.how)
        return gone

    def _sender(self, frame: zmq.Frame) -> tuple[PairConnection, int]:
        """Whose connection a frame came over, and which one, in the authenticator's words."""
        user = str(frame.get("User-Id"))
        sender = self._senders.get(user)
        if sender is None:
            rank, _, accepted = user.partition(" ")
            sender = self._senders[user] = self._peer(int(rank)), int(accepted)
        return sender

    def _hear(self, peer: PairConnection, frame: zmq.Frame) -> None:
        if not peer.assembler.under_way and len(frame) <= CONTROL_BYTES:
            self._hear_control(peer, frame.bytes)
            return
        message = peer.assembler.feed(frame.buffer)
        if message is not None:
            if peer.note_received(peer.assembler.number, len(message.text)):
                self._arrived(message)
            if peer.has_mail:
                self._unsent.append(peer)

    def _hear_control(self, peer: PairConnection, control: bytes) -> None:
        if control == HELLO:
            peer.greeted = True
            peer.say(WELCOME)
        elif control == WELCOME:
            peer.settled = True
        elif control == GOODBYE:
            peer.how = "has shut down"
        elif control == ASK_TO_CONFIRM:
            peer.confirm()
        elif control.startswith(CONFIRM) and len(control) == CONTROL_BYTES:
            peer.note_confirmed(int.from_bytes(control[len(CONFIRM) :], "little"))
            return
        self._unsent.append(peer)

    def _look(self, poller: zmq.Poller, blocked: dict[Any, PairConnection]) -> None:
        now = time.monotonic()
        self._clock += min(_LONGEST_TICK, now - self._looked)
        self._looked = now
        for peer in self._peers.values():
            if peer.is_wanted:
                self._guarded(
                    peer,
                    peer.connect,
                    outgoing_socket(self._context, peer.endpoint, self._public, self._private),
                )
            if peer.socket is None:
                continue
            self._guarded(peer, peer.look, self._clock, self._heartbeat, self._grace)
            if peer.broken and not peer.how and self._broken is not None:
                how = peer.broken
                self._guarded(peer, peer.break_off)
                self._broken(peer.rank, how)
            again = bool(peer.refused) and now - peer.began > _AGAIN_SECONDS and not peer.is_given_up
            if (peer.how or again) and peer.socket in blocked:
                poller.unregister(peer.socket)
                del blocked[peer.socket]
            if peer.how:
                peer.close(linger=0)
            elif again:
                self._guarded(
                    peer,
                    peer.connect,
                    outgoing_socket(self._context, peer.endpoint, self._public, self._private),
                )
            elif peer.joined and self._heartbeat and self._clock - peer.told > self._heartbeat / 4:
                peer.show_life(self._clock)
        self._tell_lost()

    def _tell_lost(self) -> None:
        for rank, how in self.lost().items():
            if rank not in self._reported_lost:
                self._reported_lost.add(rank)
                self._lost(rank, how)

    def _say_goodbye(self) -> None:
        """Let all hear the rest and the goodbye, as far as they listen."""
        there = [peer for peer in self._peers.values() if peer.settled and not peer.how]
        for peer in there:
            peer.say(GOODBYE)
        deadline = time.monotonic() + self._patience
        while any(peer.has_mail and not peer.how for peer in there):
            for peer in there:
                if not peer.how:
                    self._guarded(peer, peer.flush, self._clock)
            if time.monotonic() > deadline:
                break
            time.sleep(_MEETING_TICK)

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.close(linger=int(1000 * self._patience))
        if self._listener is not None:
            self._listener.close()
        self._context.destroy()
        with self._gate:
            self._released = True
            os.close(self._wake)
