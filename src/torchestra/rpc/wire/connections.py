"""The connections of one worker to those on other hosts, and the one thread that uses them.

A worker listens at one port, where it only receives (PULL), and has a connection of its own to each of the
others, where it only sends (PUSH). ZeroMQ's sockets are for one thread: callers leave messages in queues and
rouse it, and it gives what has come to the crew. It never waits for a connection or for anybody's function,
so large messages in both directions do not stop each other, and an interrupted caller leaves nothing halfway.

*Who lives.* A connection that has ended is the end of that worker here, and never made again: what was on its
way over it is lost, and calls are not to be lost in silence. A worker that says goodbye has shut down. And
each lets the others hear of it now and then, so one is missed whose host is gone without a word. Time in
which this process itself was stopped does not count.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from torchestra.engine.channels import Message
from torchestra.errors import RpcError
from torchestra.rpc.wire.cards import ZAP_DOMAIN, Card, Doorkeeper
from torchestra.rpc.wire.framing import LARGEST_FRAME
from torchestra.rpc.wire.peer import FRAMES_IN_ADVANCE, GOODBYE, HELLO, Peer

_TICK = 0.05
_MEETING_TICK = 0.002
_LONGEST_TICK = 0.5
_FLUSH_SECONDS = 2.0
_JOIN_SECONDS = 5.0
_HANDSHAKE_SECONDS = 10
_BACKLOG = 1024
_FRAMES_AT_ONCE = 256


class Wire:
    """Connections to workers on other hosts.

    Args:
        name: of this worker, for its thread.
        address: of this host's interface to listen at.
        ports: the first and the last that may be used, or None for any.
        heartbeat: after how many seconds of silence a worker is given up.

    Attributes:
        card: how this worker is reached.

    Raises:
        RpcError: it cannot listen there.
    """

    def __init__(self, name: str, address: str, ports: tuple[int, int] | None, heartbeat: float) -> None:
        self._owner = os.getpid()
        self._name = name
        self._heartbeat = heartbeat
        self._peers: dict[int, Peer] = {}
        self._clock = 0.0
        self._looked = time.monotonic()
        self._closing = False
        self._released = False
        self._roused = False
        # Nothing may be written to a closed descriptor; and a finaliser may interrupt a caller in here.
        self._gate = threading.RLock()
        self._arrived: Callable[[Message], None] | None = None
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._context.set(zmq.MAX_SOCKETS, 65536)
            self._public, self._private = zmq.curve_keypair()
            self._door = Doorkeeper(self._context)
            self._inbox = self._context.socket(zmq.PULL)
            inbox = self._inbox
            inbox.linger = 0
            inbox.rcvhwm = FRAMES_IN_ADVANCE
            inbox.maxmsgsize = LARGEST_FRAME
            inbox.backlog = _BACKLOG
            inbox.handshake_ivl = _HANDSHAKE_SECONDS * 1000
            inbox.ipv6 = ":" in address
            inbox.zap_domain = ZAP_DOMAIN
            inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
            inbox.curve_server = True
            inbox.curve_secretkey = self._private
            self.card = Card(_listen(inbox, address, ports), self._public)
        except BaseException:
            self._release()
            raise

    # -- every thread

    def join(
        self, cards: dict[int, Card], names: Sequence[str], seconds: float, arrived: Callable[[Message], None]
    ) -> None:
        """Connect to the others; returns when all have let this worker in. They all must call it.

        Args:
            cards: of the workers on other hosts, by rank.
            names: of all workers, for messages.
            seconds: how long that may take.
            arrived: called with each message that comes, by the thread of the connections. It must not wait
                for anything that another message may bring.

        Raises:
            RpcError: one of them does not answer, or does not let this worker in.
        """
        self._arrived = arrived
        self._door.ranks = {card.key: rank for rank, card in cards.items()}
        for rank, card in cards.items():
            self._peers[rank] = Peer(rank, self._socket_to(card), card)
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"rpc-{self._name}-wire")
        self._thread.start()
        deadline = time.monotonic() + seconds
        self._await("joined", names, cards, deadline)
        for peer in self._peers.values():
            peer.say(HELLO)
        self._rouse()
        self._await("greeted", names, cards, deadline)

    def _await(self, state: str, names: Sequence[str], cards: dict[int, Card], deadline: float) -> None:
        """Wait until all peers are ``joined`` or ``greeted``."""
        while waiting := [peer for peer in self._peers.values() if not getattr(peer, state)]:
            late = "no answer in time" if time.monotonic() > deadline else ""
            for peer in waiting:
                if why := peer.refused or peer.how or late:
                    raise self._unreachable(names[peer.rank], peer.rank, cards[peer.rank], why)
            time.sleep(_MEETING_TICK)

    def _unreachable(self, name: str, rank: int, card: Card, why: str) -> RpcError:
        return RpcError(
            f"worker {self._name!r} cannot reach worker {name!r} (rank {rank}), which is on another host, at"
            f" {card.address}: {why}. Can this host connect to that address and port? See"
            " TORCHESTRA_RPC_ADDRESS and TORCHESTRA_RPC_PORTS in docs/rpc.md"
        )

    def send(self, peer: int, kind: int, tag: int, parts: Sequence[tuple[int, int]], keep: object) -> None:
        """Send a message, see :meth:`~torchestra.engine.channels.PostOffice.send`.

        Waits while 64 MB are under way to that worker.
        """
        to = self._peers[peer]
        if to.how or self._closing:
            return
        to.post(kind, tag, parts, keep)
        self._rouse()
        while to.is_full and not self._closing:
            to.await_room(_TICK)

    @property
    def strangers(self) -> int:
        """How many wanted in with a key that is on no card."""
        return self._door.refused

    def lost(self) -> dict[int, str]:
        """Which workers are gone, all that they had sent having come, and what has become of them."""
        return {rank: peer.how for rank, peer in self._peers.items() if peer.how}

    def close(self) -> None:
        """Say goodbye to the others and end all connections. What has been sent still arrives."""
        if os.getpid() != self._owner or self._released:
            return  # a forked child has the sockets of its parent, which it must not touch
        self._closing = True
        if self._thread is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._rouse()
            self._thread.join(_JOIN_SECONDS)

    def _rouse(self) -> None:
        if not self._roused:
            with self._gate:
                if not self._released:
                    self._roused = True
                    os.eventfd_write(self._wake, 1)

    # -- the thread

    def _socket_to(self, card: Card) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(zmq.PUSH)
        socket.sndhwm = FRAMES_IN_ADVANCE
        socket.reconnect_ivl = -1
        socket.linger = 0
        socket.ipv6 = card.address.startswith("tcp://[")
        socket.handshake_ivl = _HANDSHAKE_SECONDS * 1000
        socket.curve_serverkey = card.key
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._private
        return socket

    def _serve(self) -> None:
        try:
            self._exchange()
            self._say_goodbye()
        except BaseException as error:
            traceback.print_exc()
            for peer in self._peers.values():
                peer.how = peer.how or f"cannot be reached any more ({type(error).__name__}: {error})"
        finally:
            self._closing = True
            self._release()

    def _exchange(self) -> None:
        poller = self._poller()
        blocked: set[int] = set()
        next_look = 0.0
        while not self._closing:
            meeting = not all(peer.greeted for peer in self._peers.values())
            ready = dict(poller.poll(round(1000 * (_MEETING_TICK if meeting else _TICK))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._roused = False
            for peer in self._peers.values():
                if peer.has_mail and (not peer.blocked or peer.socket in ready) and not peer.how:
                    peer.flush(self._clock)
                if peer.blocked != (peer.rank in blocked):
                    self._watch(poller, peer, blocked)
            if self._door.socket in ready:
                self._door.answer()
            if self._inbox in ready:
                self._receive()
            if meeting or time.monotonic() >= next_look:
                self._look(poller, blocked)
                next_look = time.monotonic() + _TICK

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        for source in (self._wake, self._inbox, self._door.socket):
            poller.register(source, zmq.POLLIN)
        return poller

    def _watch(self, poller: zmq.Poller, peer: Peer, blocked: set[int]) -> None:
        """Look out for room in a connection that has none, and only in such."""
        if peer.blocked:
            poller.register(peer.socket, zmq.POLLOUT)
            blocked.add(peer.rank)
        else:
            poller.unregister(peer.socket)
            blocked.discard(peer.rank)

    def _receive(self) -> None:
        assert self._arrived is not None
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = self._peers[int(frame.get("User-Id"))]  # the doorkeeper's word, not the sender's
            if peer.how:
                continue
            peer.heard = self._clock
            if not peer.assembly.under_way and len(frame) <= len(HELLO):
                control = frame.bytes
                peer.greeted |= control == HELLO
                if control == GOODBYE:
                    peer.how = "has shut down"
                continue
            try:
                message = peer.assembly.feed(frame.buffer)
            except ValueError as error:
                peer.how = f"speaks another language than this worker ({error}): the versions differ"
                continue
            if message is not None:
                self._arrived(message)

    def _look(self, poller: zmq.Poller, blocked: set[int]) -> None:
        now = time.monotonic()
        self._clock += min(_LONGEST_TICK, now - self._looked)
        self._looked = now
        for peer in self._peers.values():
            if peer.socket.closed:
                continue
            peer.look(self._clock, self._heartbeat)
            if peer.how:
                if peer.rank in blocked:
                    poller.unregister(peer.socket)
                    blocked.discard(peer.rank)
                peer.close(linger=0)
            elif peer.joined and self._clock - peer.told > self._heartbeat / 4:
                peer.show_life(self._clock)

    def _say_goodbye(self) -> None:
        """Let all hear the rest and the goodbye, as far as they listen."""
        there = [peer for peer in self._peers.values() if peer.joined and not peer.how]
        for peer in there:
            peer.say(GOODBYE)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while any(peer.has_mail for peer in there) and time.monotonic() < deadline:
            for peer in there:
                peer.flush(self._clock)
            time.sleep(_MEETING_TICK)

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.close(linger=int(1000 * _FLUSH_SECONDS))
        self._context.destroy()
        with self._gate:
            self._released = True
            os.close(self._wake)


def _listen(inbox: zmq.Socket[Any], address: str, ports: tuple[int, int] | None) -> str:
    """Where it listens now."""
    host = f"[{address}]" if ":" in address else address
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            inbox.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port == last:
                where = f"port{'s' if first != last else ''} {first}-{last}" if ports else "any port"
                raise RpcError(f"cannot listen for remote calls at {address}, {where}: {error}") from error
        else:
            break
    return str(inbox.getsockopt_string(zmq.LAST_ENDPOINT))
