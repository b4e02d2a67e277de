"""A group's transport: dispatches messages to the parts of a rank, and introduces the ranks to each other.

Every rank of a group on several hosts has one. The ranks of a rail are connected by it where the bridge is
``curve``; each pair of other ranks on different hosts connects when one first has something for the other,
without the store: the ranks told each other their endpoint records when the group was made (joining.py).
"""

from __future__ import annotations

import atexit
import contextlib
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from torchestra.engine import progress
from torchestra.engine.hosts import Hosts
from torchestra.errors import DistError
from torchestra.store import Store
from torchestra.transport.addresses import INTERFACE_VARIABLE, own_address
from torchestra.transport.endpoint import EndpointRecord
from torchestra.transport.message import Message
from torchestra.transport.transport import Transport

_ADVICE = f"See {INTERFACE_VARIABLE} in docs/guides/several-hosts.md"
_FLUSH_SECONDS, _CLOSE_SECONDS = 0.2, 1.0
_ADDRESS_BYTES = 64
_RECORD = struct.Struct(f"<{_ADDRESS_BYTES}s40s")
RECORD_BYTES = _RECORD.size

Arrived = Callable[[Message], None]
Ended = Callable[[int, str], None]


class Channel(IntEnum):
    """The subsystem that a message belongs to."""

    bridge = 1
    p2p = 2
    control = 3


class GroupTransport:
    """One rank's transport in a group.

    Args:
        store: the group's, to find out at which of its addresses this host is reached.

    Raises:
        DistNetworkError: it cannot listen on this host.
    """

    def __init__(self, store: Store, hosts: Hosts, rank: int) -> None:
        self.hosts, self.rank = hosts, rank
        self._lock = threading.RLock()
        self._arrived: dict[int, Arrived] = {}
        self._ended: list[tuple[Ended, float]] = []
        self._early: deque[Message] = deque()  # what came before a channel had a listener
        self._gone: dict[int, str] = {}
        self._before_close: list[Callable[[], None]] = []
        self._closed = False
        self.link = Transport(
            hosts.describe(rank),
            own_address(store),
            ports=None,
            heartbeat=None,
            arrived=self._deliver,
            lost=self._lost,
            broken=self._connection_broken,
            advice=_ADVICE,
        )
        _all.add(self)

    def listen(self, channel: Channel, arrived: Arrived, ended: Ended, delay: float = 0.0) -> None:
        """Pass messages of a channel on, on the thread of the transport; also those that have come already.

        Args:
            channel: whose messages.
            arrived: called with each.
            ended: called with a rank whose connection has ended, and how.
            delay: how many seconds to wait before calling ``ended`` if the rank has not said goodbye: a bad
                link may delay what it has sent before.
        """
        with self._lock:
            early, self._early = self._early, deque()
            self._ended.append((ended, delay))
            for rank, how in self._gone.items():
                ended(rank, how)
            for message in early:
                if message.kind == channel:
                    arrived(message)
                else:
                    self._early.append(message)
            self._arrived[channel] = arrived

    def _deliver(self, message: Message) -> None:
        arrived = self._arrived.get(message.kind)
        if arrived is None:
            with self._lock:
                arrived = self._arrived.get(message.kind)
                if arrived is None:
                    self._early.append(message)
                    return
        arrived(message)

    def _lost(self, rank: int, how: str) -> None:
        with self._lock:
            self._gone[rank] = how
            for ended, _ in tuple(self._ended):
                ended(rank, how)

    def _connection_broken(self, rank: int, how: str) -> None:
        with self._lock:
            for ended, delay in tuple(self._ended):
                if delay:
                    timer = threading.Timer(delay, ended, (rank, how))
                    timer.daemon = True
                    timer.start()
                else:
                    ended(rank, how)

    # -- the identities of the ranks

    def own_record(self) -> bytes:
        """Return this rank's endpoint record, of :data:`RECORD_BYTES` bytes."""
        endpoint = self.link.endpoint
        return _RECORD.pack(endpoint.address.encode(), endpoint.key)

    def expect(self, records: bytes) -> None:
        """Admit the ranks of other hosts with these endpoint records, by rank."""
        here = frozenset(self.hosts.on(self.hosts.host_at(self.rank)))
        endpoints = {}
        for rank, (address, key) in enumerate(_RECORD.iter_unpack(records)):
            if rank not in here:
                endpoints[rank] = EndpointRecord(address.rstrip(b"\0").decode(), key)
        self.link.expect(endpoints)

    # -- the end

    def before_close(self, leave: Callable[[], None]) -> None:
        """Register a function to call before the connections end; the last one registered is called first."""
        self._before_close.insert(0, leave)

    def close(self) -> None:
        """Say goodbye to the others."""
        if self._closed:
            return
        self._closed = True
        for leave in self._before_close:
            with contextlib.suppress(DistError, OSError):
                leave()
        self.link.close(_FLUSH_SECONDS, _CLOSE_SECONDS)


_all: weakref.WeakSet[GroupTransport] = weakref.WeakSet()


def _close_at_exit() -> None:
    """Send all that is queued before the process ends."""
    progress.await_running_tasks()
    for transport in tuple(_all):
        transport.close()


atexit.register(_close_at_exit)
