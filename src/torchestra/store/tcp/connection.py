"""The client's side of one connection: the handshake, then one request and its reply at a time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from torchestra.errors import DistNetworkError, InvalidArgumentError
from torchestra.store.secret import SECRET_ADVICE, SECRET_VARIABLE
from torchestra.store.tcp.address import Address, dial, wait_ready
from torchestra.store.tcp.locality import CLOSED, peer_user
from torchestra.store.tcp.protocol import (
    HELLO_SIZE,
    INSTANCE_BYTES,
    REFUSAL,
    VERSION,
    AuthMethod,
    Buffer,
    Decoder,
    Hello,
    ProtocolError,
    encode,
)
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES, is_proof, proof

_CHUNK = 1 << 20
_HANDSHAKE_SECONDS = 15.0


class Connection:
    """A connection that has been accepted by a server of this protocol and version.

    Args:
        address: where the server listens.
        secret: both sides prove that they know it; None if there is none.
        deadline: when to stop trying, on the monotonic clock.
        own: whether the server is in this process.

    Raises:
        OSError: there is no server yet, or it went away; another try makes sense. A TimeoutError means
            that the server accepted the connection and then sent nothing for a while.
        DistNetworkError: another kind of server listens there, or one of another version or secret; or
            there is no secret, and the server is on another host or of another user.

    Attributes:
        instance: the server's (protocol.py).
        asked: whether the last request has been sent whole; if not, the server has not executed it.
        nonce: the client's, which names the connection.
        answered: how many requests have been answered.
    """

    def __init__(self, address: Address, secret: bytes | None, deadline: float, *, own: bool = False) -> None:
        self._address = address
        self._own = own
        self._decoder = Decoder()
        self.instance, self.asked = b"", False
        self.nonce, self.answered = os.urandom(NONCE_BYTES), 0
        self._socket = dial(address, deadline, secured=secret is not None)
        try:
            self._shake_hands(secret, min(deadline, time.monotonic() + _HANDSHAKE_SECONDS))
        except BaseException:
            self.close()
            raise

    def request(self, code: int, fields: Sequence[bytes], deadline: float) -> tuple[int, list[bytes]]:
        """Send a request and return the reply's code and fields.

        Raises:
            InvalidArgumentError: the request is too large; nothing has been sent.
            ProtocolError: the reply makes no sense.
            OSError: the connection broke, or (TimeoutError) the deadline passed. The connection is then
                unusable.
        """
        try:
            message = encode(code, fields)
        except ProtocolError as error:
            raise InvalidArgumentError(f"TCPStore({self._address}): {error}") from None
        self.asked = False
        self._check_connected()
        self._send(message, deadline)
        self.asked = True
        while True:
            reply = self._decoder.message()
            if reply is not None:
                self.answered += 1
                return reply
            self._receive(deadline)

    def close(self) -> None:
        """Close the connection; the server drops its pending wait."""
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, for its new owner to use and close; nothing has been read from it in advance."""
        return self._socket

    def interrupt(self) -> None:
        """Make the pending request of another thread fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _check_connected(self) -> None:
        """Raise an OSError if the connection is known to have broken while it was not in use."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the server closed the connection")

    def _shake_hands(self, secret: bytes | None, deadline: float) -> None:
        method = AuthMethod.NONE if secret is None else AuthMethod.HMAC_SHA256
        nonce = self.nonce
        self._send([Hello(method, nonce, own=self._own).encode(from_client=True)], deadline)
        theirs = self._server_hello(deadline)
        self.instance = theirs.nonce[:INSTANCE_BYTES]
        if theirs.version != VERSION:
            raise DistNetworkError(
                f"the store at {self._address} speaks version {theirs.version} of the protocol, this process "
                f"version {VERSION}; use the same torchestra on all ranks"
            )
        if theirs.method == AuthMethod.OTHER_USER:
            raise self._another_user("another user's")
        if theirs.method != method:
            sides = ("the server", "this process")
            one, other = sides if secret is None else reversed(sides)
            raise DistNetworkError(
                f"TCPStore({self._address}): {one} has a secret and {other} has none; "
                f"give both the same one ({SECRET_VARIABLE})"
            )
        if secret is None:
            self._check_user()
            return
        self._send([proof(secret, "store client", nonce, theirs.nonce)], deadline)
        # A server that closes the connection here was too busy: had it refused, it would have said so.
        answer = self._take(PROOF_BYTES, deadline)
        if is_proof(answer, secret, "store server", nonce, theirs.nonce):
            return
        whose = "the server and this process have different secrets"
        if answer != REFUSAL:
            whose = "what listens there does not know this process's secret, though it took its proof"
        raise DistNetworkError(
            f"TCPStore({self._address}): {whose}; "
            f"give both the same one ({SECRET_VARIABLE}), or is it another job's port?"
        )

    def _check_user(self) -> None:
        """Without a secret, check that the server is this user's; after its hello the kernel knows."""
        user = peer_user(self._socket)
        if user == CLOSED:
            raise ConnectionResetError("the server closed the connection")
        if user not in (None, os.geteuid()):
            raise self._another_user(f"another user's (number {user})")

    def _another_user(self, whose: str) -> DistNetworkError:
        return DistNetworkError(
            f"TCPStore({self._address}): the server is {whose}, and there is no secret by which to know "
            f"this process; is the port another job's? If the two are meant to meet, {SECRET_ADVICE}"
        )

    def _server_hello(self, deadline: float) -> Hello:
        while len(self._decoder) < HELLO_SIZE and Hello.could_be(self._decoder.start(), from_client=False):
            self._receive(deadline)
        try:
            return Hello.decode((self._decoder.take(HELLO_SIZE) or b"").ljust(HELLO_SIZE), from_client=False)
        except ProtocolError:
            raise DistNetworkError(
                f"what listens at {self._address} is not a torchestra store; is the port another program's?"
            ) from None

    def _take(self, size: int, deadline: float) -> bytes:
        while True:
            data = self._decoder.take(size)
            if data is not None:
                return data
            self._receive(deadline)

    def _send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    wait_ready(self._socket, select.POLLOUT, _remaining(deadline))

    def _receive(self, deadline: float) -> None:
        data = None
        # The reply to a request just sent is not there yet, so the wait comes first.
        while data is None:
            if wait_ready(self._socket, select.POLLIN, _remaining(deadline)):
                with contextlib.suppress(BlockingIOError):
                    data = self._socket.recv(self._decoder.bytes_wanted(_CHUNK))
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._decoder.feed(data)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the server did not answer")
    return remaining
