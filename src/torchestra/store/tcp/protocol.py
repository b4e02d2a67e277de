"""The protocol between a TCPStore and its server. Bytes only: nothing is ever unpickled.

A connection begins with a handshake of fixed size::

    client  ->  b"tstr" version:u8 method:u8 own:u16  nonce:32 bytes
    server  ->  b"TSTR" version:u8 method:u8   0:u16  nonce:32 bytes
    if the server's method is HMAC:
    client  ->  proof(secret, "store client", both nonces)      (system/authentication.py)
    server  ->  proof(secret, "store server", both nonces)

Each side proves that it knows the secret by answering the other's random challenge; the secret itself
never travels, and a proof is good for one connection only. To a wrong proof the server answers with
:data:`REFUSAL`, so that the client can tell it from a server that was too busy and let the connection go.
A side that finds that the other's version or method differs from its own sends its part and closes the
connection. ``own`` is 1 if the client is in the server's process, so that the server can tell whether other
clients are left when that process ends. The first 8 bytes of the server's nonce, its *instance*, are the same
on all its connections: by these a client that connects anew knows that it has not reached another server,
without the keys, that was started at the same address.

The client's nonce names the connection: if it breaks after a request that changes something, the client sends
that request once more over another one, as a :attr:`Request.RESUME` that has this name and the request's
number on the connection, from 1. The server remembers what it answered last on connections that have ended,
and gives that answer again, or carries the request out if it never came.

After that the client sends requests and the server answers each with one reply, both as messages::

    message = code:u8  length:u32  field*        (big-endian; length is that of the fields)
    field   = length:u32  bytes

Keys are UTF-8; numbers (amounts, counts, milliseconds) are decimal text. See :class:`Request`
for the fields of each request. While a request waits at the server (its key does not exist yet), the client
may send nothing else on that connection; to give up, it closes the connection.

Limits: a message may have up to :data:`MAX_MESSAGE` bytes, 1 GiB, so that values of hundreds of
megabytes pass, and :data:`MAX_FIELDS` fields. A reader allocates memory only for bytes that have arrived,
so a false length costs it nothing. Until the handshake is done only its fixed size is read.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Union

from torchestra.system.authentication import PROOF_BYTES

VERSION = 2
MAX_MESSAGE = 1 << 30
MAX_FIELDS = 1 << 20
REFUSAL = bytes(PROOF_BYTES)
INSTANCE_BYTES = 8

_HELLO = struct.Struct(">4sBBH32s")
HELLO_SIZE = _HELLO.size
_HEAD = struct.Struct(">BI")
_LENGTH = struct.Struct(">I")
_CLIENT_MAGIC = b"tstr"
_SERVER_MAGIC = b"TSTR"

_MIN_WANTED = 4096

Buffer = Union[bytes, memoryview]


class ProtocolError(Exception):
    """The other side violates the protocol."""


class RefusedError(ProtocolError):
    """The other side follows the protocol, but does not belong to this job."""


class AuthMethod(enum.IntEnum):
    """How the two sides authenticate each other."""

    NONE = 0
    HMAC_SHA256 = 1
    OTHER_USER = 2  # sent by a server without a secret to a client of another user, which it refuses


class Request(enum.IntEnum):
    """Requests and their fields."""

    SET = 1  # (key value)*
    GET = 2  # milliseconds key*
    ADD = 3  # key amount
    COMPARE_SET = 4  # key expected desired
    CHECK = 5  # key*
    WAIT = 6  # milliseconds key*
    DELETE = 7  # key
    LIST = 8  #
    APPEND = 9  # key value
    PUSH = 10  # key value
    POP = 11  # milliseconds key; no milliseconds (empty): do not wait
    QUEUE_LENGTH = 12  # key
    RESUME = 13  # nonce number code field*: one of CHANGES, sent before over a connection that broke


CHANGES = frozenset(
    {Request.SET, Request.ADD, Request.COMPARE_SET, Request.DELETE, Request.APPEND, Request.PUSH}
)
"""Requests that change something and are answered at once."""


class Reply(enum.IntEnum):
    """The outcome of a request. The fields of OK are its results; a truth value is ``1`` or ``0``."""

    OK = 1
    MISSING = 2  # the keys that did not come in time
    EMPTY = 3  # nothing in the queue
    REFUSED = 4  # one field: why
    REDIRECT = 5  # of a replica that is not the primary: the index of the one that is, if it is known
    FORGOTTEN = 6  # of RESUME: the server does not remember that connection, or what it answered last


Outcome = tuple[Reply, list[bytes]]
"""A reply's code and fields."""


class Hello:
    """The first message of either side."""

    __slots__ = ("method", "nonce", "own", "version")

    def __init__(self, method: int, nonce: bytes, version: int = VERSION, *, own: bool = False) -> None:
        self.method = method
        self.nonce = nonce
        self.version = version
        self.own = own

    def encode(self, *, from_client: bool) -> bytes:
        """Return the message."""
        magic = _CLIENT_MAGIC if from_client else _SERVER_MAGIC
        return _HELLO.pack(magic, self.version, self.method, self.own, self.nonce)

    @classmethod
    def decode(cls, data: bytes, *, from_client: bool) -> Hello:
        """Decode a hello; raise :class:`ProtocolError` if ``data`` is none."""
        magic, version, method, own, nonce = _HELLO.unpack(data)
        if magic != (_CLIENT_MAGIC if from_client else _SERVER_MAGIC):
            raise ProtocolError(f"not a hello: {magic!r}")
        return cls(method, nonce, version, own=own == 1)

    @staticmethod
    def could_be(start: bytes | bytearray, *, from_client: bool) -> bool:
        """Return whether an incomplete message can become a hello."""
        magic = _CLIENT_MAGIC if from_client else _SERVER_MAGIC
        return magic.startswith(bytes(start[: len(magic)]))


def encode(code: int, fields: Sequence[bytes]) -> list[Buffer]:
    """Return a message as buffers to be sent one after the other; large fields are not copied.

    Raises:
        ProtocolError: it would exceed :data:`MAX_MESSAGE` bytes or :data:`MAX_FIELDS` fields.
    """
    if len(fields) > MAX_FIELDS:
        raise ProtocolError(f"{len(fields)} fields are more than a message may have ({MAX_FIELDS})")
    size = sum(len(field) for field in fields) + _LENGTH.size * len(fields)
    if size > MAX_MESSAGE:
        raise ProtocolError(f"{size} bytes are more than a message may have ({MAX_MESSAGE})")
    buffers: list[Buffer] = []
    small = bytearray(_HEAD.pack(code, size))
    for field in fields:
        small += _LENGTH.pack(len(field))
        if len(field) < 65536:
            small += field
        else:
            buffers += (bytes(small), memoryview(field))
            small = bytearray()
    if small:
        buffers.append(bytes(small))
    return buffers


def number(field: bytes) -> int:
    """Return the number in a field; raise :class:`ProtocolError` if it holds none of a sensible length."""
    try:
        if len(field) > 40:
            raise ValueError
        return int(field)
    except ValueError:
        raise ProtocolError("a number was expected") from None


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self._buffer)

    def bytes_wanted(self, most: int) -> int:
        """Return how many bytes to receive next: the rest of a message of known length, within bounds.

        The receiver allocates and frees that much memory, which costs much more for a megabyte than for a
        short message.
        """
        if len(self._buffer) < _HEAD.size:
            return _MIN_WANTED
        _, size = _HEAD.unpack_from(self._buffer)
        return min(most, max(_MIN_WANTED, int(_HEAD.size + size - len(self._buffer))))

    def feed(self, data: Buffer) -> None:
        """Add received bytes."""
        self._buffer += data

    def take(self, size: int) -> bytes | None:
        """Return the next ``size`` bytes, or None if they are not all there."""
        if len(self._buffer) < size:
            return None
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def start(self) -> bytes:
        """Return the next bytes, at most four."""
        return bytes(self._buffer[:4])

    def message(self) -> tuple[int, list[bytes]] | None:
        """Return the next message, or None if it is not all there.

        Raises:
            ProtocolError: it is too large, has too many fields, or they do not add up.
        """
        if len(self._buffer) < _HEAD.size:
            return None
        code, size = _HEAD.unpack_from(self._buffer)
        if size > MAX_MESSAGE:
            raise ProtocolError(f"a message of {size} bytes is larger than {MAX_MESSAGE}")
        end = _HEAD.size + size
        if len(self._buffer) < end:
            return None
        fields = []
        with memoryview(self._buffer) as view:
            position = _HEAD.size
            while position < end:
                if position + _LENGTH.size > end:
                    raise ProtocolError("a message ends within the length of a field")
                (length,) = _LENGTH.unpack_from(view, position)
                position += _LENGTH.size
                if position + length > end:
                    raise ProtocolError("a field goes beyond its message")
                fields.append(bytes(view[position : position + length]))
                position += length
                if len(fields) > MAX_FIELDS:
                    raise ProtocolError(f"a message of more than {MAX_FIELDS} fields")
        del self._buffer[:end]
        return code, fields
