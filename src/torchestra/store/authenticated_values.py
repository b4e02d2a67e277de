"""Proofs that the writer of a value knows the secret, for stores that authenticate nobody.

A value is written in one piece, or appended in several. Each piece bears an HMAC-SHA256 of the key and its
content, so it is believed under that key only. Numbers that the store itself adds up have none. Anybody
who can reach the store can still remove, repeat or reorder the pieces that others have written.
"""

from __future__ import annotations

import struct

from torchestra.errors import DistStoreError
from torchestra.system.authentication import is_proof, proof

_MAGIC = b"\0torchestra\0"
_HEAD = struct.Struct("<Q32s")
_PURPOSE = "store value"


class UnauthenticatedValueError(DistStoreError):
    """A value in a store was written by somebody who does not know the job's secret."""


def prove(secret: bytes, key: str, content: bytes) -> bytes:
    """Return one piece of a key's value, with its proof."""
    return _MAGIC + _HEAD.pack(len(content), proof(secret, _PURPOSE, key.encode(), content)) + content


def is_authenticated(value: bytes) -> bool:
    """Return whether a value bears a proof, right or wrong."""
    return value.startswith(_MAGIC)


def open_pieces(secret: bytes, key: str, value: bytes) -> bytes | None:
    """Return the value of a key without the proofs; None if a piece has none, or a wrong one.

    A value without any piece counts as unproven: an empty value is written as a piece, too.
    """
    pieces, start, head = [], 0, len(_MAGIC) + _HEAD.size
    while start < len(value):
        if not value.startswith(_MAGIC, start) or len(value) < start + head:
            return None
        length, their_proof = _HEAD.unpack_from(value, start + len(_MAGIC))
        content = value[start + head : start + head + length]
        if not is_proof(their_proof, secret, _PURPOSE, key.encode(), content):
            return None
        pieces.append(content)
        start += head + length
    return b"".join(pieces) if pieces else None
