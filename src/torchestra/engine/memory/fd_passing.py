"""Descriptor passing: a server gives a descriptor to every rank that proves itself, and to no other process.

The server listens at an abstract Unix socket, which leaves nothing in the file system and has a random name.
What both sides prove is a key made of a random *token*, which only ranks of the group can read (in the store,
or in the arena that they share), and of the job's secret, if there is one. Both also ask the kernel which
user the other one is. One connection carries four packets (SOCK_SEQPACKET, so that none is cut)::

    rank    ->  b"TRC2" rank:u32 nonce:32 bytes
    server  ->  nonce:32 bytes  HMAC-SHA256(key, "rank 0" + rank + both nonces)
    rank    ->  HMAC-SHA256(key, "rank" + rank + both nonces)
    server  ->  a verdict, and with :data:`_GIVEN` the descriptor

A rank that has the descriptor may keep the connection, and learns from its end that the server is done, or
gone.

No process can listen under the server's name while the server lives; one that does so afterwards fails the
second step. The server serves all connections at once, gives each :data:`_PROOF_SECONDS`, and drops the
oldest of too many; a rank that is dropped connects again. So a connection that sends nonsense, or nothing,
delays no rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torchestra.engine.memory.bounded_listener import BoundedListener
from torchestra.errors import CollectiveTimeoutError, DistBackendError
from torchestra.store.base import interpreter_slice
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.store.secret import SECRET_ADVICE
from torchestra.store.tcp.locality import peer_user
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES, is_proof, proof
from torchestra.system.deadline import Deadline

_MAGIC = b"TRC2"
_HELLO = struct.Struct(f"<4sI{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"{NONCE_BYTES}s{PROOF_BYTES}s")
_GIVEN, _TAKEN, _UNPROVED = b"given", b"taken", b"unproved"
_LONGEST = 256

_PROOF_SECONDS = 10.0
_TICK = 0.05

_log = logging.getLogger(__name__)


class _Challenged(NamedTuple):
    """The rank that a challenged connection claims to be, and both nonces."""

    rank: int
    nonces: bytes


class DescriptorServer:
    """Give a descriptor out. A context manager; call :meth:`serve` until :attr:`waited_for` is empty.

    Args:
        ranks: the ranks to give the descriptor to, each once; a range may be large, as it is not iterated
            over.
        taken: those of the ranks that need nothing, and that no process may claim to be.
        keeps: hold the connections of ranks that have the descriptor until :meth:`close`, or until they end
            them, which :meth:`ended` tells.
        address, token: the name of the socket, and the token; default: random ones.

    Attributes:
        invitation: the text that the others need.
        given: the ranks that have come, in this order.
    """

    def __init__(
        self,
        ranks: Collection[int],
        secret: bytes | None,
        name: str,
        *,
        taken: Iterable[int] = (),
        keeps: bool = False,
        address: str = "",
        token: str = "",
    ) -> None:
        address, token = address or f"torchestra-{secrets.token_hex(16)}", token or secrets.token_hex(32)
        self.invitation = f"{address}:{token}"
        self._address = "\0" + address
        self._keeps = keeps
        self._kept: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: the rank and its connection
        self._ends = select.poll()
        self.given: list[int] = []
        self._ranks = ranks
        self._taken = set(taken)
        self._key = _key(token, secret)
        self._name = name
        self._refusals = RateLimitedWarnings(_log)
        self._challenged: weakref.WeakKeyDictionary[socket.socket, _Challenged] = weakref.WeakKeyDictionary()
        self._listener = BoundedListener(
            address,
            f"group {name!r}",
            _PROOF_SECONDS,
            lambda: len(self._ranks) - len(self.given),
            self._refusals,
        )

    @property
    def waited_for(self) -> set[int]:
        """Return the ranks that have not come yet."""
        return set(self._ranks) - self._taken

    def __enter__(self) -> DescriptorServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for _, connection in self._kept.values():
            connection.close()

    def wake(self) -> None:
        """Make a :meth:`serve` in another thread return soon."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.setblocking(False)
            with contextlib.suppress(OSError):
                caller.connect(self._address)

    def serve(self, descriptor: int, timeout_s: float = _TICK) -> None:
        """Handle all connections that are ready; wait up to ``timeout_s`` for one."""
        for connection in self._listener.ready(timeout_s):
            self._read_packet(connection, descriptor)

    def ended(self) -> list[int]:
        """Return the ranks that have ended their connection, or have died, since this was called last."""
        ended = []
        for descriptor, _ in self._ends.poll(0):
            self._ends.unregister(descriptor)
            rank, connection = self._kept.pop(descriptor)
            connection.close()
            ended.append(rank)
        return ended

    def _read_packet(self, connection: socket.socket, descriptor: int) -> None:
        has_given = False
        try:
            packet = connection.recv(_LONGEST)
            peer = self._challenged.pop(connection, None)
            if peer is None:
                if self._challenge(connection, packet):
                    self._listener.renew(connection)
                    return
            else:
                has_given = self._decide(connection, peer, packet, descriptor)
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("group %r: lost a process that wanted the group's memory: %s", self._name, error)
        if has_given and self._keeps:
            self._listener.release(connection)
            self._kept[connection.fileno()] = self.given[-1], connection
            self._ends.register(connection, select.POLLIN)
        else:
            self._listener.drop(connection)

    def _challenge(self, connection: socket.socket, hello: bytes) -> bool:
        """Answer a hello; return False if it is none."""
        if len(hello) != _HELLO.size or not hello.startswith(_MAGIC):
            return False
        _, rank, nonce = _HELLO.unpack(hello)
        own = os.urandom(NONCE_BYTES)
        peer = _Challenged(rank, nonce + own)
        connection.send(_CHALLENGE.pack(own, _proof(self._key, "rank 0", rank, peer.nonces)))
        self._challenged[connection] = peer
        return True

    def _decide(self, connection: socket.socket, peer: _Challenged, answer: bytes, descriptor: int) -> bool:
        """Give the descriptor, or say why not; return whether it was given."""
        if not _is_proof(answer, self._key, "rank", peer.rank, peer.nonces):
            self._refusals.warn(
                "group %r: a process that says it is rank %s does not know the group's key: %s",
                self._name,
                peer.rank,
                SECRET_ADVICE,
            )
            connection.send(_UNPROVED)
        elif peer.rank not in self._ranks or peer.rank in self._taken:
            connection.send(_TAKEN)
        else:
            socket.send_fds(connection, [_GIVEN], [descriptor])
            self._taken.add(peer.rank)
            self.given.append(peer.rank)
            return True
        return False


class DescriptorRequest:
    """A rank's request for the descriptor of a server, by one connection after the other; never blocks.

    Args:
        invitation: of the server.
    """

    def __init__(self, invitation: str, secret: bytes | None, rank: int, name: str) -> None:
        address, _, token = invitation.partition(":")
        self._address, self._key, self._rank = "\0" + address, _key(token, secret), rank
        self.name = f"rank {rank} of group {name!r}"
        self._server = f"{self.name}: what answers in rank 0's place"
        self._nonces = b""
        self._proved = False
        self.connection: socket.socket | None = None

    def advance(self) -> int | None:
        """Take the steps possible now; return the descriptor, now the caller's, once the server gives it.

        Raises:
            DistBackendError: the server is not there, is not what it should be, or refuses this rank.
            OSError: no descriptors are left.
        """
        try:
            if self.connection is None:
                self._connect()
            return self._exchange_packets()
        except (BlockingIOError, InterruptedError):
            return None
        except (ConnectionResetError, BrokenPipeError):
            self.close()  # the server had too many connections, or no time for this one yet
            return None
        except OSError as error:
            self.close()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise DistBackendError(
                f"{self.name} cannot reach rank 0 on this host ({error}): either rank 0 has failed, or the"
                " two are on different hosts, whose ranks must meet by env:// or tcp://"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def sleep(self, timeout_s: float) -> None:
        """Sleep until the server has answered, at most ``timeout_s``."""
        if self.connection is None:
            time.sleep(min(timeout_s, _TICK))
        else:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            poll.poll(1000 * interpreter_slice(timeout_s))

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self._address)
            if (user := peer_user(connection)) != os.geteuid():
                raise DistBackendError(
                    f"{self._server} is a process of another user (number {user}), and not trusted"
                )
            self._nonces, self._proved = os.urandom(NONCE_BYTES), False
            connection.send(_HELLO.pack(_MAGIC, self._rank, self._nonces))
        except BaseException:
            connection.close()
            raise
        self.connection = connection

    def _exchange_packets(self) -> int:
        """Take the next packets; BlockingIOError if one has not come."""
        assert self.connection is not None
        if not self._proved:
            answer, descriptors = _packet(self.connection)
            _close(descriptors)
            self.connection.send(self._answer(answer))
            self._proved = True
        verdict, descriptors = _packet(self.connection)
        if verdict == _GIVEN and len(descriptors) == 1:
            return descriptors[0]
        _close(descriptors)
        if verdict == _TAKEN:
            raise DistBackendError(
                f"{self.name} was refused by rank 0, which has given the group's memory to a rank"
                f" {self._rank} already, or knows no such rank: do two processes claim the same rank?"
            )
        raise DistBackendError(f"{self.name} was refused by rank 0: {verdict!r}")

    def _answer(self, challenge: bytes) -> bytes:
        """Check what the server has proved, and return this rank's own proof."""
        if len(challenge) != _CHALLENGE.size:
            raise DistBackendError(
                f"{self._server} does not speak this rank's protocol: do all ranks run the same torchestra?"
            )
        theirs, proved = _CHALLENGE.unpack(challenge)
        nonces = self._nonces + theirs
        if not _is_proof(proved, self._key, "rank 0", self._rank, nonces):
            raise DistBackendError(
                f"{self._server} does not know this rank's secret, and is not trusted; {SECRET_ADVICE}"
            )
        return _proof(self._key, "rank", self._rank, nonces)


def fetch(invitation: str, secret: bytes | None, rank: int, name: str, deadline: Deadline) -> int:
    """Return the descriptor that a server gives to this rank; the caller owns it.

    Args:
        deadline: when to stop trying.

    Raises:
        CollectiveTimeoutError: rank 0 did not answer in time.
        DistBackendError: rank 0 is not there, is not what it should be, or refuses this rank.
    """
    descriptor, connection = request_descriptor(invitation, secret, rank, name, deadline)
    connection.close()
    return descriptor


def request_descriptor(
    invitation: str, secret: bytes | None, rank: int, name: str, deadline: Deadline
) -> tuple[int, socket.socket]:
    """Do as :func:`fetch`; return the connection too, for :func:`await_end`; the caller owns both."""
    request = DescriptorRequest(invitation, secret, rank, name)
    try:
        while (descriptor := request.advance()) is None:
            if deadline.expired():
                raise CollectiveTimeoutError(
                    f"{request.name}: rank 0 did not give it the group's memory in time", (0,)
                )
            request.sleep(_TICK)
    except BaseException:
        request.close()
        raise
    assert request.connection is not None
    request.connection.setblocking(True)
    return descriptor, request.connection


def await_end(connection: socket.socket, deadline: Deadline) -> bool:
    """Wait until rank 0 ends a connection that it keeps; False if the deadline comes before."""
    while (remaining := deadline.remaining()) > 0:
        connection.settimeout(max(0.001, interpreter_slice(remaining)))
        try:
            if not connection.recv(1):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def _packet(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet and the descriptors in it.

    Raises:
        BlockingIOError: none has come.
        ConnectionResetError: the connection was ended.
        OSError: EMFILE, where the system had no room for a descriptor.
    """
    packet, descriptors, flags, _ = socket.recv_fds(connection, _LONGEST, 4)
    # Python before 3.12 passes no flags on to the kernel, so not MSG_CMSG_CLOEXEC.
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if flags & socket.MSG_CTRUNC:  # the system had no room for a descriptor
        _close(descriptors)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not packet:
        raise ConnectionResetError("rank 0 ended the connection")
    return packet, list(descriptors)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _key(token: str, secret: bytes | None) -> bytes:
    return proof(secret or b"", "arena", token.encode())


def _is_proof(answer: bytes, key: bytes, side: str, rank: int, nonces: bytes) -> bool:
    return is_proof(answer, key, side, struct.pack("<I", rank), nonces)


def _proof(key: bytes, side: str, rank: int, nonces: bytes) -> bytes:
    return proof(key, side, struct.pack("<I", rank), nonces)
