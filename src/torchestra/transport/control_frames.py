"""The frames between two ranks that are no part of a message: shorter than the first frame of any message."""

from __future__ import annotations

ALIVE = b""
GOODBYE = b"\0"
HELLO = b"\1"  # and the connection's number among the sender's; the first frame of every connection
HELLO_ACK = b"\2"  # and the number of the hello that it has received last
CONFIRM = b"\0\0\0\0"  # and the number of the last message that has come
ASK_TO_CONFIRM = b"\0\0\0\0\0"
SENT_FIRST = (HELLO, HELLO_ACK, CONFIRM, ASK_TO_CONFIRM)
"""What is sent before the messages that are queued; a goodbye is sent behind them."""
CONTROL_BYTES = 12
"""The longest."""

_NUMBER_BYTES = 8


def numbered(kind: bytes, number: int) -> bytes:
    """Return a frame that has a number."""
    return kind + number.to_bytes(_NUMBER_BYTES, "little")


def number_of(control: bytes, kind: bytes) -> int | None:
    """Return the number of a frame of this kind; None if the frame is another one."""
    if control.startswith(kind) and len(control) == len(kind) + _NUMBER_BYTES:
        return int.from_bytes(control[len(kind) :], "little")
    return None
