"""Test operations on objects that are left between two of their messages: every rank learns of it.

Otherwise the rank's next operation would be taken for the second by the others.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.collectives import objects
from torchestra.engine.p2p.tags import ARRIVED
from torchestra.errors import GroupAbortedError
from torchestra.process_group import monitored_barrier
from torchestra.tensors.packed_objects import PackedObjects
from worlds import run

SOON = 20.0
LONG = ["x" * 10_000]  # too long for the first message


def run_together(body: Callable[..., None], *args: Any) -> None:
    """Run it on two ranks, neither of which is still making the group when the other begins."""
    ready = threading.Barrier(2)

    def begin() -> None:
        ready.wait(SOON)
        body(*args)

    run("threads", 2, begin)


def gather_on_all() -> None:
    dist.all_gather_object([None] * 2, LONG)


def gather_on_one() -> None:
    dist.gather_object(LONG, [None] * 2 if dist.get_rank() == 1 else None, 1)


def broadcast() -> None:
    dist.broadcast_object_list([LONG] if dist.get_rank() == 1 else [None], 1)


def scatter() -> None:
    dist.scatter_object_list([None], [LONG, LONG] if dist.get_rank() == 1 else None, 1)


def move_and_fail(move: Callable[[], None], error: type[BaseException]) -> None:
    """Rank 0 fails when the first operation is over."""
    with pytest.raises(error if dist.get_rank() == 0 else GroupAbortedError) as caught:
        move()
    if dist.get_rank() == 1:
        assert re.search(rf"rank 0 left \w*object\w* with {error.__name__}", str(caught.value))
    with pytest.raises(GroupAbortedError, match="rank 0 left"):
        dist.broadcast(torch.zeros(8, dtype=torch.uint8), 1)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("move", [gather_on_all, gather_on_one, broadcast, scatter])
def test_objects_whose_rest_is_not_moved(
    move: Callable[[], None], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingPackedObjects(PackedObjects):
        @classmethod
        def all_arriving(cls, blocks: torch.Tensor) -> Any:
            if dist.get_rank() == 0:
                raise error("no memory for what is to come")
            return PackedObjects.all_arriving(blocks)

    monkeypatch.setattr(objects, "PackedObjects", FailingPackedObjects)
    run_together(move_and_fail, move, error)


def send_half() -> None:
    """Rank 0 fails when the first of the messages has been sent, or received."""
    if dist.get_rank() == 0:
        communicator = dist.group.WORLD.communicator
        send, left = communicator.send, [1]

        def fail_second(*args: Any) -> None:
            if not left:
                raise MemoryError("no memory for the rest")
            send(*args)
            left.pop()

        communicator.send = fail_second
        with pytest.raises(MemoryError):
            dist.send_object_list([LONG], 1)
    else:
        with pytest.raises(GroupAbortedError, match="rank 0 left send_object_list with MemoryError"):
            dist.recv_object_list([None], 0)


def test_objects_of_which_only_the_first_message_is_sent() -> None:
    run_together(send_half)


def leave_barrier(left_by: int) -> None:
    if dist.get_rank() == left_by:
        with pytest.raises(KeyboardInterrupt):
            dist.monitored_barrier()
    else:
        with contextlib.suppress(GroupAbortedError):  # rank 0 may have passed
            dist.monitored_barrier()
    with pytest.raises(
        GroupAbortedError, match=f"rank {left_by} left monitored_barrier with KeyboardInterrupt"
    ):
        dist.barrier()


@pytest.mark.parametrize("left_by", [0, 1])
def test_a_monitored_barrier_that_a_rank_leaves(left_by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has sent before would let the next one pass too early."""
    report, failure = monitored_barrier._report_to_rank_0, monitored_barrier._failure

    def report_and_leave(communicator: Any, limit: float) -> None:
        if left_by == 1:
            communicator.send(torch.zeros(1, dtype=torch.int64), 0, ARRIVED, limit)
            raise KeyboardInterrupt
        report(communicator, limit)

    def leave(work: Any) -> Any:
        if left_by == 0:
            raise KeyboardInterrupt
        return failure(work)

    monkeypatch.setattr(monitored_barrier, "_report_to_rank_0", report_and_leave)
    monkeypatch.setattr(monitored_barrier, "_failure", leave)
    run_together(leave_barrier, left_by)
