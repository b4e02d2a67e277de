"""Proofs for values in a store that authenticates nobody: their writer knows the secret.

A value is written in one piece, or appended in several. Each piece bears an HMAC-SHA256 of the key and its
content, so it is believed under that key only. Numbers that are counted up in the store have none. Whoever
reaches the store can still take away, repeat or put in another order what others have written.
"""

from __future__ import annotations

import struct

from torchestra.errors import DistStoreError
from torchestra.system.authentication import is_proof, proof

_MAGIC = b"\0torchestra\0"
_HEAD = struct.Struct("<Q32s")
_PURPOSE = "store value"


class UnauthenticatedValueError(DistStoreError):
    """A value in a store was put there by somebody who does not know the job's secret."""


def prove(secret: bytes, key: str, content: bytes) -> bytes:
    """Return a piece of the value of a key, with its proof."""
    return _MAGIC + _HEAD.pack(len(content), proof(secret, _PURPOSE, key.encode(), content)) + content


def is_authenticated(value: bytes) -> bool:
    """Return whether a value bears a proof, right or wrong."""
    return value.startswith(_MAGIC)


def open_pieces(secret: bytes, key: str, value: bytes) -> bytes | None:
    """Return the value of a key without the proofs; None if a piece has none, or a wrong one.

    A value of no pieces is nobody's: an empty one is written as a piece, too.
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
