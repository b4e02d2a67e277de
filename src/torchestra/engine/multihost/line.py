"""The line between two ranks on different hosts: a bridge with two ends, for letters and messages.

Two threads have to do with it: one reads the letters; the other, which is there from the first message on,
waits for the ends of messages, one after the other. That is in order enough: what one end sends, the other
has begun to receive before, so none of them waits for another.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable

import torch

from torchestra.engine.multihost.bridge import Bridge, BridgeError, Pending
from torchestra.engine.multihost.letters import LONGEST_LETTER

__all__ = ["Line"]

_LOOK_SECONDS = 0.2

Then = Callable[[BridgeError | None], None]
"""Called at the end of a message, with the error if it has failed."""


class Line:
    """This rank's end.

    Args:
        bridge: with two ends; the line closes it.
        name: of the threads.
        opened: called when the ends have met.
        take: called with each letter; the memory is used again afterwards.
        broke: called once, when there will be no letters any more; not if this end was closed.
        awaited: see :meth:`Bridge.letters`.

    All are called on a thread of the line.
    """

    def __init__(
        self,
        bridge: Bridge,
        name: str,
        opened: Callable[[], None],
        take: Callable[[memoryview], None],
        broke: Callable[[BridgeError], None],
        awaited: Callable[[], bool],
    ) -> None:
        self._bridge = bridge
        self._name = name
        self._opened, self._take, self._broke = opened, take, broke
        self._awaited = awaited
        self._other = 1 - bridge.host
        self._closed = False
        self._loads: queue.SimpleQueue[tuple[Pending, Then] | None] = queue.SimpleQueue()
        self._carrier: threading.Thread | None = None
        self._reader = self._thread(self._read)

    def write(self, raw: bytearray) -> object:
        """Send a letter, when the line is open; what must be kept until it has been confirmed.

        Raises:
            BridgeError: the line is broken.
        """
        letter = torch.frombuffer(raw, dtype=torch.uint8)
        return letter, self._bridge.write(letter, self._other)

    def send(self, tensor: torch.Tensor, seconds: float, then: Then) -> None:
        """Begin to send a message, which the other end has begun to receive."""
        self._carry(self._bridge.send(tensor, self._other, seconds), then)

    def receive(self, tensor: torch.Tensor, seconds: float, then: Then) -> None:
        """Begin to receive a message, which the other end will send."""
        self._carry(self._bridge.receive(tensor, self._other, seconds), then)

    def hurry(self) -> None:
        """See :meth:`Bridge.hurry`."""
        self._bridge.hurry()

    def close(self) -> None:
        """Give everything up. Never waits for the other end."""
        self._closed = True
        self._loads.put(None)
        self._bridge.close()

    def _carry(self, pending: Pending, then: Then) -> None:
        self._loads.put((pending, then))
        if self._carrier is None:
            self._carrier = self._thread(self._wait_for_loads)

    def _thread(self, body: Callable[[], None]) -> threading.Thread:
        # In the context of the rank that makes it, so that callbacks know which rank they are of.
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(body,), name=self._name, daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        try:
            while not self._bridge.has_met(_LOOK_SECONDS):
                if self._closed:
                    return
            self._opened()
            for letter in self._bridge.letters(self._other, LONGEST_LETTER, self._awaited):
                self._take(letter.numpy().data)
        except BridgeError as error:
            if not self._closed:
                self._broke(error)

    def _wait_for_loads(self) -> None:
        while (load := self._loads.get()) is not None:
            pending, then = load
            error = None
            try:
                while not pending.wait(_LOOK_SECONDS):
                    if self._closed:
                        return
            except BridgeError as failure:
                error = failure
            then(error)
            del load, pending, then
