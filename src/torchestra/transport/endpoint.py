"""How ranks on different hosts come to trust each other's keys: endpoint records, and a ZAP authenticator.

Each rank makes a CURVE key pair for this one meeting, and leaves in the store an *endpoint record*: its
address, its public key, and the proof that whoever wrote it knows the job's secret (HMAC-SHA256). The proof
is for one key of the store, so a record that somebody copies to another one, that of another rank or of
another group, is not believed. Nobody else can make one, and an old one is of no use to whoever has not its
private key, which never leaves its rank. ZeroMQ's handshake then proves both sides' keys, encrypts what
follows, and asks the *authenticator* (ZAP, 27/ZAP of the ZeroMQ RFCs) whether a client's key is in a record;
it is let in under its rank and a number of the connection, and ZeroMQ marks every message of it with these.
Whoever has none gets no message through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from torchestra.errors import DistNetworkError
from torchestra.store.secret import SECRET_ADVICE
from torchestra.system.authentication import PROOF_BYTES, is_proof, proof

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"torchestra"
_PURPOSE = "endpoint record"
_KEY_BYTES = 32


class EndpointRecord(NamedTuple):
    """How a rank is to be reached.

    Attributes:
        address: as ZeroMQ writes it, ``tcp://10.0.0.1:40123``.
        key: its public key, in Z85.
    """

    address: str
    key: bytes

    def written(self, secret: bytes, place: str) -> bytes:
        """For the store, with its proof. ``place``: the whole key there, prefixes included."""
        content = z85.decode(self.key) + self.address.encode()
        return proof(secret, _PURPOSE, place.encode(), content) + content


def read_endpoint(text: bytes, secret: bytes, place: str, whose: str) -> EndpointRecord:
    """Return the record of a rank.

    Args:
        text: what the store has.
        secret: the job's.
        place: under which key, prefixes included.
        whose: the rank, for messages.

    Raises:
        DistNetworkError: whoever wrote it does not know the secret.
    """
    given, content = text[:PROOF_BYTES], text[PROOF_BYTES:]
    if not is_proof(given, secret, _PURPOSE, place.encode(), content):
        raise DistNetworkError(
            f"what the store says of the address of {whose} was written by somebody who does not know this"
            f" job's secret, and is not trusted; {SECRET_ADVICE}"
        )
    return EndpointRecord(content[_KEY_BYTES:].decode(), z85.encode(content[:_KEY_BYTES]))


class ZapAuthenticator:
    """Lets in ranks that are expected. Lives in the thread that calls :meth:`answer`.

    Args:
        context: whose sockets it keeps.

    Attributes:
        ranks: which rank has which public key, in Z85.
        refused: how many keys were another's.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)
        self.ranks: Mapping[bytes, int] = {}
        self.refused = 0
        self._accepted = 0

    def answer(self) -> None:
        """Answer what is asked now."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = None
            if len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == 32:
                rank = self.ranks.get(z85.encode(request[6]))
            version, number = (*request, b"", b"")[:2]
            if rank is None:
                self.refused += 1
                self.socket.send_multipart([version, number, b"400", b"not expected", b"", b""])
            else:
                self._accepted += 1
                user = b"%d %d" % (rank, self._accepted)
                self.socket.send_multipart([version, number, b"200", b"", user, b""])
