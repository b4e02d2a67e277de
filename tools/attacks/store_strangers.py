"""Strangers at a store with a secret: silent ones, half handshakes, nonsense, wrong proofs."""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack

from tools.attacks import Outcome
from tools.attacks._flood import SILENCE, Flood
from tools.attacks._target import Watched

from torchestra.store import TCPStore, TCPStoreServer
from torchestra.store.tcp.protocol import AuthMethod, Hello
from torchestra.store.tcp.server import MAX_UNAUTHENTICATED
from torchestra.system.authentication import NONCE_BYTES, PROOF_BYTES

SECRET = b"between us"


def attack(seconds: float) -> Outcome:
    """Serve clients, those that come anew among them, while thousands of others stand around."""
    outcome = Outcome()
    hello = Hello(AuthMethod.HMAC_SHA256, bytes(NONCE_BYTES)).encode(from_client=True)
    without = Hello(AuthMethod.NONE, bytes(NONCE_BYTES)).encode(from_client=True)
    talks = [
        SILENCE,
        (b"GET / HTTP/1.1\r\n\r\n",),
        (hello[:5],),
        (hello,),
        (hello, os.urandom(PROOF_BYTES)),
        (without, struct.pack(">BI", 1, 2**32 - 1)),
        (os.urandom(2000),),
    ]
    with ExitStack() as stack:
        server = stack.enter_context(TCPStoreServer(secret=SECRET))
        client = TCPStore(server.host, server.port, secret=SECRET)
        stack.callback(client.close)
        watched = stack.enter_context(Watched(outcome, MAX_UNAUTHENTICATED + 50))

        def ask() -> None:
            assert client.add("served", 1) > 0
            newcomer = TCPStore(server.host, server.port, secret=SECRET)
            newcomer.add("served", 1)
            newcomer.close()

        with Flood((server.host, server.port), talks) as flood:
            for number in watched.serve(seconds, ask):
                outcome.tried["clients served"] = number
        outcome.tried["strangers"] = flood.seen["opened"]
        outcome.refused["strangers"] = flood.seen["ended"]
        outcome.expect(client.list_keys() == ["served"], "a stranger wrote into the store")
    return outcome
