"""A rank's endpoint: whole messages, sent by every thread, received by one at a time (endpoint_kernels.py).

A message is one or more parts: its text, and large memory beside it that is copied into the channel from
where it lies and out of it to where it shall lie. Messages from one rank to another arrive in the order of
the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torchestra.engine.kernels import shared_words
from torchestra.engine.layout import DONE, PENDING
from torchestra.engine.native.kernel import entry_point
from torchestra.engine.p2p import endpoint_kernels
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.gil_waits import GilWaits
from torchestra.system.try_lock import TryLock
from torchestra.transport.message import Message, Sending, new_storage, no_room

_PARTS_SHIFT = endpoint_kernels.PARTS_SHIFT
_KIND_MASK = (1 << _PARTS_SHIFT) - 1
_SHORT_BYTES = 1 << 14
_NOWHERE = 0  # the address to which a message is taken that there is no memory for
_NONE = object()  # the memory there


_OutgoingMessage: TypeAlias = tuple[int, int, Sequence[tuple[int, int]], object]
"""A message to be sent: its kind, tag, parts, and what is to be kept until it has gone."""


class _IncomingMessage:
    """A message that is being received. If an interrupt comes, the next leader goes on with it.

    Attributes:
        parts: those that are here, by their numbers; the first is the text.
        next: the number of the next part, of ``count``.
        taking: the memory that part is being taken to, while it is; :data:`_NONE` if there is none for it.
        lost: why not all of it can be received.
    """

    __slots__ = ("count", "kind", "lost", "next", "parts", "source", "tag", "taking")

    def __init__(self, source: int, tag: int, word: int) -> None:
        self.source = source
        self.tag = tag
        self.kind = word & ((1 << _PARTS_SHIFT) - 1)
        self.count = word >> _PARTS_SHIFT
        self.next = 0
        self.parts: dict[int, Any] = {}
        self.taking: Any = None
        self.lost: MemoryError | None = None

    def message(self) -> Message:
        """Return the whole, when all parts are here."""
        text = b"" if self.parts[0] is _NONE else self.parts[0]
        storages = [] if self.lost is not None else [self.parts[number] for number in range(1, self.count)]
        return Message(self.source, self.kind, self.tag, text, storages, self.lost)


class _SendQueue:
    """Queue what is to go to one rank; whichever thread holds the lock sends it all.

    Attributes:
        next: the number of the next part of the first message.
        begun: some of that part may have been sent.
    """

    def __init__(self) -> None:
        self.lock = TryLock()
        self.messages: deque[_OutgoingMessage] = deque()
        self.next = 0
        self.begun = False
        self.words: npt.NDArray[np.int64] = np.zeros(w.RECORD_BYTES // 8, dtype=np.int64)
        self.record: int = self.words.ctypes.data


class Endpoint:
    """Send and receive for rank ``rank`` of ``size``. Nothing else may use the channels of the arena.

    Args:
        context: address of the rank's kernel context (layout.py).
        area: address, here, of the arena's channels.
        lost: whether a rank is gone: what is under way to it is thrown away, what is from it never ends.

    Attributes:
        in_hand: the message that was received last, until whoever received it sets this to None.
        gil_waits: of the threads that receive.
    """

    def __init__(self, context: int, area: int, rank: int, size: int, lost: Callable[[int], bool]) -> None:
        self._words = w.new_private_state(context, area, rank, size)
        self._grace: npt.NDArray[np.int64] = np.zeros(2, dtype=np.int64)
        self._text: npt.NDArray[np.uint8] = np.zeros(_SHORT_BYTES, dtype=np.uint8)
        self._text_view = memoryview(self._text)  # type: ignore[arg-type]
        self._state: int = self._words.ctypes.data
        for offset, value in (
            (endpoint_kernels.GRACE, self._grace.ctypes.data),
            (endpoint_kernels.TEXT, self._text.ctypes.data),
            (endpoint_kernels.TEXT_BYTES, _SHORT_BYTES),
        ):
            self._words[offset // 8] = value
        first = endpoint_kernels.OUT_PEER // 8
        self._out = self._words[first : first + 4]
        self._lost = lost
        self._send_queues = [_SendQueue() for _ in range(size)]
        self._begin_send: Any = entry_point(endpoint_kernels.begin_send)
        self._continue_send: Any = entry_point(endpoint_kernels.continue_send)
        self._find_message: Any = entry_point(endpoint_kernels.find_message)
        self._receive_now: Any = entry_point(endpoint_kernels.receive_now)
        self._receive: Any = entry_point(endpoint_kernels.receive)
        self._begin_receive: Any = entry_point(endpoint_kernels.begin_receive)
        self._continue_receive: Any = entry_point(endpoint_kernels.continue_receive)
        self._await_message: Any = entry_point(endpoint_kernels.await_message)
        self._watch: Any = entry_point(endpoint_kernels.watch)
        self._store_ordered: Any = entry_point(shared_words.store_ordered)
        self._abandon: Any = entry_point(endpoint_kernels.abandon)
        self._bring_to_python: Any = entry_point(endpoint_kernels.bring_to_python)
        self._closed = False
        self.gil_waits = GilWaits(self._words, endpoint_kernels.RETURNED // 8)
        self.in_hand: Message | None = None
        self._received = 0  # short messages
        self._incoming: _IncomingMessage | None = None

    def send(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Sequence[tuple[int, int]],
        keep: object = None,
        sending: Sending | None = None,
    ) -> None:
        """Send a message to another rank. Every thread may call.

        Another thread that is sending to that rank may do it, after this call has returned; so the memory
        must stay as it is until the message has been answered, and ``keep`` is kept until it has gone.

        Args:
            kind: below 65,536.
            tag: any 63-bit number.
            parts: the address and length of each part; the first is the text.
            sending: is told when the message is sure to be sent, whatever this raises.
        """
        queue = self._send_queues[peer]
        message = (kind, tag, parts, keep)
        messages = queue.messages
        messages += (message,)
        if sending is not None:  # nothing is called between the two, so no interrupt comes
            sending.is_sent = True
        self._send_queued(peer, queue, message)

    def send_leftovers(self) -> None:
        """Send what a thread has left that was interrupted while it sent."""
        for peer, queue in enumerate(self._send_queues):
            if queue.messages:
                self._send_queued(peer, queue, object())

    def _send_queued(self, peer: int, queue: _SendQueue, claim: object) -> None:
        """Send what is queued for a rank, unless another thread does; that one then sends it all."""
        messages, lock = queue.messages, queue.lock
        try:
            while messages and lock.take(claim):
                while messages:
                    self._push(peer, queue, messages[0])
                    del messages[0]  # and nothing is called before the next line, so no interrupt comes
                    queue.next = 0
                del lock.holder
        finally:
            if lock.holder is claim:
                del lock.holder

    def _push(self, peer: int, queue: _SendQueue, message: _OutgoingMessage) -> None:
        """Send a message; may be called again for one that an exception has interrupted."""
        state, record = self._state, queue.record
        kind, tag, parts, _ = message
        count = len(parts)
        word = kind | count << _PARTS_SHIFT
        while queue.next < count:
            if queue.begun:
                code = self._continue_send(state, record, peer)
            else:
                address, length = parts[queue.next]
                queue.begun = True
                code = self._begin_send(state, record, peer, address, length, tag, word)
            while code != DONE:
                if self._closed or self._lost(peer):
                    queue.next, queue.begun = count, False
                    return
                code = self._continue_send(state, record, peer)
            queue.begun = False
            queue.next += 1

    def receive(self, *, eager: bool) -> Message | None:
        """Return the next message, with the lead; None if none came for a while, or attention was called.

        It is the same one until the caller has set ``in_hand`` to None. So an interrupt, wherever it comes,
        loses no message: the next call goes on with what this one has left. (CPython handles signals after
        a call, at the beginning of a function and of a loop's next turn, and nowhere else. So of two
        assignments after one another, either none or both are executed.)

        One that there is no memory for is taken out of the channel all the same, and says so. One whose
        sender died halfway through it never comes.

        Args:
            eager: somebody waits for it, so that yielding the core for a while may spare a sleep.
        """
        if self.in_hand is not None:
            return self.in_hand
        if self._incoming is not None:
            return self._continue_long(self._incoming)
        received = self._received
        code = self._receive_now(self._state, received)
        if code == PENDING:
            code = self._receive(self._state, int(eager), received)
            if self.gil_waits.enabled and code in (DONE, endpoint_kernels.FOUND):
                self.gil_waits.note()
        if code == DONE:
            source, tag, length, word = self._out.tolist()
            # As Message(...), which calls a function of Python.
            fields = (source, word & _KIND_MASK, tag, bytes(self._text_view[:length]), (), None)
            message: Message = tuple.__new__(Message, fields)
            self.in_hand = message  # and nothing is called before the next line, so no interrupt comes
            self._received = received + 1
            return message
        if code == endpoint_kernels.FOUND:
            source, tag, _, word = self._out.tolist()
            self._incoming = _IncomingMessage(source, tag, word)
            return self._continue_long(self._incoming)
        if code == endpoint_kernels.INTERRUPTED and not self._closed:
            self._store_ordered(self._state + w.ATTENTION, 0)
        return None

    def _continue_long(self, incoming: _IncomingMessage) -> Message | None:
        """Take the parts of a message that are not here yet."""
        state, source = self._state, incoming.source
        while incoming.next < incoming.count:
            code = PENDING
            if incoming.taking is None:
                while not self._find_message(state, source):
                    code = self._await_message(state, 1, source)
                    if code != DONE and (self._closed or self._lost(source)):
                        self._give_up(source)
                        return None
                memory = self._memory_for(incoming, int(self._out[2]))
                address = _NOWHERE if memory is _NONE else _address_of(memory)
                is_last = 1 if incoming.next + 1 == incoming.count else 0
                incoming.taking = memory  # and nothing is called before the kernel
                code = self._begin_receive(state, source, address, is_last)
            if code != DONE and not self._continue_take(source):
                return None
            incoming.parts[incoming.next] = incoming.taking
            incoming.taking = None
            incoming.next += 1
        message = incoming.message()
        self.in_hand, self._incoming = message, None
        return message

    def _memory_for(self, incoming: _IncomingMessage, length: int) -> Any:
        """Return memory for the next part; none if there is none, or was none for one before."""
        if incoming.next == 0:
            try:
                return np.empty(length, dtype=np.uint8)
            except MemoryError:
                incoming.lost = no_room(incoming.source, "the text", length)
                return _NONE
        storage = None if incoming.lost is not None else new_storage(length)
        if storage is None:  # those behind it are to be found in the channel all the same
            incoming.lost = incoming.lost or no_room(incoming.source, "a tensor", length)
            return _NONE
        return storage

    def _continue_take(self, source: int) -> bool:
        """Take the rest of a part; return False if its sender is gone. May be called when all is taken."""
        while self._continue_receive(self._state, source) != DONE:
            if self._closed or self._lost(source):
                self._give_up(source)
                return False
        return True

    def _give_up(self, source: int) -> None:
        """Take nothing more from a rank that died halfway through a message."""
        self._abandon(self._state, source)
        self._incoming = None

    def watch(self) -> bool:
        """Sleep until a message has come that nobody takes, or for a while: whether one has.

        For one thread at a time.
        """
        return self._watch(self._state) == DONE  # type: ignore[no-any-return]

    def wake_leader(self) -> None:
        """Have :meth:`receive` return."""
        self._bring_to_python(self._state, 0)

    def close(self) -> None:
        """Wake everybody; from now on nothing sleeps here."""
        self._closed = True
        self._bring_to_python(self._state, 1)


def _address_of(memory: npt.NDArray[np.uint8] | torch.UntypedStorage) -> int:
    return memory.data_ptr() if isinstance(memory, torch.UntypedStorage) else memory.ctypes.data
