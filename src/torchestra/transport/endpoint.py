"""Endpoint records and a ZAP authenticator, by which ranks on different hosts trust each other's keys.

Each rank makes a CURVE key pair for this one meeting, and leaves in the store an *endpoint record*: its
address, its public key, and the proof that whoever wrote it knows the job's secret (HMAC-SHA256). The proof
is for one key of the store, so a record that somebody copies to the key of another rank or group is rejected.
Nobody else can make a record, and an old one is useless without its private key, which never leaves its rank.
ZeroMQ's handshake then proves both sides' keys, encrypts what
follows, and asks the *authenticator* (ZAP, 27/ZAP of the ZeroMQ RFCs) whether a client's key is in a record.
The authenticator admits it under its rank and a connection number, and ZeroMQ marks every message from it
with these. Nobody without such a key gets a message through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from torchestra.errors import DistNetworkError
from torchestra.store.secret import SECRET_ADVICE
from torchestra.store.unreadable import reading
from torchestra.system.authentication import PROOF_BYTES, is_proof, proof

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"torchestra"
_PURPOSE = "endpoint record"
_KEY_BYTES = 32


class EndpointRecord(NamedTuple):
    """The address and the public key of a rank.

    Attributes:
        address: as ZeroMQ writes it, ``tcp://10.0.0.1:40123``.
        key: its public key, in Z85.
    """

    address: str
    key: bytes

    def encode(self, secret: bytes, store_key: str) -> bytes:
        """Return the record with its proof, for the store. ``store_key``: its key, prefixes included."""
        content = z85.decode(self.key) + self.address.encode()
        return proof(secret, _PURPOSE, store_key.encode(), content) + content


def read_endpoint(text: bytes, secret: bytes, store_key: str, owner: str) -> EndpointRecord:
    """Check the record of a rank, and return it.

    Args:
        store_key: the key that the record was stored under, prefixes included.
        owner: the rank, for messages.

    Raises:
        DistNetworkError: whoever wrote it does not know the secret.
        DistStoreError: it is no record all the same.
    """
    content = text[PROOF_BYTES:]
    if not is_proof(text[:PROOF_BYTES], secret, _PURPOSE, store_key.encode(), content):
        raise DistNetworkError(
            f"what the store says of the address of {owner} was written by somebody who does not know this"
            f" job's secret, and is not trusted; {SECRET_ADVICE}"
        )
    with reading(f"the address of {owner}"):
        if len(content) <= _KEY_BYTES:
            raise ValueError(f"{len(content)} bytes are no key and address")
        return EndpointRecord(content[_KEY_BYTES:].decode("ascii"), z85.encode(content[:_KEY_BYTES]))


class ZapAuthenticator:
    """Admits the ranks that are expected, on the thread that calls :meth:`answer`.

    Attributes:
        ranks: the expected ranks, by public key in Z85.
        refused: how many requests had a key of no expected rank.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)
        self.ranks: Mapping[bytes, int] = {}
        self.refused = 0
        self._accepted = 0

    def answer(self, admitting: Callable[[int], None]) -> None:
        """Answer the requests that have come.

        Args:
            admitting: called with the number of a connection before that is admitted.
        """
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = None
            if len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == 32:
                rank = self.ranks.get(z85.encode(request[6]))
            version, request_id = (*request, b"", b"")[:2]
            if rank is None:
                self.refused += 1
                self.socket.send_multipart([version, request_id, b"400", b"not expected", b"", b""])
            else:
                self._accepted += 1
                admitting(self._accepted)
                user = b"%d %d" % (rank, self._accepted)
                self.socket.send_multipart([version, request_id, b"200", b"", user, b""])
