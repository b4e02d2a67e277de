"""The ranks of a job on a Ray cluster, as the launcher reaches them: by calls to their actors.

A call waits at each actor for news of its rank. Its reply wakes the job's loop, which takes the news and
calls again, saying how much has arrived; so a reply that a broken connection swallows is fetched anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from torchestra.launcher.backend import LaunchBackend
from torchestra.launcher.channel import anonymous_file
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.job import Job
from torchestra.launcher.on_ray.messages import Event, EventBatch, Printed, ResultChunk, Started
from torchestra.launcher.on_ray.placement import PlacedRank, Placement
from torchestra.launcher.spec import Ended, Failure
from torchestra.store.secret import SECRET_VARIABLE

__all__ = ["RayBackend"]

_ASK_AGAIN_S = 0.5
_UNREACHABLE_S = 30.0
_LAST_WAIT_S = 5.0
_OF_A_HOST = frozenset({"TORCHESTRA_HOST_ID", "TORCHESTRA_STORE"})


class _Rank:
    """What the launcher knows of a rank's actor.

    Attributes:
        seen: how many pieces of news have been taken.
        clock: what to add to the actor's times for this host's: the least delay that was seen.
        silent_since: when the first call failed of those that have failed since the last that did not.
        result: the pickled result, as far as it has come.
        over: nothing more is expected.
    """

    def __init__(self, placed: PlacedRank) -> None:
        self.placed = placed
        self.seen = 0
        self.clock = math.inf
        self.silent_since: float | None = None
        self.result: BinaryIO | None = None
        self.over = False


class RayBackend(LaunchBackend):
    """Ranks that are held by actors.

    Args:
        placement: the actors. The caller's, who closes it.
        env: variables of the ranks' environment, beside and before those of their nodes.

    Raises:
        DistError: the job's store cannot be served on the node of rank 0.
    """

    def __init__(self, placement: Placement, env: Mapping[str, str]) -> None:
        self._ray = placement.ray
        self._ranks = [_Rank(placed) for placed in placement.ranks_placed]
        self._variables = {**_settings(), **env, **_ports(placement, env)}
        self._replies: deque[tuple[int, Future[EventBatch | None]]] = deque()
        self._wake_end, self._waker = socket.socketpair()
        self._wake_end.setblocking(False)
        self._waker.setblocking(False)
        self._waking = threading.Lock()
        self._job: Job | None = None

    @property
    def job(self) -> Job:
        """The job that was started."""
        assert self._job is not None
        return self._job

    def start(self, job: Job) -> None:
        self._job = job
        job.watch(self._wake_end, self._take_replies)
        job.begun()
        spec = self._ray.put(job.spec)
        for number, rank in enumerate(self._ranks):
            placed = rank.placed
            reply = placed.actor.start.remote(spec, number, placed.local_rank, self._variables_of(placed))
            self._expect(number, reply)

    def signal(self, signum: signal.Signals, final: bool) -> None:
        for rank in self._ranks:
            if not rank.over:
                rank.placed.actor.signal.remote(int(signum), final)
        if signum == signal.SIGKILL:
            self.job.call_at(time.monotonic() + _LAST_WAIT_S, self._give_up)

    def drain(self) -> None:
        """Nothing is left to read: a rank's output comes before the word that it has ended."""

    def close(self) -> None:
        with self._waking:
            self._waker.close()
            self._wake_end.close()
        for rank in self._ranks:
            if rank.result is not None:
                rank.result.close()

    def _variables_of(self, placed: PlacedRank) -> dict[str, str]:
        own = {"LOCAL_WORLD_SIZE": str(placed.local_size), "GROUP_RANK": str(placed.node)}
        neighbours = [rank.placed.place.gpus for rank in self._ranks if rank.placed.node == placed.node]
        gpus = [gpu for gpus in neighbours for gpu in gpus]
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return {**self._variables, **own}

    # Calls and their replies

    def _expect(self, number: int, reply: Any) -> None:
        future: Future[EventBatch | None] = reply.future()
        future.add_done_callback(partial(self._note_reply, number))

    def _note_reply(self, number: int, future: Future[EventBatch | None]) -> None:
        """Called on one of Ray's threads."""
        self._replies.append((number, future))
        with self._waking, contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _listen(self, number: int) -> None:
        rank = self._ranks[number]
        self._expect(number, rank.placed.actor.listen.remote(rank.seen))

    def _take_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_end.recv(4096)
        while self._replies:
            number, future = self._replies.popleft()
            rank = self._ranks[number]
            if rank.over:
                continue
            try:
                heard = future.result()
            except self._ray.exceptions.ActorUnavailableError as error:
                self._ask_later(number, error)
                continue
            except self._ray.exceptions.RayError as error:
                self._lose(number, error)
                continue
            rank.silent_since = None
            if heard is not None:
                self._take_news(number, heard)
            if not rank.over:
                self._listen(number)

    def _ask_later(self, number: int, error: Exception) -> None:
        """The connection is broken: either it comes back, or Ray learns that the actor is gone."""
        rank, now = self._ranks[number], time.monotonic()
        rank.silent_since = rank.silent_since or now
        if now - rank.silent_since > _UNREACHABLE_S:
            self._lose(number, error)
        else:
            self.job.call_at(now + _ASK_AGAIN_S, partial(self._listen, number))

    def _take_news(self, number: int, heard: EventBatch) -> None:
        rank = self._ranks[number]
        rank.clock = min(rank.clock, time.monotonic() - heard.clock)
        for position, piece in enumerate(heard.news, heard.first):
            if position >= rank.seen:
                rank.seen = position + 1
                self._take(number, rank, piece)

    def _take(self, number: int, rank: _Rank, piece: Event) -> None:
        if isinstance(piece, Started):
            self.job.forked(number, piece.pid, rank.placed.place.host)
        elif isinstance(piece, Printed):
            self.job.printed(number, piece.stream, piece.data)
        elif isinstance(piece, ResultChunk):
            rank.result = rank.result or anonymous_file()
            rank.result.write(piece.data)
            if piece.last:
                result, rank.result = rank.result, None
                self.job.returned(number, result)
        elif isinstance(piece, Failure):
            self.job.failed(number, replace(piece, time=piece.time + rank.clock))
        else:
            rank.over = True
            self.job.ended(replace(piece, rank=number, time=piece.time + rank.clock))

    # Ranks that nothing is heard of any more

    def _lose(self, number: int, error: Exception) -> None:
        """The rank's actor has failed or is gone, and the rank with it."""
        now = time.monotonic()
        why = self._why_lost(number, error)
        self._ranks[number].over = True
        self.job.failed(number, Failure(now, 1, why, f"{why}\n"))
        self.job.ended(Ended(number, 1, now))

    def _why_lost(self, number: int, error: Exception) -> str:
        place = self._ranks[number].placed.place
        host = f"host {place.host} ({place.address})"
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return str(error.cause)
        together = [other for other, rank in enumerate(self._ranks) if rank.placed.place.node == place.node]
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if place.node not in alive:
            return f"{host} with {ranks_phrase(together)} is lost: its Ray node died"
        reason = str(error).strip().splitlines()[-1]
        return f"the Ray actor of rank {number} on {host} is lost: {reason}"

    def _give_up(self) -> None:
        """The ranks were to be killed a while ago: what has not been heard of is not waited for."""
        for number, rank in enumerate(self._ranks):
            if not rank.over:
                rank.over = True
                self.job.ended(Ended(number, -signal.SIGKILL, time.monotonic()))


def _settings() -> dict[str, str]:
    """What this process's environment says to torchestra, but for what is about this host."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TORCHESTRA_") and name not in _OF_A_HOST
    }


def _ports(placement: Placement, env: Mapping[str, str]) -> dict[str, str]:
    """Where the ranks meet: on the node of rank 0, since the launcher may be where no node reaches it."""
    first = placement.ranks_placed[0]
    secret = env.get(SECRET_VARIABLE) or os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    address = first.place.address
    reply = first.actor.serve_store.remote(address, secret)
    ((port, master_port),) = placement.call([reply], f"serve the job's store on host {first.place.host}")
    named = f"[{address}]" if ":" in address else address
    return {
        "WORLD_SIZE": str(len(placement.ranks_placed)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(master_port),
        "TORCHESTRA_SECRET": secret,
        "TORCHESTRA_STORE": f"{named}:{port}",
        "RAY_ADDRESS": first.place.cluster,
    }
