"""What the thread of a transport waits for on its connections to others, without a look at all of them.

ZeroMQ reports what becomes of each connection by a socket of its own, the connection's monitor, whose
descriptor tells of events once, until all have been read. They are in one epoll set, which the thread polls
with all else that it waits for. For room in a connection it polls only while there is none.
"""

from __future__ import annotations

import select
from collections.abc import Mapping
from typing import Any

import zmq

from torchestra.transport.pair import PairConnection


class ConnectionEvents:
    """The connections whose events, or room, are awaited. For the transport's thread.

    Args:
        poller: what that thread polls.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._monitors = select.epoll()
        self._descriptor = self._monitors.fileno()
        self._peers: dict[int, PairConnection] = {}  # by descriptor of their monitors
        self._full: dict[Any, PairConnection] = {}  # by socket
        poller.register(self._descriptor, zmq.POLLIN)

    def begin(self, peer: PairConnection) -> None:
        """Await the events of a connection that has just begun."""
        if peer.monitor is not None:
            descriptor = peer.monitor.fileno()
            self._peers[descriptor] = peer
            self._monitors.register(descriptor, select.EPOLLIN)

    def end(self, peer: PairConnection) -> None:
        """Await nothing more of a connection that is about to be closed."""
        if peer.monitor is not None:
            descriptor = peer.monitor.fileno()
            if self._peers.pop(descriptor, None) is not None:
                self._monitors.unregister(descriptor)
        if self._full.pop(peer.socket, None) is not None:
            self._poller.unregister(peer.socket)

    def changed(self, ready: Mapping[Any, int]) -> list[PairConnection]:
        """Return the connections that may have events; each is to be read until there are none."""
        if self._descriptor not in ready:
            return []
        return [self._peers[descriptor] for descriptor, _ in self._monitors.poll(0)]

    def with_room(self, ready: Mapping[Any, int]) -> list[PairConnection]:
        """Return the connections that were full and have room now."""
        return [peer for socket, peer in self._full.items() if socket in ready]

    def is_awaiting_room(self, peer: PairConnection) -> bool:
        """Return whether the thread is woken when there is room in a connection."""
        return peer.blocked and peer.socket in self._full

    def note_room(self, peer: PairConnection) -> None:
        """Poll a connection for room if it has none, and else no more."""
        socket = peer.socket
        if peer.blocked and socket not in self._full:
            self._poller.register(socket, zmq.POLLOUT)
            self._full[socket] = peer
        elif not peer.blocked and socket in self._full:
            self._poller.unregister(socket)
            del self._full[socket]
