"""The port at which a rank listens for peers, and which strangers cannot block.

The rank accepts nobody before it knows whom it expects: until then connections wait in the kernel's queue,
which costs no descriptor. From then on ZeroMQ accepts all, on a thread of its own, and gives each some
seconds to prove its key. Its *socket monitor* reports every connection that begins or ends, with the number
of the descriptor, and each message says on which it came. So the listener knows which connections have proved
nothing yet; if they are too many it shuts some down. Should strangers come faster than that, ZeroMQ waits
until the listener has read all but the last thousand of its events.

Which are shut down:

- Ranks that are expected come from ports that only the job knows (source_port.py). Those are shut down last,
  and while the kernel's queue is crowded it drops most requests of others (syn_filter.py). So however many
  strangers come, such a rank gets in with its first attempts.
- All others are shut down by chance: however fast strangers come, a rank whose port an address translator
  has changed has theirs, and one that was shut down tries again.
- From the moment a key is found right until the first message of its owner, nothing that was connected then
  is shut down (:meth:`Listener.hold`): which of the connections the owner has cannot be told before. Shut
  down, it might have said hello already, and be taken for connected, by a descriptor that has a new owner.

When all expected ranks have come, the listener shuts the port for good. ZeroMQ cannot close a port without
its connections; so the kernel drops further requests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import zmq

from torchestra.errors import DistNetworkError
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.transport.syn_filter import SynFilter

HANDSHAKE_SECONDS = 3
"""How long a connection has to prove its key."""
MAX_UNAUTHENTICATED = 64

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=Hi")
_LAST_SECONDS = 0.5
_SHUT_KEPT = 4096
_BACKLOG = 256  # ZeroMQ still accepts those that wait there when the port is shut

_log = logging.getLogger(__name__)


class IncomingConnection:
    """A peer's connection to this rank, which is ZeroMQ's.

    Args:
        descriptor: of the connection; ZeroMQ closes it once it has read all that the peer sent before that.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._inode = _inode(descriptor)

    @property
    def has_ended(self) -> bool:
        """Return whether ZeroMQ has closed it, so that the inbox has all that will ever come over it."""
        return self._inode is None or _inode(self._descriptor) != self._inode


def _inode(descriptor: int) -> tuple[int, int] | None:
    """Return what tells a socket from all others of this host; None if the descriptor is not a socket's."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


class Listener:
    """A listening port; any thread may make it, the thread of the transport uses it.

    Args:
        inbox: the socket of ZeroMQ that gets the connections.
        address: of this host's interface to listen at.
        ports: the first and the last port that may be used, or None for any.

    Attributes:
        endpoint: where it listens, as ZeroMQ writes it.
        known_ports: that expected ranks connect from; replaced as a whole, by any thread.
        monitor: the socket with ZeroMQ's events; call :meth:`look` when there is something to read.
        is_shut: whether the port has been shut for good.

    Raises:
        DistNetworkError: it cannot listen there.
    """

    def __init__(self, inbox: zmq.Socket[Any], address: str, ports: tuple[int, int] | None) -> None:
        self._inbox = inbox
        self._expected = 0
        self.is_shut = self._closed = False
        self.known_ports: Collection[int] = frozenset()
        self._unproved: set[int] = set()
        self._known: set[int] = set()  # descriptors of connections from known ports that have proved nothing
        self._held: dict[int, set[int]] = {}  # descriptors, by the number of whom they may belong to
        self._proved: set[object] = set()  # addresses of the peers that have
        self._shut: deque[object] = deque(maxlen=_SHUT_KEPT)  # inodes of connections, the last ones
        self._warnings = RateLimitedWarnings(_log)
        self._port = _listen(address, ports)
        self._port_number = int(self._port.getsockname()[1])
        self._filter = SynFilter(self._port)
        host = f"[{address}]" if ":" in address else address
        self.endpoint = f"tcp://{host}:{self._port_number}"
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.monitor: zmq.Socket[Any] = inbox.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        self.monitor.rcvhwm = 1  # besides what the other end keeps
        events = f"inproc://events-of-{id(self)}"
        inbox.monitor(events, _EVENTS)
        self.monitor.connect(events)

    def open(self, expected: int) -> None:
        """Begin to accept, with ``expected`` peers to come; called once, before the thread begins."""
        self._expected = expected
        self._port.listen(expected + _BACKLOG)
        self._inbox.set(zmq.USE_FD, self._port.dup().detach())  # ZeroMQ closes what it is given
        self._inbox.bind(self.endpoint)

    def hold(self, number: int) -> None:
        """Shut down none of the present connections before :meth:`prove` is called with this number.

        Call this before ZeroMQ is told that it may let the owner of a key in. The connection is one of
        these, as ZeroMQ has reported it before it asked.
        """
        if not self._closed:
            self._read_events()
            if self._unproved:
                self._held[number] = set(self._unproved)

    def prove(self, descriptor: int, number: int) -> IncomingConnection | None:
        """Note that the connection on this descriptor is a peer's, as ZeroMQ has let a message through.

        Args:
            number: what :meth:`hold` was called with.

        ZeroMQ may report only later that the connection has begun, and that a stranger's with the same
        descriptor has ended. So the listener keeps the address of its other end, so as not to shut it down.

        Returns:
            None if the connection has ended: it was shut down as a stranger's while the message was on its
            way from ZeroMQ, and the peer connects again.
        """
        self._held.pop(number, None)
        self._forget(descriptor)
        inode = _inode(descriptor)
        if inode is None or inode in self._shut:
            return None
        if not self._closed:
            self._with_copy(descriptor, lambda _, other_end: self._proved.add(other_end))
        return IncomingConnection(descriptor)

    def check(self, expected: int) -> None:
        """Read the events, shut some strangers' connections down if they are too many, and the port in time.

        Args:
            expected: how many are still to come; 0 shuts the port for good.
        """
        if self.is_shut:
            return
        self._expected = expected
        self._read_events()
        if not expected:
            self.is_shut = True
            self._filter.drop_all()
            self._read_events()
            for descriptor in tuple(self._unproved):
                self._end(descriptor)
            self.close()
        else:
            self._filter.adapt(self.known_ports)

    def close(self) -> None:
        """Accept no more connections, and read no more events."""
        if self._closed:
            return
        self._closed = True
        if not self.is_shut:
            with contextlib.suppress(zmq.ZMQError):
                self._inbox.unbind(self.endpoint)
        # While ZeroMQ waits for its events to be read, the monitor cannot be ended.
        deadline = time.monotonic() + _LAST_SECONDS
        while self.monitor.poll(0) and time.monotonic() < deadline:
            self._read_events()
        self._inbox.disable_monitor()
        self.monitor.close(0)
        self._port.close()
        os.close(self._spare)

    def _read_events(self) -> None:
        failed = False
        while True:
            try:
                event, value = _EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            if event == zmq.EVENT_ACCEPTED:
                self._admit(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(value)
            else:
                failed = True
        if failed:
            # No descriptors are left, most likely, and ZeroMQ tries again and again, without a pause.
            self._warnings.warn("%s: a connection cannot be accepted; raise `ulimit -n`", self.endpoint)
            for descriptor in self._unproved.difference(*self._held.values()):
                self._end(descriptor)

    def _admit(self, descriptor: int) -> None:
        """Note that a connection has begun, and shut one down if there are too many."""
        self._forget(descriptor)  # of one that has ended, should that not have been reported
        self._unproved.add(descriptor)
        known = self.known_ports

        def note(_: object, other_end: tuple[object, ...]) -> None:
            if other_end[1] in known:
                self._known.add(descriptor)

        if known:
            self._with_copy(descriptor, note)
        if len(self._unproved) > MAX_UNAUTHENTICATED + self._expected:
            others = self._unproved.difference(*self._held.values())
            if last := others - self._known or others:
                self._end(random.choice(tuple(last)))

    def _forget(self, descriptor: int) -> None:
        """Take a descriptor for nobody's who has yet to prove a key."""
        self._unproved.discard(descriptor)
        self._known.discard(descriptor)
        for number, held in tuple(self._held.items()):
            held.discard(descriptor)
            if not held:
                del self._held[number]

    def _end(self, descriptor: int) -> None:
        """Shut a connection down, if it is a stranger's."""

        def shut_down(copy: socket.socket, other_end: object) -> None:
            if other_end not in self._proved:
                self._shut.append(_inode(copy.fileno()))
                copy.shutdown(socket.SHUT_RDWR)

        self._forget(descriptor)
        self._with_copy(descriptor, shut_down)

    def _with_copy(self, descriptor: int, act: Callable[[socket.socket, tuple[object, ...]], None]) -> None:
        """Call ``act`` with a copy of a connection to this port, and the address of its other end.

        The descriptor is ZeroMQ's, which may have closed it by now, and its number may have been reused
        since. So this makes a copy, which nobody else can close, and examines that. The copy replaces a
        descriptor that is kept for this: there may be no other.
        """
        try:
            os.dup2(descriptor, self._spare, inheritable=False)
            copy = socket.socket(fileno=self._spare)
        except OSError:
            return
        with contextlib.suppress(OSError):  # it has ended, or is the listening socket
            is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and copy.getsockname()[1] == self._port_number:
                act(copy, copy.getpeername())
        copy.detach()
        os.dup2(self._port.fileno(), self._spare, inheritable=False)  # the stranger's is ZeroMQ's alone again


def _listen(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that is bound to a free port of the range."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                where = f"port{'s' if first != last else ''} {first}-{last}" if ports else "any port"
                raise DistNetworkError(f"cannot listen at {address}, {where}: {error}") from error
        else:
            listening.setblocking(False)
            return listening
    raise AssertionError("there is no port in the range")
