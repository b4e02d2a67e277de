"""An RPC worker on another host that sends nonsense, or announces more than there is: only it is given up."""

from __future__ import annotations

import os
import random
import struct
import time

from tools.attacks import Outcome
from tools.attacks._wires import Worker, meet, workers

from torchestra.transport.framing import LARGEST_FRAME

_HEAD = struct.Struct("=HqIQQ")


def frames() -> list[tuple[str, list[bytes]]]:
    """Return what it sends, and what that is."""
    storage = struct.pack("=Q", 1 << 62)
    return [
        ("bytes drawn by lot", [os.urandom(random.randrange(3, 5000)) for _ in range(3)]),
        ("a front of 16 EB", [_HEAD.pack(1, 0, 0, (1 << 64) - 1, 1)]),
        ("a front of 1 EB", [_HEAD.pack(1, 0, 0, 1 << 60, 1), bytes(100)]),
        ("four billion storages", [_HEAD.pack(1, 0, (1 << 32) - 1, 10, 1) + bytes(10)]),
        ("a storage of 4 EB", [_HEAD.pack(1, 0, 1, 8, 1) + storage, bytes(LARGEST_FRAME - 64)]),
        ("a storage of 16 EB", [_HEAD.pack(1, 0, 1, 8, 1) + b"\xff" * 8, bytes(100)]),
        ("a piece too long", [_HEAD.pack(1, 0, 1, 8, 1) + struct.pack("=Q", 5), bytes(6)]),
        ("an empty piece", [_HEAD.pack(1, 0, 1, 8, 1) + struct.pack("=Q", 5), b""]),
        ("the end of a message alone", [bytes(200_000)]),
    ]


def attack(seconds: float) -> Outcome:
    """Three workers; the third has the secret, and says what no worker says. The others go on."""
    outcome = Outcome()
    until = time.monotonic() + seconds
    while not outcome.tried or time.monotonic() < until:
        for what, said in frames():
            _try(outcome, what, said)
    return outcome


def _try(outcome: Outcome, what: str, said: list[bytes]) -> None:
    with workers(3) as made:
        meet(made)
        first, second, bad = made
        first.tell(second)
        for frame in said:
            bad.wire._loop.peers[0].queue_control(frame)  # sends whatever it is given
        bad.wire._loop.wake()
        outcome.tried[what] += 1
        try:
            for _ in range(3):
                second.tell(first)
                first.tell(second)
        except RuntimeError as error:
            outcome.expect(False, f"{what}: {error}")
        if _given_up(first):
            outcome.refused[what] += 1
        lost = first.wire.lost()
        outcome.expect(set(lost) <= {2}, f"{what}: it cost another worker: {lost}")


def _given_up(worker: Worker) -> bool:
    """Return whether the third worker is given up, in a moment in which it mostly is."""
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        if 2 in worker.wire.lost():
            return True
        time.sleep(0.001)
    return False
