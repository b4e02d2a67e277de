"""A hang of a group on several hosts is diagnosed by the facts of all of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from simulated import on_threads

import torchestra as dist
from torchestra.errors import CollectiveTimeoutError, GroupAbortedError
from worlds import set_timeout

SOON = 30.0


def one_does_not_come(met: threading.Barrier, given_up: threading.Event) -> str:
    dist.barrier()
    met.wait(SOON)  # none is still in the barrier when the other gives up
    if dist.get_rank() > 0:
        assert given_up.wait(SOON)
        return ""
    set_timeout(0.3)
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.all_reduce(torch.ones(3))
    given_up.set()
    return str(caught.value)


def test_a_rank_of_another_host_is_the_culprit() -> None:
    told, _ = on_threads((1, 1), one_does_not_come, threading.Barrier(2), threading.Event())
    diagnosis = told.splitlines()[1]
    call = "operation 2, all_reduce(SUM, float32, 3 elements)"
    assert diagnosis.startswith(
        f"diagnosis: missing rank: rank 1 on host h1 has not called {call}: it is at "
    )
    assert f"{__file__}:" in diagnosis
    assert " in one_does_not_come" in diagnosis


def both_receive() -> str:
    """Rank 1 waits until rank 0, which gives up, has diagnosed both."""
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0, tag=7)
        return ""
    while dist.flight_record().ranks[1].running_message is None:
        time.sleep(0.002)
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.group.WORLD.communicator.recv(torch.ones(1), 1, 7, 0.3)
    dist.send(torch.ones(1), 1, tag=7)
    return str(caught.value)


def test_ranks_of_two_hosts_that_both_receive_first() -> None:
    told, _ = on_threads((1, 1), both_receive)
    assert "\ndiagnosis: swapped send and recv: rank " in told


def a_leader_keeps_what_it_has_to_send(given_up: threading.Event) -> tuple[str, tuple[int, ...]]:
    dist.barrier()
    rank = dist.get_rank()
    set_timeout(0.3 if rank == 1 else SOON)
    bridge = dist.group.WORLD.communicator.engine.hierarchy.bridge
    if rank == 2:
        exchange = bridge.exchange

        def exchange_late(*arguments: Any) -> Any:
            assert given_up.wait(SOON)
            return exchange(*arguments)

        bridge.exchange = exchange_late
    with pytest.raises((CollectiveTimeoutError, GroupAbortedError)) as caught:
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
    if rank == 1:
        given_up.set()
        assert isinstance(caught.value, CollectiveTimeoutError)
        return str(caught.value), caught.value.missing
    return "", ()


def test_a_rank_that_waits_for_the_data_of_another_host_is_not_the_culprit() -> None:
    """The other ranks of its host, whose time is over, wait for it: they name whom it waits for."""
    _, (told, missing), *_ = on_threads((2, 2), a_leader_keeps_what_it_has_to_send, threading.Event())
    assert missing == (2,)
    assert ": rank 2 on host h1 had not arrived" in told.splitlines()[0]
