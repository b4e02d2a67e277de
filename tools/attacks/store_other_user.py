"""Another user's processes at a store without a secret, which is for one user's processes on one host."""

from __future__ import annotations

import os
import struct

from tools.attacks import Outcome
from tools.attacks._flood import SILENCE, Flood
from tools.attacks._target import NOBODY, Watched, root_only

from torchestra.store import TCPStore, TCPStoreServer
from torchestra.store.tcp.protocol import AuthMethod, Hello
from torchestra.store.tcp.server import MAX_UNAUTHENTICATED
from torchestra.system.authentication import NONCE_BYTES

hindrance = root_only


def attack(seconds: float) -> Outcome:
    """Serve this user's clients, over TCP and over a Unix socket, while another user says what they would."""
    outcome = Outcome()
    for host in ("127.0.0.1", f"unix:@torchestra-attack-{os.getpid()}"):
        _serve(outcome, host, seconds / 2)
    return outcome


def _serve(outcome: Outcome, host: str, seconds: float) -> None:
    hello = Hello(AuthMethod.NONE, bytes(NONCE_BYTES)).encode(from_client=True)
    talks = [SILENCE, (hello,), (hello, struct.pack(">BI", 1, 3) + b"abc")]
    with TCPStoreServer(host, secret=None) as server, Watched(outcome, MAX_UNAUTHENTICATED + 50) as watched:
        client = TCPStore(server.host, server.port)
        address = server.host.removeprefix("unix:@") if server.port == 0 else (server.host, server.port)
        with Flood(address, talks, most=500, user=NOBODY) as flood:
            for number in watched.serve(seconds, lambda: client.add("served", 1)):
                outcome.tried[f"requests served at {host}"] = number
        outcome.tried["strangers"] += flood.seen["opened"]
        outcome.refused["strangers"] += flood.seen["ended"]
        outcome.expect(client.list_keys() == ["served"], "another user wrote into the store")
        client.close()
