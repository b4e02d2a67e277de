"""What waits in the queue of a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchestra.transport.framing import FRONT_BYTES, frames, text_frames

Parts = Sequence[tuple[int, int]]


class OutgoingMessage:
    """A message that is to be sent.

    Args:
        parts, keep: the address and length of each part, and the object they belong to; or
        text: all of a message that has one part.
        done: called when the parts may be changed.
        reliable: the message is kept, and resent, until the other rank has confirmed it.

    Attributes:
        sequence: its number among the messages to that rank, from 1.
    """

    __slots__ = ("_keep", "_kind", "_parts", "_tag", "_text", "done", "reliable", "sequence", "size")

    def __init__(
        self,
        kind: int,
        tag: int,
        parts: Parts,
        keep: object,
        text: bytes | None = None,
        done: Callable[[], None] | None = None,
        reliable: bool = False,
    ) -> None:
        self._kind, self._tag, self._parts, self._keep, self._text = kind, tag, parts, keep, text
        self.done, self.reliable = done, reliable
        self.sequence = 0
        self.size = sum(length for _, length in parts) if text is None else len(text)

    @property
    def is_short(self) -> bool:
        """Return whether it fits in one frame."""
        return self.size <= FRONT_BYTES and (self._text is not None or len(self._parts) == 1)

    def frames(self) -> Iterator[bytes | memoryview]:
        if self._text is not None:
            return text_frames(self._kind, self._tag, self._text, self.sequence)
        return frames(self._kind, self._tag, self._parts, self._keep, self.sequence)


class ControlFrame(OutgoingMessage):
    """A frame that is no message."""

    __slots__ = ("_frame",)

    def __init__(self, frame: bytes) -> None:
        super().__init__(0, 0, (), None)
        self._frame = frame

    @property
    def is_short(self) -> bool:
        return True

    def frames(self) -> Iterator[bytes | memoryview]:
        return iter((self._frame,))
