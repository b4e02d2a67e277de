"""Which road leads from a worker to which other one: the arena within its host, the wire to other hosts.

The crew receives from one place. So what comes over the wire is put down beside the arena, and a *slip* that
says so is posted to oneself: whoever leads finds it among the messages, and nobody has to wait for two
things. Without other hosts there is only the arena's post office, and nothing in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

import torch

from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.p2p import Endpoint, Message
from torchestra.rpc.shared_buffers import Lender
from torchestra.rpc.transport import Office, Parts

if TYPE_CHECKING:
    from torchestra.transport.transport import Transport

_SLIP = 0  # a kind of message that agents have no other use for
_EMPTY = ((0, 0),)


class Roads:
    """The ways from one worker to the others.

    Args:
        member: its place in the arena of the workers on its host.
        rank: of this worker.
        hosts: which workers share a host.

    Attributes:
        lender: of large memory, to workers on this host.
        wire: the road to other hosts, None without.
    """

    def __init__(self, member: RankContext, rank: int, hosts: Hosts) -> None:
        self.member = member
        self.rank = rank
        self.hosts = hosts
        self.size = len(hosts.host_of)
        self.near = hosts.members[hosts.host_of[rank]]
        self.is_near = [host == hosts.host_of[rank] for host in hosts.host_of]
        self.lender = Lender(member)
        self.wire: Transport | None = None
        self._junction: Junction | None = None

    def office(self, is_lost: Callable[[int], bool]) -> Office | None:
        """What to send and receive with; None if there are no other workers.

        Args:
            is_lost: whether a worker is gone.
        """
        if self.size == 1:
            return None
        member, near = self.member, self.near
        arena = Endpoint(
            member.address,
            member.arena.address + member.arena.layout.channels,
            member.rank,
            member.size,
            is_lost if len(near) == self.size else lambda place: is_lost(near[place]),
        )
        if len(near) == self.size:
            return arena
        self._junction = Junction(arena, self)
        return self._junction

    def far(self) -> list[int]:
        """The ranks of the workers on other hosts."""
        return [rank for rank, near in enumerate(self.is_near) if not near]

    def deliver(self, message: Message) -> None:
        """Let the crew have what has come over the wire."""
        assert self._junction is not None
        self._junction.deliver(message)

    def lender_to(self, rank: int) -> Lender | None:
        """Who lends large memory to a worker: nobody to other hosts, nor to oneself."""
        return self.lender if rank != self.rank and self.is_near[rank] else None

    def borrow(self, source: int, offset: int, length: int) -> torch.UntypedStorage:
        """What a worker has lent to this one."""
        return self.lender.borrow(self.hosts.place_of[source], offset, length)

    def lost(self, known: Container[int]) -> dict[int, str]:
        """What has become of workers that are gone, but for those that are known to be."""
        member = self.member
        dead = member.peers.dead() if member.peers is not None else ()
        lost = {
            self.near[place]: f"died ({member.how(place)})" for place in dead if self.near[place] not in known
        }
        for place, rank in enumerate(self.near):
            if rank != self.rank and member.has_left(place):
                lost[rank] = "has shut down"
        if self.wire is not None:
            lost.update(self.wire.lost())
        return lost

    def leave(self) -> None:
        """Let the others know that this worker answers no more."""
        self.member.leave()
        if self.wire is not None:
            self.wire.close()


class Junction:
    """Where the roads of a worker meet that has others on its host and elsewhere."""

    def __init__(self, arena: Endpoint, roads: Roads) -> None:
        self._arena = arena
        self._roads = roads
        self._places = roads.hosts.place_of
        self._is_near = roads.is_near
        self._near = roads.near
        self._own = roads.member.rank
        self._arrived: deque[Message] = deque()

    def send(self, peer: int, kind: int, tag: int, parts: Parts, keep: object = None) -> None:
        if self._is_near[peer]:
            self._arena.send(self._places[peer], kind, tag, parts, keep)
        else:
            assert self._roads.wire is not None
            self._roads.wire.send(peer, kind, tag, parts, keep)

    def deliver(self, message: Message) -> None:
        """Put down what has come over the wire, and say so. For one thread at a time."""
        self._arrived.append(message)
        self._arena.send(self._own, _SLIP, 0, _EMPTY)

    def send_leftovers(self) -> None:
        self._arena.send_leftovers()

    def receive(self, *, eager: bool) -> Message | None:
        message = self._arena.receive(eager=eager)
        if message is None:
            return None
        if message.kind == _SLIP:
            return self._arrived.popleft()
        return message._replace(source=self._near[message.source])

    def watch(self) -> bool:
        return self._arena.watch()

    def wake_leader(self) -> None:
        self._arena.wake_leader()

    def close(self) -> None:
        self._arena.close()
