"""The server's side of one connection: its input, its output and its stage."""

from __future__ import annotations

import enum
import os
import socket
from collections import deque
from collections.abc import Iterable

from torchestra.store.table import PendingPop, PendingWait
from torchestra.store.tcp.protocol import (
    HELLO_SIZE,
    REFUSAL,
    VERSION,
    AuthMethod,
    Buffer,
    Decoder,
    Hello,
    Outcome,
    ProtocolError,
    RefusedError,
)
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES, is_proof, proof

_CHUNK = 1 << 18


class Stage(enum.Enum):
    """The stage of a connection."""

    HELLO = enum.auto()
    PROOF = enum.auto()
    READY = enum.auto()


class Peer:
    """One connection. Everything that can go wrong with it is an OSError or a ProtocolError.

    Args:
        secret: the client must prove that it knows it; None if there is none.
        other_user: the user id of a client that is to be refused because it belongs to another user.
        instance: the server's; default: one of this connection.

    Attributes:
        stage: unauthenticated connections are at HELLO or PROOF, clients at READY.
        wait: the parked request, if the client waits for a key.
        own: whether the client lives in the server's process.
        answered: how many requests have been answered.
        last: the last answer; None if there is none, or if it is too long to be kept.
        deadline: when the stage or the wait ends, in seconds of the monotonic clock; None if never.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes | None,
        other_user: int | None = None,
        instance: bytes = b"",
    ) -> None:
        self.connection = connection
        self.stage = Stage.HELLO
        self.wait: PendingWait | PendingPop | None = None
        self.deadline: float | None = None
        self.closed = False
        self.own = False
        self.answered = 0
        self.last: Outcome | None = None
        self._secret = secret
        self._other_user = other_user
        self._decoder = Decoder()
        self._outbox: deque[memoryview] = deque()
        self._instance = instance
        self._nonce = b""
        self._client_nonce = b""

    @property
    def is_unauthenticated(self) -> bool:
        """Return whether the handshake is not over."""
        return self.stage is not Stage.READY

    @property
    def nonce(self) -> bytes:
        """Return the client's, which names the connection."""
        return self._client_nonce

    @property
    def sending(self) -> bool:
        """Return whether there is unsent output; nothing is read meanwhile."""
        return bool(self._outbox)

    @property
    def backlog(self) -> int:
        """Return how many pieces of output are unsent."""
        return len(self._outbox)

    @property
    def has_more(self) -> bool:
        """Return whether bytes have arrived that belong to no request answered or parked so far."""
        return len(self._decoder) > 0

    @property
    def has_gone(self) -> bool:
        """Return whether the client is known to have hung up; the server asks this of waiting clients."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def receive(self) -> None:
        """Read what has arrived, up to a quarter of a megabyte, so that other clients get their turn.

        From an unauthenticated client, read no more than the next step of the handshake.
        """
        try:
            data = self.connection.recv(self._wanted())
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionResetError("the client has gone")
        self._decoder.feed(data)
        if self.wait is not None:
            raise ProtocolError("a request came while another one was waiting")

    def send(self, buffers: Iterable[Buffer]) -> None:
        """Send as much as the socket takes and keep the rest for :meth:`flush`."""
        self._outbox.extend(memoryview(buffer) for buffer in buffers)
        self.flush()

    def flush(self) -> None:
        """Send more of the pending output."""
        while self._outbox:
            buffer = self._outbox[0]
            try:
                sent = self.connection.send(buffer)
            except (BlockingIOError, InterruptedError):
                return
            if sent == len(buffer):
                self._outbox.popleft()
            else:
                self._outbox[0] = buffer[sent:]

    def shake_hands(self) -> bool:
        """Process the part of the handshake that has arrived; return whether there was progress."""
        if self.stage is Stage.HELLO:
            return self._read_hello()
        return self._verify()

    def name(self) -> str:
        """Return where the other end is, for messages."""
        try:
            where = self.connection.getpeername()
        except OSError:
            return "a client that has gone"
        return f"a client at {where[0]}:{where[1]}" if isinstance(where, tuple) else "a client on this host"

    def next_message(self) -> tuple[int, list[bytes]] | None:
        """Return the next request, if it has arrived completely."""
        return self._decoder.message()

    def _wanted(self) -> int:
        if self.stage is Stage.READY:
            return self._decoder.bytes_wanted(_CHUNK)
        return (HELLO_SIZE if self.stage is Stage.HELLO else PROOF_BYTES) - len(self._decoder)

    def _read_hello(self) -> bool:
        if not Hello.could_be(self._decoder.start(), from_client=True):
            raise ProtocolError("a stranger")
        data = self._decoder.take(HELLO_SIZE)
        if data is None:
            return False
        hello = Hello.decode(data, from_client=True)
        method = AuthMethod.NONE if self._secret is None else AuthMethod.HMAC_SHA256
        if self._other_user is not None:
            method = AuthMethod.OTHER_USER
        self._client_nonce = hello.nonce
        self.own = hello.own
        self._nonce = self._instance + os.urandom(NONCE_BYTES - len(self._instance))
        self.send([Hello(method, self._nonce).encode(from_client=False)])
        if hello.version != VERSION:
            raise ProtocolError("another version")
        if self._other_user is not None:
            raise RefusedError(f"it is a process of another user (number {self._other_user})")
        if hello.method != method:
            raise RefusedError(
                "it has no secret" if self._secret else "it has a secret, and this server none"
            )
        self.stage = Stage.READY if self._secret is None else Stage.PROOF
        return True

    def _verify(self) -> bool:
        assert self._secret is not None
        answer = self._decoder.take(PROOF_BYTES)
        if answer is None:
            return False
        if not is_proof(answer, self._secret, "store client", self._client_nonce, self._nonce):
            self.send([REFUSAL])
            raise RefusedError("it has another secret")
        self.send([proof(self._secret, "store server", self._client_nonce, self._nonce)])
        self.stage = Stage.READY
        return True
