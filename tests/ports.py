"""Ports of this host for tests whose programs listen only later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens, and which the system gives to nobody who asks for any port.

    One of those that it gives (``bind`` to port 0) could be another test's before this test's program
    listens; a client that dials it meanwhile could even be connected to itself.
    """
    first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    # A generator of its own: tests seed the one of the module, and two of them would find the same ports.
    for port in random.SystemRandom().sample(range(_FIRST, first_ephemeral), 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue  # somebody has it
            return port
    raise AssertionError(f"no port from {_FIRST} to {first_ephemeral - 1} of {host} is free")
