"""A whole host is lost in a training whose optimizer is divided between ranks, and none of its state is."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated import Layout, host_names, host_processes, outcomes_on_threads

import torchestra as dist
from torchestra import elastic
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from worlds import RankDied

# What a training is there, it is here.
sys.path.append(str(Path(__file__).parents[1]))
from elastic.test_elastic_joining import Gone, Job
from elastic.test_sharded_optimizer import SHARDS, check
from elastic.training import STEPS, digest, go_on, make


def lose_host(layout: Layout, host: int, leave: Callable[[], object], minimum: int = 1) -> dict[str, Any]:
    """Train; all ranks of a host leave in the same step, before any other can know of one of them."""
    group = dist.group.WORLD
    assert group is not None
    store, mine, met = group.store, host_names(layout)[dist.get_rank()], False

    def meet(shard: elastic.Shard) -> None:
        nonlocal met
        if shard.step == 3 and not met:
            met = True
            store.barrier("all are in step 3", sum(layout))
            if mine == f"h{host}":
                leave()

    return train(meet, minimum)


def train(hook: Callable[[elastic.Shard], object], minimum: int) -> dict[str, Any]:
    network, optimizer, scheduler = make(dist.get_rank(), 0.0, zero=True)
    state = elastic.State(network, optimizer, scheduler=scheduler, replicas=1)
    go_on(state, SHARDS, STEPS, hook, minimum)
    return digest(state)


def leave_by_error() -> None:
    raise Gone


@pytest.mark.parametrize(("layout", "host"), [((2, 2), 1), ((1, 3), 1), ((2, 1, 2), 0)])
def test_a_host_leaves_and_others_have_all_parts(
    layout: Layout, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "4")
    ended = outcomes_on_threads(layout, lose_host, layout, host, leave_by_error)
    told = [each.result() for each in ended if not isinstance(each.error, Gone)]
    assert len(told) == sum(layout) - layout[host]
    check(told, min(2, len(told)))


def test_a_spare_host_takes_the_place_of_a_lost_one_and_has_all_parts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "4")
    layout, job = (2, 2), Job()

    def leave() -> None:
        job.start(dist.get_rank(), None, lambda: ("spare", train(lambda _: None, 4)), "spare")
        raise Gone

    for rank, host in enumerate(host_names(layout)):
        job.start(rank, 4, lambda host=host: (host, lose_host(layout, 1, leave, 4)), host)
    told = job.finish()
    assert sorted(host for host, _ in told) == ["h0", "h0", "spare", "spare"]
    check([each for _, each in told], 2)
    for at in ("h0", "spare"):
        check([each for host, each in told if host == at], 1)


def leave_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_host_is_killed_and_others_have_all_parts() -> None:
    layout = (2, 2)
    with host_processes(layout, lose_host, layout, 1, leave_by_signal, **{HEARTBEAT_VARIABLE: "4"}) as world:
        ended = world.finish()
    assert [isinstance(each.error, RankDied) for each in ended] == [False, False, True, True]
    check([each.result() for each in ended[:2]], 2)
