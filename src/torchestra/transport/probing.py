"""Find out whether somebody listens at an address."""

from __future__ import annotations

import enum
import socket

_SECONDS = 0.5


class ProbeResult(enum.Enum):
    """The result of :func:`probe`."""

    LISTENING = "somebody listens there"
    NOT_LISTENING = "its host says that nobody listens there"
    UNKNOWN = "its host does not answer, or cannot be reached"


def probe(address: str) -> ProbeResult:
    """Connect to an address in ZeroMQ's spelling, ``tcp://10.0.0.1:40123``, and return who is there.

    Waits half a second at most.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS):
            return ProbeResult.LISTENING
    except ConnectionRefusedError:
        return ProbeResult.NOT_LISTENING
    except (OSError, ValueError, OverflowError):
        return ProbeResult.UNKNOWN
