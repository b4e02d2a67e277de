"""Handing an arena over: rank 0 gives its descriptor to every rank that proves itself, and to nobody else.

It listens at an abstract Unix socket, which leaves nothing in the file system and has a random name, told in
the group's store together with a random token. What is proved is a key made of the token and of the job's
secret, if there is one: that one can read the store, and knows the secret. Both sides also ask the kernel
which user the other one is. One connection carries four packets (SOCK_SEQPACKET, so that none is cut)::

    rank    ->  b"TRC2" rank:u32 nonce:32 bytes
    rank 0  ->  nonce:32 bytes  HMAC-SHA256(key, "rank 0" + rank + both nonces)
    rank    ->  HMAC-SHA256(key, "rank" + rank + both nonces)
    rank 0  ->  a verdict, and with :data:`_GIVEN` the descriptor

Whoever has the descriptor may keep the connection, and hears by its end that rank 0 is done, or gone.

Nobody can listen under rank 0's name while rank 0 lives; whoever does so afterwards fails the second step.
Connections are served all at once, each has :data:`_VISIT_SECONDS`, and of too many the oldest has to go; a
rank that is dropped comes again. So whoever connects, says nonsense or nothing holds up no rank.
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

__all__ = ["DescriptorServer", "await_end", "fetch", "visit"]

_MAGIC = b"TRC2"
_HELLO = struct.Struct(f"<4sI{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"{NONCE_BYTES}s{PROOF_BYTES}s")
_GIVEN, _TAKEN, _UNPROVED = b"given", b"taken", b"unproved"
_LONGEST = 256

_VISIT_SECONDS = 10.0
_TICK = 0.05
_LONGEST_TICK = 1.0

_log = logging.getLogger(__name__)


class _Visitor(NamedTuple):
    """What a connection that was challenged has said and been told."""

    rank: int
    nonces: bytes


class DescriptorServer:
    """Rank 0's side. Use it as a context manager; call :meth:`serve` until nobody is :attr:`waited_for`.

    Args:
        ranks: who is to be given the descriptor, each once; a range may be large, it is not gone through.
        secret: the job's, or None.
        name: of the group, for the log.
        taken: those of the ranks that need nothing, and that nobody else may be.
        keeps: hold the connections of those who have been given the descriptor until :meth:`close`, or until
            they end them, which :meth:`ended` tells.

    Attributes:
        invitation: what the others must be told through the store.
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
    ) -> None:
        address, token = f"torchestra-{secrets.token_hex(16)}", secrets.token_hex(32)
        self.invitation = f"{address}:{token}"
        self._address = "\0" + address
        self._keeps = keeps
        self._kept: dict[int, tuple[int, socket.socket]] = {}  # by descriptor, and whose
        self._ends = select.poll()
        self.given: list[int] = []
        self._ranks = ranks
        self._taken = set(taken)
        self._key = _key(token, secret)
        self._name = name
        self._refusals = RateLimitedWarnings(_log)
        self._challenged: weakref.WeakKeyDictionary[socket.socket, _Visitor] = weakref.WeakKeyDictionary()
        self._listener = BoundedListener(
            address,
            f"group {name!r}",
            _VISIT_SECONDS,
            lambda: len(self._ranks) - len(self.given),
            self._refusals,
        )

    @property
    def waited_for(self) -> set[int]:
        """The ranks that have not come yet."""
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
        """Have a :meth:`serve` that another thread is in return soon."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.setblocking(False)
            with contextlib.suppress(OSError):
                caller.connect(self._address)

    def serve(self, descriptor: int, seconds: float = _TICK) -> None:
        """Do what can be done; wait for something to do for 50 ms at most, or for so many seconds."""
        for connection in self._listener.ready(seconds):
            self._hear(connection, descriptor)

    def ended(self) -> list[int]:
        """The ranks that have ended their connection, or have died, since this was called last."""
        found = []
        for descriptor, _ in self._ends.poll(0):
            self._ends.unregister(descriptor)
            rank, connection = self._kept.pop(descriptor)
            connection.close()
            found.append(rank)
        return found

    def _hear(self, connection: socket.socket, descriptor: int) -> None:
        given = False
        try:
            packet = connection.recv(_LONGEST)
            visitor = self._challenged.pop(connection, None)
            if visitor is None:
                if self._challenge(connection, packet):
                    return
            else:
                given = self._judge(connection, visitor, packet, descriptor)
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("group %r: lost a process that wanted the group's memory: %s", self._name, error)
        if given and self._keeps:
            self._listener.release(connection)
            self._kept[connection.fileno()] = self.given[-1], connection
            self._ends.register(connection, select.POLLIN)
        else:
            self._listener.drop(connection)

    def _challenge(self, connection: socket.socket, hello: bytes) -> bool:
        """Answer a hello; False if it is none."""
        if len(hello) != _HELLO.size or not hello.startswith(_MAGIC):
            return False
        _, rank, nonce = _HELLO.unpack(hello)
        own = os.urandom(NONCE_BYTES)
        visitor = _Visitor(rank, nonce + own)
        connection.send(_CHALLENGE.pack(own, _proof(self._key, "rank 0", rank, visitor.nonces)))
        self._challenged[connection] = visitor
        return True

    def _judge(self, connection: socket.socket, visitor: _Visitor, given: bytes, descriptor: int) -> bool:
        """Give the descriptor, or say why not; whether it was given."""
        if not _is_proof(given, self._key, "rank", visitor.rank, visitor.nonces):
            self._refusals.warn(
                "group %r: a process that says it is rank %s does not know the group's key: %s",
                self._name,
                visitor.rank,
                SECRET_ADVICE,
            )
            connection.send(_UNPROVED)
        elif visitor.rank not in self._ranks or visitor.rank in self._taken:
            connection.send(_TAKEN)
        else:
            socket.send_fds(connection, [_GIVEN], [descriptor])
            self._taken.add(visitor.rank)
            self.given.append(visitor.rank)
            return True
        return False


def fetch(invitation: str, secret: bytes | None, rank: int, name: str, deadline: float) -> int:
    """Any other rank's side: the descriptor of the arena, which is now the caller's.

    Args:
        invitation: what rank 0 has told in the store.
        secret: the job's, or None.
        rank: this rank.
        name: of the group, for messages.
        deadline: when to stop trying, on the monotonic clock.

    Raises:
        CollectiveTimeoutError: rank 0 did not answer in time.
        DistBackendError: rank 0 is not there, is not what it should be, or refuses this rank.
    """
    descriptor, connection = visit(invitation, secret, rank, name, deadline)
    connection.close()
    return descriptor


def visit(
    invitation: str, secret: bytes | None, rank: int, name: str, deadline: float
) -> tuple[int, socket.socket]:
    """:func:`fetch`, and the connection, for :func:`await_end`; both are the caller's."""
    address, _, token = invitation.partition(":")
    who = f"rank {rank} of group {name!r}"
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(interpreter_slice(_LONGEST_TICK))
            try:
                connection.connect("\0" + address)
                given = _receive(connection, _key(token, secret), rank, who, deadline)
                return given, connection.dup()
            except (ConnectionResetError, BrokenPipeError, BlockingIOError, TimeoutError):
                # Rank 0 had too many visitors, or none of its time for us yet.
                pass
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                raise DistBackendError(
                    f"{who} cannot reach rank 0 on this host ({error}): either rank 0 has failed, or the two"
                    " are on different hosts, whose ranks must meet by env:// or tcp://"
                ) from error
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(f"{who}: rank 0 did not give it the group's memory in time", (0,))
        time.sleep(_TICK)


def _receive(connection: socket.socket, key: bytes, rank: int, who: str, deadline: float) -> int:
    """The descriptor that rank 0 gives over one connection; an OSError means that it is worth a new one."""
    impostor = f"{who}: what answers in rank 0's place"
    if (user := peer_user(connection)) != os.geteuid():
        raise DistBackendError(f"{impostor} is a process of another user (number {user}), and not trusted")
    nonce = os.urandom(NONCE_BYTES)
    connection.send(_HELLO.pack(_MAGIC, rank, nonce))
    answer, descriptors = _packet(connection, deadline)
    _close(descriptors)
    if len(answer) != _CHALLENGE.size:
        raise DistBackendError(f"{impostor} speaks another language: do all ranks run the same torchestra?")
    theirs, proved = _CHALLENGE.unpack(answer)
    nonces = nonce + theirs
    if not _is_proof(proved, key, "rank 0", rank, nonces):
        raise DistBackendError(
            f"{impostor} does not know this rank's secret, and is not trusted; {SECRET_ADVICE}"
        )
    connection.send(_proof(key, "rank", rank, nonces))
    verdict, descriptors = _packet(connection, deadline)
    if verdict == _GIVEN and len(descriptors) == 1:
        return descriptors[0]
    _close(descriptors)
    if verdict == _TAKEN:
        raise DistBackendError(
            f"{who} was refused by rank 0, which has given the group's memory to a rank {rank} already, or"
            " knows no such rank: do two processes claim the same rank?"
        )
    raise DistBackendError(f"{who} was refused by rank 0: {verdict!r}")


def await_end(connection: socket.socket, deadline: float) -> bool:
    """Wait until rank 0 ends a connection that it keeps; False if the deadline comes before."""
    while (remaining := deadline - time.monotonic()) > 0:
        connection.settimeout(max(0.001, interpreter_slice(remaining)))
        try:
            if not connection.recv(1):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def _packet(connection: socket.socket, deadline: float) -> tuple[bytes, list[int]]:
    """The next packet and the descriptors in it.

    Raises:
        TimeoutError: the deadline has come.
        ConnectionResetError: the connection was ended.
        OSError: EMFILE, where the system had no room for a descriptor.
    """
    while True:
        try:
            packet, found, flags, _ = socket.recv_fds(connection, _LONGEST, 4)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        # Python before 3.12 passes no flags on to the kernel, so not MSG_CMSG_CLOEXEC.
        for descriptor in found:
            os.set_inheritable(descriptor, False)
        if flags & socket.MSG_CTRUNC:  # the system had no room for a descriptor
            _close(found)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not packet:
            raise ConnectionResetError("rank 0 ended the connection")
        return packet, list(found)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _key(token: str, secret: bytes | None) -> bytes:
    return proof(secret or b"", "arena", token.encode())


def _is_proof(given: bytes, key: bytes, side: str, rank: int, nonces: bytes) -> bool:
    return is_proof(given, key, side, struct.pack("<I", rank), nonces)


def _proof(key: bytes, side: str, rank: int, nonces: bytes) -> bytes:
    return proof(key, side, struct.pack("<I", rank), nonces)
