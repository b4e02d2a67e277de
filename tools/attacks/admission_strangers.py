"""Strangers of this user and of another one at the socket where a group's memory is handed over."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack

from tools.attacks import Outcome
from tools.attacks._flood import SILENCE, Flood
from tools.attacks._target import NOBODY, Watched

from torchestra.engine.memory.fd_passing import DescriptorServer, fetch
from torchestra.system.deadline import Deadline

SECRET = b"between us"


def attack(seconds: float) -> Outcome:
    """Hand memory over to one rank after the other, while thousands want it who have no key."""
    outcome = Outcome()
    descriptor = os.memfd_create("torchestra-attack", os.MFD_CLOEXEC)
    hello = b"TRC2" + struct.pack("<I", 1) + bytes(32)
    talks = [SILENCE, (b"x" * 10,), (os.urandom(80),), (hello[:-1],), (hello,), (hello, bytes(32))]
    over = threading.Event()
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        watched = stack.enter_context(Watched(outcome, 200))
        ranks = _Few(lambda: outcome.tried["ranks served"])
        admission = stack.enter_context(DescriptorServer(ranks, SECRET, "g"))

        def serve() -> None:
            while not over.is_set():
                admission.serve(descriptor)

        serving = threading.Thread(target=serve)
        serving.start()
        stack.callback(serving.join)
        stack.callback(over.set)
        address = admission.invitation.partition(":")[0]
        floods = [Flood(address, talks, packets=True, forbidden=b"given")]
        if os.geteuid() == 0:
            floods.append(Flood(address, talks, most=200, packets=True, forbidden=b"given", user=NOBODY))
        with ExitStack() as crowd:
            for flood in floods:
                crowd.enter_context(flood)
            for rank in watched.serve(seconds, lambda: os.close(_fetched(admission, outcome))):
                outcome.tried["ranks served"] = rank
        for flood in floods:
            outcome.tried["strangers"] += flood.seen["opened"]
            outcome.refused["strangers"] += flood.seen["ended"]
            outcome.expect(not flood.seen["forbidden"], "a stranger was given the memory")
    return outcome


class _Few(Collection[int]):
    """Ranks that come one after the other: all are expected some time, but there is room for one only."""

    def __init__(self, served: Callable[[], int]) -> None:
        self._served = served

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int)

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return self._served() + 1


def _fetched(admission: DescriptorServer, outcome: Outcome) -> int:
    rank = outcome.tried["ranks served"] + 1
    return fetch(admission.invitation, SECRET, rank, "g", Deadline(30))
