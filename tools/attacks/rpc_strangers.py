"""Strangers at the port of an RPC worker: silent ones, half handshakes, nonsense."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from tools.attacks import Outcome
from tools.attacks._flood import SILENCE, Flood
from tools.attacks._target import Watched
from tools.attacks._wires import meet, workers

from torchestra.transport.listener import MAX_UNAUTHENTICATED

FLOOD_SECONDS = 0.2
MESSAGES_SECONDS = 0.2

# That ZeroMQ keeps until the listener reads them: its own end of the monitor has room for 1,000.
EVENTS_KEPT = 1001

# What ZeroMQ says first: signature, version 3.1, and CURVE as the mechanism; then a hello as long as one is.
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\4\xc8\5HELLO\1\0" + bytes(192)


def attack(seconds: float) -> Outcome:
    """Meet among thousands, again and again, and send messages from one worker to the other."""
    outcome = Outcome()
    talks = [
        SILENCE,
        (GREETING[:10],),
        (GREETING,),
        (GREETING, HELLO),
        (b"GET / HTTP/1.1\r\n\r\n" * 20,),
        (os.urandom(300),),
    ]
    until = time.monotonic() + seconds
    while not outcome.tried or time.monotonic() < until:
        _meet_among(outcome, talks)
    return outcome


def _meet_among(outcome: Outcome, talks: Sequence[Sequence[bytes]]) -> None:
    with workers(2) as made, Watched(outcome, 2 * (MAX_UNAUTHENTICATED + EVENTS_KEPT)) as watched:
        first, second = made
        floods = [Flood(worker.address, talks, most=2000) for worker in made]
        with floods[0], floods[1]:
            time.sleep(FLOOD_SECONDS)
            watched.look()
            try:
                meet(made, watched.look)
            except Exception as error:
                outcome.broken.append(f"the workers could not meet: {error}")
                return
            outcome.tried["meetings"] += 1
            for _ in watched.serve(MESSAGES_SECONDS, lambda: first.tell(second)):
                outcome.tried["messages of workers"] += 1
        for flood in floods:
            outcome.tried["strangers"] += flood.seen["opened"]
            outcome.refused["strangers"] += flood.seen["ended"]
        outcome.expect(second.came == list(range(len(second.came))), "a stranger's message came")
