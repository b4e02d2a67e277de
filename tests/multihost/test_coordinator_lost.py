"""A host whose coordinator has died lives as long as one of its ranks does."""

from __future__ import annotations

import signal

import torch
from simulated import host_processes

import torchestra as dist
from worlds import await_note, leave_note


def receive_beside_a_dead_coordinator() -> None:
    """Rank 2 waits for a message of rank 0 for longer than its host, which has lost rank 1, may be silent."""
    rank = dist.get_rank()
    leave_note(f"ready-{rank}")
    if rank == 0:
        await_note("killed")
        detector = dist.group.WORLD.communicator.engine.hierarchy.detector  # type: ignore[union-attr]
        while 1 not in detector.dead and not detector.silent:
            detector._closed.wait(0.01)
        assert not detector.silent, "rank 2 lives"
        dist.send(torch.ones(1), 2)
        leave_note("sent")
    else:
        dist.recv(torch.ones(1), 0)
        leave_note("received")
    await_note("over")


def test_a_rank_that_waits_for_a_message_stands_in_for_the_coordinator_of_its_host() -> None:
    with host_processes((1, 2), receive_beside_a_dead_coordinator) as world:
        for rank in range(3):
            world.await_file(f"ready-{rank}")
        world.signal(1, signal.SIGKILL)
        open(world.path("killed"), "w").close()
        world.await_file("sent")
        world.await_file("received")
