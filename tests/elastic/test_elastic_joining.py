"""Ranks that join a training get its state, and its result is that of one rank without any failure."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

import torchestra as dist
from elastic.training import STEPS, alone, digest, go_on, make
from torchestra import elastic
from torchestra.elastic.membership import Members
from torchestra.engine.membership.rank_context import RankContext
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank
from worlds import OP_SECONDS, WORLD_SECONDS

SHARDS = 6
unfailed = functools.lru_cache(alone)


class Gone(Exception):
    """End a rank that leaves."""


class Job:
    """Run ranks as threads, of which some join."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.told: list[Any] = []
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, size: int | None, body: Callable[[], Any], host: str | None = None) -> None:
        """Begin a rank; one without a size joins."""

        def run() -> None:
            try:
                with thread_rank(rank, size or 1, self.store, host):
                    if size is None:
                        dist.join(timeout=OP_SECONDS)
                    else:
                        dist.init_process_group(timeout=OP_SECONDS)
                    self.told.append(body())
            except Gone:
                pass
            except BaseException as error:
                self.told.append(error)

        self._threads.append(threading.Thread(target=run, name=f"rank {rank}", daemon=True))
        self._threads[-1].start()

    def finish(self) -> list[Any]:
        for thread in self._threads:  # also those that a rank starts meanwhile
            thread.join(WORLD_SECONDS)
            assert not thread.is_alive()
        return self.told


def body(minimum: int, hook: Callable[[elastic.Shard], object] = lambda shard: None) -> Any:
    network, optimizer, scheduler = make(dist.get_rank(), 0.0)
    state = elastic.State(network, optimizer, scheduler=scheduler)
    go_on(state, SHARDS, STEPS, hook, minimum=minimum)
    return digest(state), [(each.lost, each.joined, each.size) for each in state.changes]


def test_a_training_waits_for_ranks_to_join() -> None:
    job = Job()
    for rank in range(2):
        job.start(rank, 2, lambda: body(4))
    for rank in (2, 3):
        job.start(rank, None, lambda: body(4))
    assert [told for told, _ in job.finish()] == [unfailed(SHARDS)] * 4


@pytest.mark.parametrize("explains", [False, True])
def test_a_death_does_not_make_the_loop_collect_where_all_ranks_are(
    monkeypatch: pytest.MonkeyPatch, explains: bool
) -> None:
    """That takes as long as the whole rest of the pause. After the loop errors explain themselves again."""
    job, reports, original = Job(), [], RankContext.report
    monkeypatch.setattr(RankContext, "report", lambda *args: reports.append(args) or original(*args))
    if explains:
        monkeypatch.setattr(Members, "_explain_loss", lambda *_: None)

    def leave(shard: elastic.Shard) -> None:
        if dist.get_rank() == 1 and dist.get_world_size() == 3:
            raise Gone

    def train() -> bool:
        body(1, leave)
        assert dist.group.WORLD is not None
        return bool(dist.group.WORLD.communicator.engine.context.explains_loss)

    for rank in range(3):
        job.start(rank, 3, train)
    assert job.finish() == [True, True]
    assert bool(reports) == explains


@pytest.mark.parametrize("shard_count", [1, 3, 4])
def test_a_rank_that_leaves_in_the_middle_of_a_step_is_replaced(shard_count: int) -> None:
    job, count = Job(), 0

    def leave(shard: elastic.Shard) -> None:
        nonlocal count
        count += 1
        if count == shard_count:
            job.start(1, None, lambda: body(3))
            raise Gone

    for rank in range(3):
        job.start(rank, 3, lambda rank=rank: body(3, leave) if rank == 1 else body(3))
    ended = job.finish()
    assert [told for told, _ in ended] == [unfailed(SHARDS)] * 3
    assert sorted(changes for _, changes in ended) == [[], [((1,), (1,), 3)], [((1,), (1,), 3)]]
