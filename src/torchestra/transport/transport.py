"""The connections of one rank to those on other hosts, and the one thread that uses them.

A rank listens at one port, where it only receives (PULL), and has a connection of its own to each of the
others, where it only sends (PUSH). ZeroMQ's sockets are for one thread: callers leave messages in queues and
rouse it, and it hands on what has come. It never waits for a connection or for anybody's function, so large
messages in both directions do not stop each other, and an interrupted caller leaves nothing halfway.

*Who lives.* A connection that has ended is the end of that rank here, and never made again: what was on its
way over it is lost, and nothing is to be lost in silence. A rank that says goodbye has shut down. And each
lets the others hear of it now and then, where that is wanted, so one is missed whose host is gone without a
word. Time in which this process itself was stopped does not count.

*What goes wrong with one rank* (frames that make no sense, whatever an error in here is about) ends that
rank, and nothing between this one and the others.

*Strangers.* The port is open only until all others are connected: nobody else has any business there. Until
then whoever connects has some seconds to prove his key, and there are never many of them (listener.py). A
rank whose connection is lost among them comes again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from torchestra.errors import DistNetworkError
from torchestra.system.deadline import RunningClock
from torchestra.transport.endpoint import ZAP_DOMAIN, EndpointRecord, ZapAuthenticator
from torchestra.transport.framing import LARGEST_FRAME
from torchestra.transport.listener import HANDSHAKE_SECONDS, Listener
from torchestra.transport.message import Message
from torchestra.transport.pair import (
    ENDED_SECONDS,
    FRAMES_IN_ADVANCE,
    GOODBYE,
    HELLO,
    WELCOME,
    PairConnection,
)

__all__ = ["Transport"]

_TICK, _IDLE_TICK = 0.05, 0.2
_MEETING_TICK = 0.002
_LONGEST_TICK = 0.5
_FLUSH_SECONDS = 2.0
_JOIN_SECONDS = 5.0
_AGAIN_SECONDS = 0.25
_FRAMES_AT_ONCE = 256

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

    Both are called by the thread of the connections.

    Attributes:
        card: how this rank is reached.

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
    ) -> None:
        self._owner = os.getpid()
        self._name = name
        self._heartbeat, self._grace = heartbeat, grace
        self._arrived, self._lost = arrived, lost
        self._advice = advice
        self._peers: dict[int, PairConnection] = {}
        self._told_lost: set[int] = set()
        self._clock = 0.0
        self._running_clock = RunningClock(_LONGEST_TICK)
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
            self._inbox = self._context.socket(zmq.PULL)
            inbox = self._inbox
            inbox.linger = 0
            inbox.rcvhwm = FRAMES_IN_ADVANCE
            inbox.maxmsgsize = LARGEST_FRAME
            inbox.handshake_ivl = HANDSHAKE_SECONDS * 1000
            inbox.ipv6 = ":" in address
            inbox.zap_domain = ZAP_DOMAIN
            inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
            inbox.curve_server = True
            inbox.curve_secretkey = self._private
            self._listener = listener = Listener(inbox, address, ports)
            self.card = EndpointRecord(listener.endpoint, self._public)
        except BaseException:
            self._release()
            raise

    # -- every thread

    def join(self, cards: Mapping[int, EndpointRecord], names: Mapping[int, str], seconds: float) -> None:
        """Connect to the others; returns when all have let this rank in. They all must call it.

        Args:
            cards: of the ranks on other hosts.
            names: what to call them in messages.
            seconds: how long that may take.

        Raises:
            DistNetworkError: one of them does not answer, or does not let this rank in.
        """
        with self._gate:
            if self._closing:
                raise DistNetworkError("this end was closed")
            self._begin(cards)
        deadline = time.monotonic() + seconds
        self._await("joined", names, cards, deadline)
        for peer in self._peers.values():
            peer.say(HELLO)
        self._rouse()
        self._await("greeted", names, cards, deadline)
        self._await("settled", names, cards, deadline)

    def _begin(self, cards: Mapping[int, EndpointRecord]) -> None:
        assert self._listener is not None
        self._listener.open(len(cards))
        self._door.ranks = {card.key: rank for rank, card in cards.items()}
        for rank, card in cards.items():
            self._peers[rank] = PairConnection(rank, self._socket_to(card), card)
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"wire of {self._name}")
        self._thread.start()

    def _await(
        self, state: str, names: Mapping[int, str], cards: Mapping[int, EndpointRecord], deadline: float
    ) -> None:
        """Wait until all peers are ``joined``, ``greeted`` or ``settled``."""
        while waiting := [peer for peer in self._peers.values() if not getattr(peer, state)]:
            if self._closing:
                raise DistNetworkError("this end was closed")
            late = "no answer in time" if time.monotonic() > deadline else ""
            for peer in waiting:
                if why := peer.how or late or (peer.is_given_up and peer.refused):
                    raise self._unreachable(names[peer.rank], cards[peer.rank], why)
            time.sleep(_MEETING_TICK)

    def _unreachable(self, name: str, card: EndpointRecord, why: str) -> DistNetworkError:
        return DistNetworkError(
            f"{self._name} cannot reach {name}, which is on another host, at {card.address}: {why}. Can this"
            f" host connect to that address and port? {self._advice}"
        )

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
            done: called by the thread of the connections when the parts may be changed.
        """
        to = self._peers[peer]
        if to.how or self._closing:
            return
        to.post(kind, tag, parts, keep, done)
        self._rouse()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has been called, or the thread has ended."""
        return self._closing

    @property
    def strangers(self) -> int:
        """How many wanted in with a key that is on no card."""
        return self._door.refused

    def lost(self) -> dict[int, str]:
        """Which ranks are gone, all that they had sent having come, and what has become of them."""
        return {rank: peer.how for rank, peer in self._peers.items() if peer.how}

    def close(self, patience: float = _FLUSH_SECONDS, wait: float = _JOIN_SECONDS) -> None:
        """Say goodbye to the others and end all connections. What has been sent still arrives.

        Args:
            patience: for so many seconds at most while they do not take what is for them.
            wait: for how long to wait for that; the rest is done by the thread of the connections.
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

    def _socket_to(self, card: EndpointRecord) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(zmq.PUSH)
        socket.sndhwm = FRAMES_IN_ADVANCE
        socket.reconnect_ivl = -1
        socket.linger = 0
        socket.ipv6 = card.address.startswith("tcp://[")
        socket.handshake_ivl = HANDSHAKE_SECONDS * 1000
        socket.curve_serverkey = card.key
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._private
        return socket

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
        poller, listener = self._poller(), self._listener
        assert listener is not None
        blocked: set[int] = set()
        next_look = 0.0
        while not self._closing:
            meeting = not all(peer.greeted and peer.settled for peer in self._peers.values())
            watches = self._heartbeat is not None or any(peer.is_ending for peer in self._peers.values())
            tick = _TICK if watches else _IDLE_TICK
            ready = dict(poller.poll(round(1000 * (_MEETING_TICK if meeting else tick))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._roused = False
            for peer in self._peers.values():
                if peer.has_mail and (not peer.blocked or peer.socket in ready) and not peer.how:
                    self._guarded(peer, peer.flush, self._clock)
                if peer.blocked != (peer.rank in blocked):
                    self._watch(poller, peer, blocked)
            if self._door.socket in ready:
                self._door.answer()
            if self._inbox in ready and self._receive(listener):
                next_look = 0.0
            listener.look(sum(not peer.greeted for peer in self._peers.values()))
            if meeting or time.monotonic() >= next_look:
                self._look(poller, blocked)
                next_look = time.monotonic() + tick

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for source in (self._wake, self._inbox, self._door.socket):
            poller.register(source, zmq.POLLIN)
        return poller

    def _watch(self, poller: zmq.Poller, peer: PairConnection, blocked: set[int]) -> None:
        """Look out for room in a connection that has none, and only in such."""
        if peer.blocked:
            poller.register(peer.socket, zmq.POLLOUT)
            blocked.add(peer.rank)
        else:
            poller.unregister(peer.socket)
            blocked.discard(peer.rank)

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
            peer = self._peers[int(frame.get("User-Id"))]  # the doorkeeper's word, not the sender's
            if peer.how:
                continue
            peer.heard = self._clock
            if not peer.greeted:
                listener.prove(int(frame.get("__fd")))
            self._guarded(peer, self._hear, peer, frame)
            gone |= bool(peer.how)
        return gone

    def _hear(self, peer: PairConnection, frame: zmq.Frame) -> None:
        if not peer.assembly.under_way and len(frame) <= len(WELCOME):
            control = frame.bytes
            if control == HELLO:
                peer.greeted = True
                peer.say(WELCOME)
                peer.flush(self._clock)
            elif control == WELCOME:
                peer.settled = True
            elif control == GOODBYE:
                peer.how = "has shut down"
            return
        message = peer.assembly.feed(frame.buffer)
        if message is not None:
            self._arrived(message)

    def _look(self, poller: zmq.Poller, blocked: set[int]) -> None:
        now = time.monotonic()
        self._clock = self._running_clock.elapsed()
        for peer in self._peers.values():
            if peer.socket.closed:
                continue
            self._guarded(peer, peer.look, self._clock, self._heartbeat, self._grace)
            again = bool(peer.refused) and now - peer.began > _AGAIN_SECONDS and not peer.is_given_up
            if (peer.how or again) and peer.rank in blocked:
                poller.unregister(peer.socket)
                blocked.discard(peer.rank)
            if peer.how:
                peer.close(linger=0)
            elif again:
                self._guarded(peer, peer.connect, self._socket_to(peer.card))
            elif peer.joined and self._heartbeat and self._clock - peer.told > self._heartbeat / 4:
                peer.show_life(self._clock)
        self._tell_lost()

    def _tell_lost(self) -> None:
        for rank, how in self.lost().items():
            if rank not in self._told_lost:
                self._told_lost.add(rank)
                self._lost(rank, how)

    def _say_goodbye(self) -> None:
        """Let all hear the rest and the goodbye, as far as they listen."""
        there = [peer for peer in self._peers.values() if peer.joined and not peer.how]
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
