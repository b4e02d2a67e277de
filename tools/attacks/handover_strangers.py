"""Strangers at the socket where the survivors of a group get the memory of the smaller one."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack

from tools.attacks import Outcome
from tools.attacks._flood import SILENCE, Flood
from tools.attacks._target import NOBODY, SERVED_SECONDS, Watched

from torchestra.engine.membership.arena_transfer import ArenaOffer, make_offer, make_request


def attack(seconds: float) -> Outcome:
    """Make one offer after the other, each for a survivor who asks while thousands of others do."""
    outcome = Outcome()
    offer = make_offer(2, "g", threads=False)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            offer.serve()
            time.sleep(0.001)

    with ExitStack() as stack:
        stack.callback(offer.transfer.abandon)
        stack.callback(offer.close)
        serving = threading.Thread(target=serve)
        serving.start()
        stack.callback(serving.join)
        stack.callback(over.set)
        watched = stack.enter_context(Watched(outcome, 200))
        address = f"torchestra-{offer.key[:16].hex()}"
        talks = [SILENCE, (b"x",), (bytes(16),), (os.urandom(16),), (bytes(4096),)]
        floods = [Flood(address, talks, packets=True, forbidden=b"given")]
        if os.geteuid() == 0:
            # One who even knows the key.
            floods.append(
                Flood(address, [(offer.key[16:],)], most=50, packets=True, forbidden=b"given", user=NOBODY)
            )
        with ExitStack() as crowd:
            for flood in floods:
                crowd.enter_context(flood)
            for number in watched.serve(seconds, lambda: _ask(offer)):
                _forget_the_survivor(offer)
                outcome.tried["survivors served"] = number
        for flood in floods:
            outcome.tried["strangers"] += flood.seen["opened"]
            outcome.refused["strangers"] += flood.seen["ended"]
            outcome.expect(not flood.seen["forbidden"], "a stranger was given the memory")
    return outcome


def _forget_the_survivor(offer: ArenaOffer) -> None:
    """Have the survivor be served again, who in a job asks once: when it is noted that it has been served."""
    server = offer._server
    deadline = time.monotonic() + SERVED_SECONDS
    while not server.given:
        if time.monotonic() > deadline:
            raise TimeoutError("the survivor was served, and that was never noted")
        time.sleep(0.0001)
    server._taken.discard(1)
    server.given.clear()


def _ask(offer: ArenaOffer) -> None:
    request = make_request(offer.key, 1, 2, "g", threads=False)
    deadline = time.monotonic() + SERVED_SECONDS
    try:
        while (transfer := request.answer()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the survivor was given nothing")
            time.sleep(0.001)
        transfer.abandon()
    finally:
        request.close()
