"""Proofs that a process knows the job's secret: HMAC-SHA256, for all protocols.

A proof is made for one purpose and some parts. The purpose keeps a proof for one protocol from being used in
another; in a handshake the parts are both sides' nonces, so that it is good for one connection only. Each
part is preceded by its length, so two different lists of parts never have the same proof.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

_LENGTH = struct.Struct("<Q")


def proof(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the proof that the caller knows ``secret``, for a purpose and some parts."""
    text = hmac.new(secret, f"torchestra {purpose}\0".encode(), hashlib.sha256)
    for part in parts:
        text.update(_LENGTH.pack(len(part)))
        text.update(part)
    return text.digest()


def is_proof(given: bytes, secret: bytes, purpose: str, *parts: bytes) -> bool:
    """Return whether ``given`` is the :func:`proof` for these arguments, compared in constant time."""
    return hmac.compare_digest(given, proof(secret, purpose, *parts))
