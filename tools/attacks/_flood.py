"""A crowd of strangers in a process of its own: connects, says something or nothing, and stays.

Run by :class:`Flood`, as a script that imports nothing of torchestra, so that it starts at once and its
descriptors are not those of the target's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

SILENCE: tuple[bytes, ...] = ()
_AT_ONCE = 50
_PAUSE = 0.002


class Flood:
    """Strangers at one listening socket, until the block is left; then :attr:`seen` says how they fared.

    Args:
        address: host and port, or the name of an abstract Unix socket (SOCK_SEQPACKET if ``packets``).
        talks: what one stranger says, in pieces; each draws one of these.
        most: how many are connected at a time; one that is ended comes again.
        packets: the Unix socket is one of packets.
        user: the number of the user to be, if not this one; needs root.

    Attributes:
        seen: how often ``opened`` and ``ended`` (by the target), the most that were ``open`` at a time, and
            of what was answered, how often what began with ``forbidden``.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        talks: Sequence[Sequence[bytes]],
        *,
        most: int = 3000,
        packets: bool = False,
        user: int | None = None,
        forbidden: bytes = b"",
    ) -> None:
        self._order = {
            "address": address,
            "talks": [[piece.hex() for piece in talk] for talk in talks],
            "most": most,
            "packets": packets,
            "user": user,
            "forbidden": forbidden.hex(),
        }
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Flood:
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, json.dumps(self._order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        said, _ = self._process.communicate(b"", timeout=60)
        if self._process.returncode:
            raise RuntimeError("the flood failed, see above")
        self.seen = Counter(json.loads(said))


def _crowd(order: dict[str, Any]) -> Counter[str]:
    if order["user"] is not None:
        os.setgroups([])
        os.setresgid(order["user"], order["user"], order["user"])
        os.setresuid(order["user"], order["user"], order["user"])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(order["most"], hard - 50)
    talks = [[bytes.fromhex(piece) for piece in talk] for talk in order["talks"]]
    forbidden = bytes.fromhex(order["forbidden"])
    seen: Counter[str] = Counter(opened=0, ended=0, open=0, forbidden=0)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.buffer, selectors.EVENT_READ)
    there = 0
    while True:
        for _ in range(_AT_ONCE):
            if there < most and _join(order, random.choice(talks), selector):
                there += 1
                seen["opened"] += 1
        seen["open"] = max(seen["open"], there)
        for key, _ in selector.select(_PAUSE):
            if key.fileobj is sys.stdin.buffer:
                return seen
            assert isinstance(key.fileobj, socket.socket)
            data = _heard(key.fileobj)
            if forbidden and data and data.startswith(forbidden):
                seen["forbidden"] += 1
            if data == b"":
                selector.unregister(key.fileobj)
                key.fileobj.close()
                there -= 1
                seen["ended"] += 1


def _join(order: dict[str, Any], talk: list[bytes], selector: selectors.BaseSelector) -> bool:
    unix = isinstance(order["address"], str)
    kind = socket.SOCK_SEQPACKET if order["packets"] else socket.SOCK_STREAM
    try:
        stranger = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, kind)
    except OSError:
        return False
    try:
        stranger.settimeout(0.05)
        if not unix:
            # Hanging up with a reset leaves no port behind for a minute.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        stranger.connect("\0" + order["address"] if unix else tuple(order["address"]))
    except OSError:
        stranger.close()
        return False
    stranger.setblocking(False)
    with contextlib.suppress(OSError):
        for piece in talk:
            stranger.send(piece)
    selector.register(stranger, selectors.EVENT_READ)
    return True


def _heard(stranger: socket.socket) -> bytes | None:
    """Return what came; nothing if it was ended, None if there is nothing."""
    try:
        return stranger.recv(4096)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends what started this, and that ends this
    began = time.monotonic()
    seen = _crowd(json.loads(sys.argv[1]))
    seen["milliseconds"] = round(1000 * (time.monotonic() - began))
    print(json.dumps(seen))


if __name__ == "__main__":
    _main()
