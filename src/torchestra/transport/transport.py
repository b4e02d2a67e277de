"""The connections of one rank to those on other hosts.

A rank listens at one port, where it only receives (PULL), and has a connection of its own to each of the
others, where it only sends (PUSH). Callers leave messages in queues (pair.py), so an interrupted caller
leaves nothing halfway; short ones they send on their own thread if they can, and receive on their own thread
if they wait for them (:meth:`Transport.receive_for`). One thread (event_loop.py) sends and receives the rest.

*Connecting.* :meth:`Transport.join` connects ranks that all need each other, and returns when all have
met. Ranks that :meth:`Transport.expect` has made known are connected when one of the two first sends the
other something.

*Liveness.* When both connections between two ranks have ended, each counts as gone for the other, and
what was in transit is lost; no loss is silent. When one has ended, messages may still come over the
other for the time of a heartbeat. An owner that knows by other means which ranks live can have another
connection made instead (``broken``), over which reliable messages are sent again. A rank that says
goodbye has shut down. With a ``heartbeat`` each rank sends the others a sign of life now and then, so
that they notice a host that is gone.

*Strangers.* Nobody gets a message through without a key of one of the expected ranks (endpoint.py). The port
is open only until all of these are connected; if ranks may connect at any time, as long as the transport is.
While it is open, each client has some seconds to prove its key, and there are never many such clients
(listener.py). A rank whose connection is shut down among theirs connects again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchestra.errors import DistNetworkError
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.event_loop import LINGER_SECONDS, EventLoop
from torchestra.transport.message import Handlers, Message, Sending
from torchestra.transport.sockets import await_confirmed, await_met

_JOIN_SECONDS = 5.0
_ROOM_SECONDS = 0.001


class Transport:
    """Connections to ranks on other hosts.

    Args:
        name: of this rank, for messages; its thread is named after it.
        address: of this host's interface to listen at.
        ports: the first and the last port that may be used, or None for any.
        heartbeat: after how many seconds of silence a rank is given up; None if something else checks that.
        arrived: called with each message that comes. It must not wait for anything that another message may
            bring.
        lost: called with each rank that is gone, after all that it had sent has come, and with how it ended.
        broken: called with a rank whose connection has ended without a goodbye, and how; then the transport
            makes another one. Default: the rank is lost.
        grows: ranks become known at any time, by :meth:`expect`, and go, by :meth:`forget`; so this rank
            takes connections as long as it lives. They must listen before others know of them, and one
            that has not let this rank in after the time of a heartbeat is given up.
        advice: what to do where one cannot be reached, for messages.

    The thread of the transport calls these three functions. Messages that a caller receives itself
    (:meth:`receive_for`) are not given to ``arrived``.

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
        *,
        lost: Callable[[int, str], None] = lambda rank, how: None,
        broken: Callable[[int, str], None] | None = None,
        grows: bool = False,
        advice: str = "",
    ) -> None:
        self._owner = os.getpid()
        self._name, self._advice = name, advice
        handlers = Handlers(arrived, lost, broken)
        self._loop = EventLoop(name, address, ports, heartbeat, handlers, grows=grows)
        self.endpoint = self._loop.endpoint

    def join(
        self, endpoints: Mapping[int, EndpointRecord], names: Mapping[int, str], timeout_s: float
    ) -> None:
        """Connect to the others; return when all have admitted this rank. Each of them must call this.

        Args:
            endpoints: of the ranks on other hosts.
            names: their names for messages.

        Raises:
            DistNetworkError: one of them does not answer, or does not let this rank in.
        """
        self.expect(endpoints, connect=True)
        peers = [self._loop.peers[rank] for rank in endpoints]
        await_met(peers, self._name, names, timeout_s, lambda: self._loop.closing, self._advice)

    def expect(self, endpoints: Mapping[int, EndpointRecord], *, connect: bool = False) -> None:
        """Admit ranks, and prepare to send to them; ranks that are known already stay as they are.

        Args:
            endpoints: of ranks on other hosts.
            connect: connect to them now, not only when there is something to send.

        Raises:
            DistNetworkError: this end was closed.
        """
        if not self._loop.expect(endpoints, connect=connect):
            raise DistNetworkError("this end was closed")

    def connect(self, ranks: Iterable[int]) -> None:
        """Connect now to ranks that are known."""
        self._loop.want(ranks)
        self._loop.wake()

    def forget(self, rank: int, how: str) -> None:
        """Admit a known rank no more; drop what still comes from it. ``how``: how it ended, for messages."""
        self._loop.forget(rank, how)

    def is_met(self, rank: int) -> bool:
        """Return whether this rank and a known one are connected to each other."""
        return self._loop.peer(rank).is_met

    def send(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Sequence[tuple[int, int]],
        keep: object,
        sending: Sending | None = None,
    ) -> None:
        """Send a message, see :meth:`~torchestra.engine.p2p.endpoint.Endpoint.send`.

        Wait while 64 MB are queued for that rank.
        """
        self.post(peer, kind, tag, parts, keep, sending=sending)
        to = self._loop.peers[peer]
        while to.is_full and not self._loop.closing:
            time.sleep(_ROOM_SECONDS)  # an Event has a lock that an interrupt may leave taken

    def post(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Sequence[tuple[int, int]],
        keep: object,
        done: Callable[[], None] | None = None,
        reliable: bool = False,
        sending: Sending | None = None,
    ) -> None:
        """Begin to send a message; never wait. Nothing is sent to a rank that is gone.

        Args:
            reliable: see :meth:`post_text`; the parts must not be changed any more.
            done: called when the parts may be changed, by the thread of the transport or before this returns.
            sending: is told when the message is queued, whatever this raises.
        """
        loop = self._loop
        to = loop.peers.get(peer) or loop.peer(peer)
        if not (to.end_reason or loop.closing):
            to.post(kind, tag, parts, keep, done, reliable, sending)
            loop.send(to)

    def post_text(self, peer: int, kind: int, tag: int, text: bytes) -> None:
        """Begin to send a reliable message of one part; never wait.

        It arrives even if the connection breaks meanwhile, as long as both ranks live, see :meth:`flush`.
        """
        loop = self._loop
        to = loop.peers.get(peer) or loop.peer(peer)
        if not (to.end_reason or loop.closing):
            to.post_text(kind, tag, text)
            loop.send(to)

    def receive_for(self, take: Callable[[int, int, int, bytes], bool], timeout_s: float) -> bool:
        """Receive on the calling thread, see :meth:`EventLoop.receive_for`."""
        return self._loop.receive_for(take, timeout_s)

    def flush(self, timeout_s: float, is_unreachable: Callable[[int], bool]) -> bool:
        """Wait until the reliable messages posted before are confirmed; return whether they were in time.

        Args:
            is_unreachable: returns whether a rank will receive nothing more.
        """
        loop = self._loop
        return await_confirmed(
            {peer: peer.posted for peer in loop.peers.values()},
            timeout_s,
            loop.ask_to_confirm,
            lambda rank: loop.closing or is_unreachable(rank),
        )

    def is_refused(self, peer: int) -> bool:
        """Return whether the last attempt to connect to a rank has failed."""
        return bool(self._loop.peers[peer].refused)

    def received_at(self, peer: int) -> float:
        """Return when bytes last came from a rank, by the clock of the transport's thread; 0 for never."""
        to = self._loop.peers.get(peer)
        return 0.0 if to is None else to.received_at

    @property
    def is_closed(self) -> bool:
        """Return whether :meth:`close` has been called, or the thread has ended."""
        return self._loop.closing

    @property
    def refused_connections(self) -> int:
        """Return how many connections were refused because nobody expected has their key."""
        return self._loop.authenticator.refused

    def lost(self) -> dict[int, str]:
        """Return how each rank ended that is gone, and all of whose messages have come."""
        return self._loop.lost()

    def close(self, linger_s: float = LINGER_SECONDS, wait: float = _JOIN_SECONDS) -> None:
        """Say goodbye to the others and end all connections. What has been sent still arrives.

        Args:
            linger_s: for how many seconds to go on while others do not take their messages.
            wait: for how many seconds to wait for that; the transport's thread does the rest.
        """
        if (
            os.getpid() == self._owner
        ):  # a forked child has the sockets of its parent, and must not touch them
            self._loop.close(linger_s, wait)
