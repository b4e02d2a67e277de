"""The launch backend for Ray: reaches the ranks by calls to their actors.

A call waits at each actor for events of its rank. Its reply wakes the job's loop, which takes the events and
calls again, saying how many have arrived; so a reply lost to a broken connection is fetched anew.
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.errors import DistError
from torchestra.launcher.backend import LaunchBackend
from torchestra.launcher.channel import anonymous_file
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.on_ray.job_variables import job_variables
from torchestra.launcher.on_ray.messages import ActorInfo, Event, EventBatch, Printed, ResultChunk, Started
from torchestra.launcher.on_ray.placement import HeldActor, PlacedRank, Placement
from torchestra.launcher.spec import Ended, Failure, PhaseReached
from torchestra.store.secret import SECRET_VARIABLE

_RETRY_S = 0.5
_UNREACHABLE_S = 30.0
_LAST_WAIT_S = 5.0


class _Rank:
    """The launcher's view of a rank's actor.

    Attributes:
        seen: how many events have been taken.
        clock_offset: the number to add to the actor's times to get this host's: the least delay seen.
        silent_since: when the first call failed after the last successful one.
        result: the pickled result, as far as it has arrived.
        over: whether nothing more is expected.
        lost: whether its actor has failed or is gone.
        moving: whether it waits for another actor.
    """

    def __init__(self, placed: PlacedRank) -> None:
        self.placed = placed
        self.lost = self.moving = False
        self.seen = 0
        self.clock_offset = math.inf
        self.silent_since: float | None = None
        self.result: BinaryIO | None = None
        self.over = False


class RayBackend(LaunchBackend):
    """Ranks that are held by actors.

    Args:
        placement: the actors; the caller closes it.
        env: environment variables of the ranks, in addition to those of their nodes, which they override.
        elastic: whether ranks may be replaced: then the store is replicated, and spare actors get ready.

    Raises:
        DistError: the job's store cannot be served.
    """

    def __init__(self, placement: Placement, env: Mapping[str, str], *, elastic: bool = False) -> None:
        self._ray = placement.ray
        self._placement = placement
        self._ranks = [_Rank(placed) for placed in placement.ranks_placed]
        self._variables = job_variables(placement, env, replicated=elastic)
        self._joining: Any = None  # the spec of replacements, in Ray's object store

    def _start(self) -> None:
        self.listener.begun()
        spec = self._ray.put(self.listener.spec)
        for index in range(len(self._ranks)):
            self._start_rank(index, spec)
        for spare in self._placement.spares:
            spare.actor.warm_up.remote(self._variables)

    def _start_rank(self, index: int, spec: Any) -> None:
        rank = self._ranks[index]
        placed = rank.placed
        reply = placed.actor.start.remote(spec, index, placed.local_rank, self._variables_of(placed))
        self._expect(index, rank, reply)

    def signal(self, signum: signal.Signals, final: bool, rank: int | None = None) -> None:
        signalled = [
            (index, held) for index, held in enumerate(self._ranks) if not held.over and rank in (None, index)
        ]
        for index, held in signalled:
            if not held.moving:
                held.placed.actor.signal.remote(int(signum), final)
            elif final or signum == signal.SIGKILL:  # it has no process yet
                self._end(index, held, -signum)
        if signum == signal.SIGKILL:
            give_up = partial(self._give_up, signalled)
            self.listener.loop.call_at(time.monotonic() + _LAST_WAIT_S, give_up)

    # Replacements

    def replace(self, rank: int) -> None:
        """Have a rank started again: by its actor, or by another one if that is lost."""
        held = self._ranks[rank]
        if held.lost:
            self._move(rank, held.placed.held.bundle)
            return
        again = self._ranks[rank] = _Rank(held.placed)
        again.seen, again.clock_offset = held.seen, held.clock_offset
        self._expect(rank, again, held.placed.actor.replace.remote())

    def _move(self, index: int, bundle: int) -> None:
        rank = self._ranks[index] = _Rank(self._ranks[index].placed)
        rank.moving = True
        actor, bundle = self._placement.another_actor(bundle)
        loop = self.listener.loop
        actor.info.remote().future().add_done_callback(
            lambda done: loop.call_soon_threadsafe(partial(self._moved, index, rank, actor, bundle, done))
        )

    def _moved(self, index: int, rank: _Rank, actor: Any, bundle: int, reply: Future[ActorInfo]) -> None:
        """Start a rank at the actor that was found for it, or look for another, if that is gone, too."""
        if rank.over:
            return
        try:
            rank.placed = self._placement.move(index, HeldActor(actor, reply.result(), bundle))
        except (self._ray.exceptions.RayError, DistError) as error:
            if self._placement.spares:
                self._move(index, bundle)
            else:
                self._lose(index, rank, error)
            return
        rank.moving = False
        self._have_stand_by(rank.placed)
        if self._joining is None:
            self._joining = self._ray.put(replace(self.listener.spec, joins=True))
        self._start_rank(index, self._joining)

    def _have_stand_by(self, placed: PlacedRank) -> None:
        """Have the actor of a replacement look after the replicas of the store, if there are such."""
        addresses, secret = self._variables["TORCHESTRA_STORE"].split(","), self._variables[SECRET_VARIABLE]
        if len(addresses) > 1:
            bound = heartbeat_bound(self._variables)
            placed.actor.come_later.remote(placed.info.address, bound, addresses, secret)

    def drain(self) -> None:
        """Do nothing: a rank's output comes before its end."""

    def close(self) -> None:
        for rank in self._ranks:
            if rank.result is not None:
                rank.result.close()

    def _variables_of(self, placed: PlacedRank) -> dict[str, str]:
        own = {"LOCAL_WORLD_SIZE": str(placed.local_size), "GROUP_RANK": str(placed.node)}
        of_ranks = (rank.placed.info.gpus for rank in self._ranks if rank.placed.node == placed.node)
        gpus = [*itertools.chain.from_iterable(of_ranks)]
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return {**self._variables, **own}

    # Calls and their replies

    def _expect(self, index: int, rank: _Rank, reply: Any) -> None:
        future: Future[EventBatch | None] = reply.future()
        loop = self.listener.loop  # one of Ray's threads calls:
        future.add_done_callback(
            lambda done: loop.call_soon_threadsafe(partial(self._take, index, rank, done))
        )

    def _listen(self, index: int, rank: _Rank) -> None:
        self._expect(index, rank, rank.placed.actor.listen.remote(rank.seen))

    def _take(self, index: int, rank: _Rank, reply: Future[EventBatch | None]) -> None:
        if rank.over:
            return
        try:
            batch = reply.result()
        except self._ray.exceptions.ActorUnavailableError as error:
            self._ask_later(index, rank, error)
            return
        except self._ray.exceptions.RayError as error:
            self._lose(index, rank, error)
            return
        rank.silent_since = None
        if batch is not None:
            self._take_events(index, rank, batch)
        if not rank.over:
            self._listen(index, rank)

    def _ask_later(self, index: int, rank: _Rank, error: Exception) -> None:
        """Call again after the connection broke: it is restored, or Ray learns that the actor is gone."""
        now = time.monotonic()
        rank.silent_since = rank.silent_since or now
        if now - rank.silent_since > _UNREACHABLE_S:
            self._lose(index, rank, error)
        else:
            self.listener.loop.call_at(now + _RETRY_S, partial(self._listen, index, rank))

    def _take_events(self, index: int, rank: _Rank, batch: EventBatch) -> None:
        rank.clock_offset = min(rank.clock_offset, time.monotonic() - batch.clock)
        if batch.replicas:
            self._variables["TORCHESTRA_STORE"] = ",".join(batch.replicas)
        for offset, event in enumerate(batch.events, batch.first):
            if offset >= rank.seen:
                rank.seen = offset + 1
                self._pass_on(index, rank, event)

    def _pass_on(self, index: int, rank: _Rank, event: Event) -> None:
        if isinstance(event, Started):
            self.listener.forked(index, event.pid, rank.placed.info.host)
        elif isinstance(event, Printed):
            self.listener.printed(index, event.stream, event.data)
        elif isinstance(event, ResultChunk):
            rank.result = rank.result or anonymous_file()
            rank.result.write(event.data)
            if event.last:
                result, rank.result = rank.result, None
                self.listener.returned(index, result)
        elif isinstance(event, PhaseReached):
            self.listener.reached(index, replace(event, time=event.time + rank.clock_offset))
        elif isinstance(event, Failure):
            self.listener.failed(index, replace(event, time=event.time + rank.clock_offset))
        else:
            rank.over = True
            self.listener.ended(replace(event, rank=index, time=event.time + rank.clock_offset))

    # Ranks that no longer answer

    def _lose(self, index: int, rank: _Rank, error: Exception) -> None:
        """Report that the rank's actor has failed or is gone, and the rank with it."""
        now = time.monotonic()
        why = self._why_lost(index, error)
        rank.over = rank.lost = True
        self.listener.failed(index, Failure(now, 1, why, f"{why}\n"))
        self.listener.ended(Ended(index, 1, now))

    def _why_lost(self, index: int, error: Exception) -> str:
        info = self._ranks[index].placed.info
        host = f"host {info.host} ({info.address})"
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return str(error.cause)
        together = [other for other, rank in enumerate(self._ranks) if rank.placed.info.node == info.node]
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if info.node not in alive:
            return f"{host} with {ranks_phrase(together)} is lost: its Ray node died"
        reason = str(error).strip().splitlines()[-1]
        return f"the Ray actor of rank {index} on {host} is lost: {reason}"

    def _give_up(self, killed: Sequence[tuple[int, _Rank]]) -> None:
        """Stop waiting for ranks that should have been killed a while ago and have not answered."""
        for index, rank in killed:
            if not rank.over:
                self._end(index, rank, -signal.SIGKILL)

    def _end(self, index: int, rank: _Rank, exit_code: int) -> None:
        rank.over = rank.lost = True
        self.listener.ended(Ended(index, exit_code, time.monotonic()))
