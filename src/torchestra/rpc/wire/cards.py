"""How workers on different hosts come to trust each other's keys: calling cards, and a doorkeeper.

Each worker makes a CURVE key pair for this one meeting, and leaves in the store a *card*: its address, its
public key, and the proof that whoever wrote the card knows the job's secret (HMAC-SHA256). Nobody else can
make one, and a card of another meeting is of no use to whoever has not its private key, which never leaves
its worker. ZeroMQ's handshake then proves both sides' keys, encrypts what follows, and asks the *doorkeeper*
(ZAP, 27/ZAP of the ZeroMQ RFCs) whether a client's key is on a card; it is let in under its worker's rank,
and ZeroMQ marks every message of it with that. Whoever has no card gets no message through.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from torchestra.errors import RpcError
from torchestra.store.secret import SECRET_ADVICE

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"torchestra"


class Card(NamedTuple):
    """How a worker is to be reached.

    Attributes:
        address: as ZeroMQ writes it, ``tcp://10.0.0.1:40123``.
        key: its public key, in Z85.
    """

    address: str
    key: bytes

    def written(self, secret: bytes, rank: int, meeting: str) -> str:
        """For the store, with its proof."""
        key = self.key.decode()
        proof = _proof(secret, rank, meeting, self.address, key)
        return json.dumps({"address": self.address, "key": key, "proof": proof})


def read_card(text: bytes, secret: bytes, rank: int, meeting: str, name: str) -> Card:
    """The card of a worker.

    Raises:
        RpcError: whoever wrote it does not know the secret.
    """
    try:
        card = json.loads(text)
        address, key, proof = str(card["address"]), str(card["key"]), str(card["proof"])
        genuine = hmac.compare_digest(proof, _proof(secret, rank, meeting, address, key))
    except (ValueError, KeyError, TypeError):
        genuine = False
    if not genuine:
        raise RpcError(
            f"what the store says of the address of worker {name!r} (rank {rank}) was written by somebody who"
            f" does not know this worker's secret, and is not trusted; {SECRET_ADVICE}"
        )
    return Card(address, key.encode())


def _proof(secret: bytes, rank: int, meeting: str, address: str, key: str) -> str:
    text = json.dumps(["torchestra rpc card", meeting, rank, address, key])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


class Doorkeeper:
    """Lets in who has a card. Lives in the thread that calls :meth:`answer`.

    Args:
        context: whose sockets it keeps.

    Attributes:
        ranks: which worker has which public key, in Z85.
        refused: how many keys were another's.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)
        self.ranks: Mapping[bytes, int] = {}
        self.refused = 0

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
                self.socket.send_multipart([version, number, b"400", b"no card", b"", b""])
            else:
                self.socket.send_multipart([version, number, b"200", b"", str(rank).encode(), b""])
