"""The default group: on every rank before any has met the others, and on none if they do not meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.communicator.communicator import Communicator
from torchestra.process_group.starting import GroupSpec
from torchestra.store import HashStore
from torchestra.world import init
from torchestra.world.registry import thread_rank

SOON = 20.0


def on_threads(size: int, life: Callable[[int], Any]) -> list[Any]:
    store = HashStore()
    ended: list[Any] = [None] * size

    def body(rank: int) -> None:
        with thread_rank(rank, size, store):
            try:
                ended[rank] = life(rank)
            except BaseException as error:
                ended[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def test_a_rank_that_is_late_out_of_the_meeting_serves_one_that_acts_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a remote call does that reaches a rank before its init_process_group() has returned."""
    first_is_out, called = threading.Event(), threading.Event()
    start = init.start

    def start_slowly(spec: GroupSpec) -> Communicator:
        made = start(spec)
        if spec.rank == 1:
            assert first_is_out.wait(SOON)
            assert called.wait(SOON)
        return made

    def serve(total: torch.Tensor) -> None:
        first_is_out.wait(SOON)
        try:
            assert dist.is_initialized()
            assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
        finally:
            called.set()
        dist.all_reduce(total)  # after the meeting

    def life(rank: int) -> float:
        total = torch.tensor([rank + 1.0])
        server = threading.Thread(target=serve, args=(total,))
        if rank == 1:
            server.start()
        dist.init_process_group(timeout=SOON)
        if rank == 0:
            first_is_out.set()
            dist.all_reduce(total)
        else:
            server.join(SOON)
        assert type(init.default_group().communicator) is Communicator
        return float(total.item())

    monkeypatch.setattr(init, "start", start_slowly)
    assert on_threads(2, life) == [3.0, 3.0]


def test_a_rank_whose_meeting_fails_has_no_default_group_and_may_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = threading.Barrier(3)
    asked: list[BaseException] = []

    def fail(*arguments: Any, **named: Any) -> Communicator:
        tried.wait(SOON)  # the other thread is about to wait for the meeting
        raise dist.DistBackendError("no memory")

    def use() -> None:
        tried.wait(SOON)
        try:
            dist.barrier()
        except dist.DistError as error:
            asked.append(error)

    def life(rank: int) -> bool:
        user = threading.Thread(target=use)
        if rank == 1:
            user.start()
        with pytest.raises(dist.DistBackendError, match="no memory"):
            dist.init_process_group(timeout=SOON)
        if rank == 1:
            user.join(SOON)
        assert not dist.is_initialized()
        assert dist.group.WORLD is None
        with pytest.raises(dist.NotInitializedError):
            dist.barrier()
        return True

    monkeypatch.setattr(init, "start", fail)
    assert on_threads(2, life) == [True, True]
    assert [type(error) in (dist.GroupDestroyedError, dist.NotInitializedError) for error in asked] == [True]
    monkeypatch.undo()
    assert on_threads(2, lambda rank: dist.init_process_group(timeout=SOON)) == [None, None]
