"""The launch backend for Ray: reaches the ranks by calls to their actors.

A call waits at each actor for events of its rank. Its reply wakes the job's loop, which takes the events and
calls again, saying how many have arrived; so a reply lost to a broken connection is fetched anew.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from torchestra.launcher.backend import LaunchBackend
from torchestra.launcher.channel import anonymous_file
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.on_ray.messages import Event, EventBatch, Printed, ResultChunk, Started
from torchestra.launcher.on_ray.placement import PlacedRank, Placement
from torchestra.launcher.spec import Ended, Failure, PhaseReached
from torchestra.store.secret import SECRET_VARIABLE

_RETRY_S = 0.5
_UNREACHABLE_S = 30.0
_LAST_WAIT_S = 5.0
_OF_A_HOST = frozenset({"TORCHESTRA_HOST_ID", "TORCHESTRA_STORE"})


class _Rank:
    """The launcher's view of a rank's actor.

    Attributes:
        seen: how many events have been taken.
        clock_offset: the number to add to the actor's times to get this host's: the least delay seen.
        silent_since: when the first call failed after the last successful one.
        result: the pickled result, as far as it has arrived.
        over: whether nothing more is expected.
    """

    def __init__(self, placed: PlacedRank) -> None:
        self.placed = placed
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

    Raises:
        DistError: the job's store cannot be served on the node of rank 0.
    """

    def __init__(self, placement: Placement, env: Mapping[str, str]) -> None:
        self._ray = placement.ray
        self._ranks = [_Rank(placed) for placed in placement.ranks_placed]
        self._variables = {**_settings(), **env, **_rendezvous(placement, env)}

    def _start(self) -> None:
        self.listener.begun()
        spec = self._ray.put(self.listener.spec)
        for index, rank in enumerate(self._ranks):
            placed = rank.placed
            reply = placed.actor.start.remote(spec, index, placed.local_rank, self._variables_of(placed))
            self._expect(index, reply)

    def signal(self, signum: signal.Signals, final: bool, rank: int | None = None) -> None:
        for index, held in enumerate(self._ranks):
            if not held.over and rank in (None, index):
                held.placed.actor.signal.remote(int(signum), final)
        if signum == signal.SIGKILL:
            self.listener.loop.call_at(time.monotonic() + _LAST_WAIT_S, self._give_up)

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

    def _expect(self, index: int, reply: Any) -> None:
        future: Future[EventBatch | None] = reply.future()
        loop = self.listener.loop  # one of Ray's threads calls:
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(partial(self._take, index, done)))

    def _listen(self, index: int) -> None:
        rank = self._ranks[index]
        self._expect(index, rank.placed.actor.listen.remote(rank.seen))

    def _take(self, index: int, reply: Future[EventBatch | None]) -> None:
        rank = self._ranks[index]
        if rank.over:
            return
        try:
            batch = reply.result()
        except self._ray.exceptions.ActorUnavailableError as error:
            self._ask_later(index, error)
            return
        except self._ray.exceptions.RayError as error:
            self._lose(index, error)
            return
        rank.silent_since = None
        if batch is not None:
            self._take_events(index, batch)
        if not rank.over:
            self._listen(index)

    def _ask_later(self, index: int, error: Exception) -> None:
        """Call again after the connection broke: it is restored, or Ray learns that the actor is gone."""
        rank, now = self._ranks[index], time.monotonic()
        rank.silent_since = rank.silent_since or now
        if now - rank.silent_since > _UNREACHABLE_S:
            self._lose(index, error)
        else:
            self.listener.loop.call_at(now + _RETRY_S, partial(self._listen, index))

    def _take_events(self, index: int, batch: EventBatch) -> None:
        rank = self._ranks[index]
        rank.clock_offset = min(rank.clock_offset, time.monotonic() - batch.clock)
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

    def _lose(self, index: int, error: Exception) -> None:
        """Report that the rank's actor has failed or is gone, and the rank with it."""
        now = time.monotonic()
        why = self._why_lost(index, error)
        self._ranks[index].over = True
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

    def _give_up(self) -> None:
        """Stop waiting for ranks that should have been killed a while ago and have not answered."""
        for index, rank in enumerate(self._ranks):
            if not rank.over:
                rank.over = True
                self.listener.ended(Ended(index, -signal.SIGKILL, time.monotonic()))


def _settings() -> dict[str, str]:
    """Return the environment's variables for torchestra, except those that concern this host."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TORCHESTRA_") and name not in _OF_A_HOST
    }


def _rendezvous(placement: Placement, env: Mapping[str, str]) -> dict[str, str]:
    """Serve the job's store on rank 0's node, as nodes may not reach the launcher; return its variables."""
    first = placement.ranks_placed[0]
    secret = env.get(SECRET_VARIABLE) or os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    address = first.info.address
    reply = first.actor.serve_store.remote(address, secret)
    ((port, master_port),) = placement.call([reply], f"serve the job's store on host {first.info.host}")
    named = f"[{address}]" if ":" in address else address
    return {
        "WORLD_SIZE": str(len(placement.ranks_placed)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(master_port),
        "TORCHESTRA_SECRET": secret,
        "TORCHESTRA_STORE": f"{named}:{port}",
        "RAY_ADDRESS": first.info.cluster,
    }
