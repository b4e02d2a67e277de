"""send and recv in their entries: a call that must wait is run to its end there, or handed to Python."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from typing import Any

import pytest
import torch

import torchestra as dist
from interrupts import interrupted_at
from torchestra.communicator import entries
from torchestra.engine.entries import tensor_access
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p import mailbox
from worlds import KINDS, run

pytestmark = pytest.mark.skipif(tensor_access.access_to_tensors() is None, reason=tensor_access.why_not())

SOON = 60.0
THREADS = 3
LENGTHS = (1, 20, 5_000, 70_000, 300_000, 70_000, 8, 20_000)
"""Bytes: inside a header, one piece, several pieces, more than the ring holds."""


def mailbox_of_world() -> Any:
    engine: Any = dist.group.WORLD.communicator.engine
    return engine.mailbox


def exchange_in_a_thread(tag: int, errors: list[BaseException]) -> None:
    rank = dist.get_rank()
    try:
        for turn, length in enumerate(LENGTHS * 3):
            given = torch.full((length,), (tag + turn + rank) % 251, dtype=torch.uint8)
            got = torch.zeros(length, dtype=torch.uint8)
            if rank == 0:
                dist.send(given, 1, tag=tag)
                dist.recv(got, 1, tag=tag)
            else:
                dist.recv(got, 0, tag=tag)
                dist.send(given, 0, tag=tag)
            assert bool((got == (tag + turn + 1 - rank) % 251).all()), (tag, turn, length)
    except BaseException as error:
        errors.append(error)


def exchange_in_threads() -> None:
    """Several threads of each rank send and receive: they have one record for it, and take turns."""
    errors: list[BaseException] = []
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(exchange_in_a_thread, tag, errors), daemon=True
        )
        for tag in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_of_a_rank_send_and_receive_at_once(kind: str) -> None:
    run(kind, 2, exchange_in_threads)


def be_interrupted() -> list[str]:
    """Receive from oneself what has not come, and be interrupted wherever Python takes the call over."""
    dist.send(torch.zeros(30), 0)
    dist.recv(torch.zeros(30), 0)  # the first makes the entry
    files, places, words = [entries.__file__, mailbox.__file__], [], mailbox_of_world()._words
    for place in range(100):
        tensor = torch.zeros(30)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, files) as where:
            dist.recv(tensor, 0)
        assert where, "nothing was sent, so nothing can have come"
        assert words[w.BUSY // 8] == words[w.HANDED_OVER // 8] == 0, where
        dist.send(torch.full((30,), float(place)), 0)
        dist.recv(tensor, 0)
        assert tensor.tolist() == [float(place)] * 30, where
        places.append(where[0])
        if where[0].startswith("_continue_call"):
            break
    return places


def test_an_interrupt_where_python_takes_a_call_over_loses_nothing() -> None:
    (places,) = run("threads", 1, be_interrupted)
    assert places[0].startswith("finish_call")  # before anything of the mailbox
    assert places[-1].startswith("_continue_call")


def receive_what_is_longer() -> None:
    tensor = torch.zeros(1000)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2000), 1)
        dist.send(torch.ones(1000), 1)
    else:
        with pytest.raises(dist.DistBackendError, match="8000 bytes"):
            dist.recv(tensor, 0)
        dist.recv(tensor, 0)
        assert tensor.sum() == 1000
        assert mailbox_of_world()._words[w.BUSY // 8] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_does_not_fit_is_told_of_and_the_next_one_comes(kind: str) -> None:
    run(kind, 2, receive_what_is_longer)


def send_what_nobody_takes() -> None:
    """A send that has begun and waits for room is left with an error: the group is of no use any more."""
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistError, match="rank 1"):
            dist.send(torch.ones(1 << 20), 1)
        assert mailbox_of_world()._words[w.BUSY // 8] == 0
        with pytest.raises(dist.GroupAbortedError):
            dist.send(torch.ones(1), 1)
    else:
        engine: Any = dist.group.WORLD.communicator.engine
        while not engine.is_aborted:
            threading.Event().wait(0.01)


def test_a_send_that_times_out_halfway_aborts_the_group() -> None:
    run("threads", 2, send_what_nobody_takes, timeout=0.5)
