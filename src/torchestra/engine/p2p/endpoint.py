"""A rank's endpoint: whole messages, sent by every thread, received by one at a time (endpoint_kernels.py).

A message is one or more parts: its text, and large memory beside it that is copied into the channel from
where it lies and out of it to where it shall lie. Messages from one rank to another arrive in the order of
the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchestra.engine.layout import DONE
from torchestra.engine.native.kernel import entry_point
from torchestra.engine.p2p import endpoint_kernels
from torchestra.engine.p2p import layout as w
from torchestra.system.try_lock import TryLock
from torchestra.transport.message import Message, new_storage, no_room

_PARTS_SHIFT = 16
_SCRATCH_BYTES = 1 << 16
_GRACE_NANOSECONDS = 100_000
_NOWHERE = 0  # the address to which a message is taken that there is no memory for


class _LostPeerError(Exception):
    """The rank at the other end died halfway through a message."""


class _OutgoingMessage:
    """A message on its way, and how much of it has gone."""

    __slots__ = ("begun", "keep", "kind", "next", "parts", "tag")

    def __init__(self, kind: int, tag: int, parts: Sequence[tuple[int, int]], keep: object) -> None:
        self.kind = kind
        self.tag = tag
        self.parts = parts
        self.keep = keep
        self.next = 0
        self.begun = False


class _SendQueue:
    """Queue what is to go to one rank; whichever thread holds the lock sends it all."""

    def __init__(self) -> None:
        self.lock = TryLock()
        self.messages: deque[_OutgoingMessage] = deque()
        self.words: npt.NDArray[np.int64] = np.zeros(w.RECORD_BYTES // 8, dtype=np.int64)
        self.record: int = self.words.ctypes.data


class Endpoint:
    """Send and receive for rank ``rank`` of ``size``. Nothing else may use the channels of the arena.

    Args:
        context: address of the rank's kernel context (layout.py).
        area: address, here, of the arena's channels.
        lost: whether a rank is gone: what is under way to it is thrown away, what is from it never ends.
    """

    def __init__(self, context: int, area: int, rank: int, size: int, lost: Callable[[int], bool]) -> None:
        self._words: npt.NDArray[np.int64] = np.zeros((w.PEERS_AT + size * w.PEER_BYTES) // 8, dtype=np.int64)
        self._grace: npt.NDArray[np.int64] = np.array([0, _GRACE_NANOSECONDS], dtype=np.int64)
        self._state: int = self._words.ctypes.data
        for offset, value in (
            (w.CONTEXT, context),
            (w.DOORBELLS, area),
            (w.CHANNELS, area + w.doorbells_bytes(size)),
            (w.CHANNEL_BYTES, w.channel_bytes(size)),
            (w.RING_BYTES, w.ring_bytes(size)),
            (w.PIECE_BYTES, w.piece_bytes(size)),
            (w.RANK, rank),
            (w.SIZE, size),
            (endpoint_kernels.GRACE, self._grace.ctypes.data),
        ):
            self._words[offset // 8] = value
        first = endpoint_kernels.OUT_PEER // 8
        self._out = self._words[first : first + 4]
        self._scratch: npt.NDArray[np.uint8] = np.zeros(_SCRATCH_BYTES, dtype=np.uint8)
        self._scratch_address: int = self._scratch.ctypes.data
        self._scratch_view = memoryview(self._scratch)  # type: ignore[arg-type]
        self._lost = lost
        self._send_queues = [_SendQueue() for _ in range(size)]
        self._begin_send: Any = entry_point(endpoint_kernels.begin_send)
        self._continue_send: Any = entry_point(endpoint_kernels.continue_send)
        self._look: Any = entry_point(endpoint_kernels.look)
        self._begin_receive: Any = entry_point(endpoint_kernels.begin_receive)
        self._continue_receive: Any = entry_point(endpoint_kernels.continue_receive)
        self._await_message: Any = entry_point(endpoint_kernels.await_message)
        self._watch: Any = entry_point(endpoint_kernels.watch)
        self._abandon: Any = entry_point(endpoint_kernels.abandon)
        self._rouse: Any = entry_point(endpoint_kernels.rouse)
        self._closed = False

    def send(
        self, peer: int, kind: int, tag: int, parts: Sequence[tuple[int, int]], keep: object = None
    ) -> None:
        """Send a message to another rank. Every thread may call.

        Another thread that is sending to that rank may do it, after this call has returned; so the memory
        must stay as it is until the message has been answered, and ``keep`` is kept until it has gone.

        Args:
            kind: below 65,536.
            tag: any 63-bit number.
            parts: the address and length of each part; the first is the text.
        """
        queue = self._send_queues[peer]
        message = _OutgoingMessage(kind, tag, parts, keep)
        queue.messages.append(message)
        self._send_queued(peer, queue, message)

    def send_leftovers(self) -> None:
        """Send what a thread has left that was interrupted while it sent."""
        for peer, queue in enumerate(self._send_queues):
            if queue.messages:
                self._send_queued(peer, queue, object())

    def _send_queued(self, peer: int, queue: _SendQueue, claim: object) -> None:
        """Send what is queued for a rank, unless another thread does; that one then sends it all."""
        try:
            while queue.messages and queue.lock.take(claim):
                while queue.messages:
                    self._push(peer, queue, queue.messages[0])
                    queue.messages.popleft()
                del queue.lock.holder
        finally:
            if queue.lock.holder is claim:
                del queue.lock.holder

    def _push(self, peer: int, queue: _SendQueue, message: _OutgoingMessage) -> None:
        """Send a message; may be called again for one that an exception has interrupted."""
        state, record = self._state, queue.record
        parts = message.parts
        while message.next < len(parts):
            if not message.begun:
                address, length = parts[message.next]
                kind = message.kind | len(parts) << _PARTS_SHIFT
                message.begun = True
                code = self._begin_send(state, record, peer, address, length, message.tag, kind)
            else:
                code = self._continue_send(state, record, peer)
            while code != DONE:
                if self._closed or self._lost(peer):
                    message.next = len(parts)
                    return
                code = self._continue_send(state, record, peer)
            message.begun = False
            message.next += 1

    def receive(self, *, eager: bool) -> Message | None:
        """Return the next message, with the lead; None if none came for a while, or attention was called.

        One that there is no memory for is taken out of the channel all the same, and says so. One whose
        sender died halfway through it never comes.

        Args:
            eager: somebody waits for it, so that yielding the core for a while may spare a sleep.
        """
        state = self._state
        if not self._look(state, -1):
            code = self._await_message(state, int(eager), -1)
            if code == endpoint_kernels.INTERRUPTED and not self._closed:
                self._words[w.ATTENTION // 8] = 0
            if code != DONE or not self._look(state, -1):
                return None
        try:
            source, tag, length, word = self._out.tolist()
            more = (word >> _PARTS_SHIFT) - 1
            text: bytes | npt.NDArray[np.uint8] = b""
            lost: MemoryError | None = None
            if length <= _SCRATCH_BYTES:
                # As _take(), whose call would cost as much as the rest.
                if self._begin_receive(state, source, self._scratch_address, int(not more)) != DONE:
                    self._continue_take(source)
                text = bytes(self._scratch_view[:length])
            else:
                try:
                    room = np.empty(length, dtype=np.uint8)
                except MemoryError:
                    lost = no_room(source, "the text", length)
                    self._take(source, _NOWHERE, more)
                else:
                    self._take(source, room.ctypes.data, more)
                    text = room
            storages: list[torch.UntypedStorage] = []
            while more:
                more -= 1
                while not self._look(state, source):
                    code = self._await_message(state, 1, source)
                    if code != DONE and (self._closed or self._lost(source)):
                        self._abandon(state, source)
                        raise _LostPeerError
                length = int(self._out[2])
                if lost is None and (storage := new_storage(length)) is not None:
                    self._take(source, storage.data_ptr(), more)
                    storages.append(storage)
                else:  # those behind it are to be found in the channel all the same
                    lost = lost or no_room(source, "a tensor", length)
                    storages.clear()
                    self._take(source, _NOWHERE, more)
            kind = word & ((1 << _PARTS_SHIFT) - 1)
            # As Message(...), which calls a function of Python.
            return tuple.__new__(Message, (source, kind, tag, text, storages, lost))
        except _LostPeerError:
            return None

    def _take(self, source: int, address: int, more: int) -> None:
        if self._begin_receive(self._state, source, address, int(not more)) != DONE:
            self._continue_take(source)

    def _continue_take(self, source: int) -> None:
        while self._continue_receive(self._state, source) != DONE:
            if self._closed or self._lost(source):
                self._abandon(self._state, source)
                raise _LostPeerError

    def watch(self) -> bool:
        """Sleep until a message has come that nobody takes, or for a while: whether one has.

        For one thread at a time.
        """
        return self._watch(self._state) == DONE  # type: ignore[no-any-return]

    def wake_leader(self) -> None:
        """Have :meth:`receive` return."""
        self._rouse(self._state, 0)

    def close(self) -> None:
        """Wake everybody; from now on nothing sleeps here."""
        self._closed = True
        self._rouse(self._state, 1)
