"""Route messages between workers: over shared memory within a host, over the network to other hosts.

The pool receives from one place. So messages from the network are queued here, and the worker sends itself a
message of kind ``_ARRIVED`` through shared memory: the leader finds it among the messages, and no thread has
to wait for two things. Without other hosts the pool uses the endpoint in shared memory directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.p2p.endpoint import Endpoint as SharedMemoryEndpoint
from torchestra.engine.p2p.gil_waits import GilWaits
from torchestra.rpc.shared_buffers import OpenedBuffers, SharedBufferPool
from torchestra.transport.message import Message, Sending

if TYPE_CHECKING:
    from torchestra.transport.transport import Transport

_ARRIVED = 0  # a kind of message that agents have no other use for
_EMPTY = ((0, 0),)
_MAX_ANNOUNCED = 2
Parts = Sequence[tuple[int, int]]
"""A message: the address and length of each part, the text first."""


class Endpoint(Protocol):
    """Sends and receives for a worker; the endpoint in shared memory (engine/p2p) is one.

    Attributes:
        in_hand: the message that was received last, until whoever received it sets this to None.
        gil_waits: of the threads that receive, for the GIL.
    """

    in_hand: Message | None
    gil_waits: GilWaits

    def send(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Parts,
        keep: object = None,
        sending: Sending | None = None,
    ) -> None:
        """Send a message to another worker. Any thread may call this.

        Args:
            sending: is told when the message is queued.
        """

    def send_leftovers(self) -> None:
        """Send the messages left by threads that were interrupted while they sent."""

    def receive(self, *, eager: bool) -> Message | None:
        """Receive a message, as the leader; return None if none came for a while, or when roused.

        A message in hand is returned again, so that an interrupt loses none.
        """

    def watch(self) -> bool:
        """Sleep until a message has come that nobody takes, or for a while; return whether one has."""

    def wake_leader(self) -> None:
        """Have :meth:`receive` return."""

    def close(self) -> None:
        """Wake all threads; from now on none sleeps here."""


class Members(Protocol):
    """The members of a group that workers join and leave: a DynamicGroup."""

    @property
    def left(self) -> Mapping[int, str]:
        """Return how those ended that are gone, by number."""

    def remove_lost(self, number: int, how: str) -> None:
        """Remove a member that this worker has lost."""

    def leave(self) -> None:
        """Tell the others that this worker is no member any more."""


class Router:
    """The connections from one worker to the others.

    Args:
        context: its place in the arena of the workers on its host.
        number: this worker's.
        local_numbers: of the workers in that arena, by local rank.
        size: how many workers there are; None if they join and leave. Then all others are reached by the
            network.

    Attributes:
        shared_buffers: for large memory, among workers on this host.
        network: the transport to other hosts, None if there are none.
        members: the members of the group, if they join and leave.
    """

    def __init__(
        self, context: RankContext, number: int, local_numbers: Sequence[int], size: int | None
    ) -> None:
        self.context = context
        self.number = number
        self.size = size
        self.local_numbers = local_numbers
        self.local_rank_of = {each: local_rank for local_rank, each in enumerate(local_numbers)}
        self.shared_buffers = SharedBufferPool(context)
        self.network: Transport | None = None
        self.members: Members | None = None
        self._routed: RoutedEndpoint | None = None

    def has_ended(self) -> bool:
        """Return whether the program of this worker, where that is a thread, has ended."""
        return not self.context.program.is_alive()

    def endpoint(self, is_lost: Callable[[int], bool]) -> Endpoint | None:
        """Return an endpoint to all workers; None if there are no others.

        Args:
            is_lost: returns whether a worker is gone.
        """
        if self.size == 1:
            return None
        context, local_numbers = self.context, self.local_numbers
        spans_hosts = self.size is None or len(local_numbers) < self.size
        shared_memory = SharedMemoryEndpoint(
            context.address,
            context.arena.address + context.arena.layout.channels,
            context.rank,
            context.size,
            (lambda local_rank: is_lost(local_numbers[local_rank])) if spans_hosts else is_lost,
        )
        if not spans_hosts:
            return shared_memory
        self._routed = RoutedEndpoint(shared_memory, self)
        return self._routed

    def remote_ranks(self) -> list[int]:
        """Return the ranks of the workers on other hosts, in a group that none joins later."""
        return [rank for rank in range(self.size or 0) if rank not in self.local_rank_of]

    def deliver(self, message: Message) -> None:
        """Give the pool a message from the network."""
        assert self._routed is not None
        self._routed.deliver(message)

    def buffers_to(self, number: int) -> SharedBufferPool | None:
        """Return the buffers for large memory to a worker; None to other hosts, and to this worker."""
        return self.shared_buffers if number != self.number and number in self.local_rank_of else None

    def borrow(self, source: int, offset: int, length: int, opened: OpenedBuffers) -> torch.UntypedStorage:
        """Return the storage that a worker has shared with this one. See :meth:`SharedBufferPool.open`."""
        return self.shared_buffers.open(self.local_rank_of[source], offset, length, opened)

    def lost(self, gone: Container[int]) -> dict[int, str]:
        """Return how workers ended that are gone, except those in ``gone``."""
        context, ranks = self.context, self.local_numbers
        dead = context.peers.dead() if context.peers is not None else ()
        lost = {ranks[each]: f"died ({context.end_reason(each)})" for each in dead if ranks[each] not in gone}
        for local_rank, rank in enumerate(ranks):
            if rank != self.number and context.has_left(local_rank):
                lost[rank] = "has shut down"
        if self.network is not None:
            lost.update(self.network.lost())
        if self.members is not None:
            lost.update(self.members.left)
        return lost

    def leave(self) -> None:
        """Let the others know that this worker answers no more."""
        if self.members is not None:
            self.members.leave()
        self.context.leave()
        if self.network is not None:
            self.network.close()


class RoutedEndpoint:
    """The endpoint of a worker that has others on its own and on other hosts.

    Messages from other hosts are in a queue of this object. ``_ARRIVED`` messages, which the worker sends to
    itself through shared memory, have a thread look there. The thread that delivers must never wait for room
    in shared memory, as nobody receives before the worker has met all others. So at most two are under way.

    Two suffice for this invariant: whenever the queue has a message that no thread is about to take, an
    ``_ARRIVED`` is in shared memory, where leader and follower wait. One is received only after the queue was
    seen empty, and the queue is looked at again before the next is: so of two, one stays while the queue has
    a message. Where fewer are under way, each message brings its own.
    """

    def __init__(self, shared_memory: SharedMemoryEndpoint, router: Router) -> None:
        self._shared_memory = shared_memory
        self._router = router
        self._arrived: deque[Message] = deque()
        self._announced = 0  # written by the thread that delivers
        self._noticed = 0  # written by the leader, after it has received one
        self.in_hand: Message | None = None
        self.gil_waits = shared_memory.gil_waits
        self.send_leftovers = shared_memory.send_leftovers
        self.watch = shared_memory.watch
        self.wake_leader = shared_memory.wake_leader
        self.close = shared_memory.close

    def send(
        self,
        peer: int,
        kind: int,
        tag: int,
        parts: Parts,
        keep: object = None,
        sending: Sending | None = None,
    ) -> None:
        """See :class:`Endpoint`."""
        local_rank = self._router.local_rank_of.get(peer)
        if local_rank is not None:
            self._shared_memory.send(local_rank, kind, tag, parts, keep, sending)
        else:
            assert self._router.network is not None
            self._router.network.send(peer, kind, tag, parts, keep, sending)

    def deliver(self, message: Message) -> None:
        """Queue a message from the network, and wake the leader. For one thread at a time."""
        self._arrived.append(message)
        if self._announced - self._noticed >= _MAX_ANNOUNCED:
            return
        self._announced += 1
        self._shared_memory.send(self._router.context.rank, _ARRIVED, 0, _EMPTY)

    def receive(self, *, eager: bool) -> Message | None:
        """See :class:`Endpoint`.

        Any ``_ARRIVED`` message will do: an interrupt may have come between one and the message it is for.
        A message is taken by two consecutive assignments, between which no interrupt comes.
        """
        shared_memory = self._shared_memory
        while self.in_hand is None and not self._arrived:
            message = shared_memory.receive(eager=eager)
            if message is None:
                return None
            if message.kind == _ARRIVED:
                shared_memory.in_hand = None
                self._noticed += 1
            else:
                self.in_hand = message._replace(source=self._router.local_numbers[message.source])
                shared_memory.in_hand = None
        if self.in_hand is None:
            self.in_hand = self._arrived[0]
            del self._arrived[0]
        return self.in_hand
