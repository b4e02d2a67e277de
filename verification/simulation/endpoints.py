"""The seam of shared memory between RPC workers of one machine: the endpoint of engine/p2p.

The kernels of that endpoint sleep on futexes, and are searched by themselves (verification/cases.py). Here
stands what they promise: messages from one rank to another arrive in the order of the calls, there is room
for so many, and what was sent before its sender died arrives.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchestra.engine.p2p.endpoint import Endpoint
from torchestra.engine.p2p.gil_waits import GilWaits
from torchestra.transport.message import Message, Sending
from verification.simulation.network import Source
from verification.simulation.scheduler import active
from verification.simulation.sockets import Machine, here

_ROOM = 6  # messages from one rank to another
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 0.0001

_Outgoing = tuple[Message, object]
"""A message, and what is to be kept until it has gone."""


class _Channel:
    """What is under way from one rank to another."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.room = Source()


class _Mailbox(Source):
    """The channels to one rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.channels = [_Channel() for _ in range(size)]
        self.calls_attention = False

    def is_readable(self) -> bool:
        return self.calls_attention or self.has_messages()

    def has_messages(self) -> bool:
        """Return whether a message is there."""
        return any(channel.messages for channel in self.channels)


class SimulatedEndpoint:
    """An ``engine.p2p.endpoint.Endpoint`` of a simulated process.

    Attributes:
        in_hand: the message that was received last, until whoever received it sets this to None.
        gil_waits: measures nothing here, where one thread runs at a time.
    """

    def __init__(self, context: int, area: int, rank: int, size: int, lost: Callable[[int], bool]) -> None:
        self.in_hand: Message | None = None
        self.gil_waits = GilWaits()
        self._run = Machine.network.run
        self._process = here()
        self._rank, self._lost = rank, lost
        if size == 1 or area not in Machine.mailboxes:
            Machine.mailboxes[area] = [_Mailbox(size) for _ in range(size)]
        self._mailboxes: list[_Mailbox] = Machine.mailboxes[area]
        self._own = self._mailboxes[rank]
        self._outgoing: list[deque[_Outgoing]] = [deque() for _ in range(size)]
        self._is_sending = [False] * size
        self._received = 0
        self._closed = False

    def send(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Sequence[tuple[int, int]],
        keep: object = None,
        sending: Sending | None = None,
    ) -> None:
        """See the product's."""
        text, *storages = (ctypes.string_at(address, length) for address, length in parts)
        copies = [_storage(each) for each in storages]
        self._outgoing[peer].append((Message(self._rank, kind, tag, text, copies), keep))
        if sending is not None:
            sending.is_sent = True
        self._run.seam()
        if self._is_sending[peer]:
            return  # another thread sends it
        self._is_sending[peer] = True
        try:
            while self._outgoing[peer]:
                self._push(peer, self._outgoing[peer][0][0])
                self._outgoing[peer].popleft()
        finally:
            self._is_sending[peer] = False

    def _push(self, peer: int, message: Message) -> None:
        mailbox = self._mailboxes[peer]
        channel = mailbox.channels[self._rank]
        while len(channel.messages) >= _ROOM:
            if self._closed or self._lost(peer):
                return
            channel.room.await_change(self._run, _POLL_SECONDS)
        channel.messages.append(message)
        mailbox.changed(self._run)

    def send_leftovers(self) -> None:
        """No thread is interrupted while it sends."""

    def receive(self, *, eager: bool) -> Message | None:
        """See the product's."""
        own, run = self._own, self._run
        if self.in_hand is not None:
            return self.in_hand
        if not self._closed:
            own.await_reading(run, _POLL_SECONDS)
        else:
            run.look()
        ready = [channel for channel in own.channels if channel.messages]
        if own.calls_attention or not ready:
            own.calls_attention = self._closed
            return None
        channel = run.choices.choice(ready)
        self.in_hand = channel.messages.popleft()
        self._received += 1
        channel.room.changed(run)
        return self.in_hand

    def watch(self) -> bool:
        """See the product's."""
        own, run = self._own, self._run
        deadline = run.now + _POLL_SECONDS
        while not self._closed and run.now < deadline:
            received = self._received
            if own.has_messages():
                run.wait(_GRACE_SECONDS)
                if own.has_messages() and self._received == received:
                    return True
            else:
                own.await_change(run, deadline - run.now)
        return False

    def wake_leader(self) -> None:
        """See the product's."""
        if active() is not None and not self._run.is_ending:
            self._own.calls_attention = True
            self._own.changed(self._run)

    def close(self) -> None:
        """See the product's."""
        self._closed = True
        self.wake_leader()


def _storage(data: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def endpoint_in_shared_memory(*arguments: Any) -> Any:
    """Return what rpc/router.py uses: the endpoint of engine/p2p, or in a simulation its double."""
    return Endpoint(*arguments) if active() is None else SimulatedEndpoint(*arguments)
