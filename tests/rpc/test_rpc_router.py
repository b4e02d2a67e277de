"""Messages of the network reach a worker through the ring of its host's memory, which has little room."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from torchestra.rpc.router import RoutedEndpoint
from torchestra.transport.message import Message

ROOM = 2


class Ring:
    """A worker's ring in shared memory, in which nobody waits for room: whoever would wait fails."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.in_hand: Message | None = None
        self.gil_waits = self.send_leftovers = self.watch = self.wake_leader = self.close = None

    def send(self, peer: int, kind: int, tag: int, parts: Any, *rest: Any) -> None:
        assert len(self.messages) < ROOM, "the thread that delivers would wait for the worker itself"
        self.messages.append(Message(0, kind, tag, b"", ()))

    def receive(self, *, eager: bool) -> Message | None:
        if self.in_hand is None and self.messages:
            self.in_hand = self.messages.popleft()
        return self.in_hand


def test_a_worker_that_takes_nothing_does_not_make_the_network_wait_for_it() -> None:
    """A worker takes nothing until it has met all others, while those may call it already."""
    router: Any = SimpleNamespace(context=SimpleNamespace(rank=0), local_rank_of={}, local_numbers=[0])
    ring: Any = Ring()
    endpoint = RoutedEndpoint(ring, router)
    messages = [Message(1, 7, tag, b"", ()) for tag in range(100)]
    taken = []
    for count in (50, 1, 49):
        for message in messages[len(taken) :][:count]:
            endpoint.deliver(message)
        for _ in range(count):
            message = endpoint.receive(eager=True)
            assert message is not None
            taken.append(message)
            endpoint.in_hand = None
        assert endpoint.receive(eager=True) is None
    assert taken == messages
