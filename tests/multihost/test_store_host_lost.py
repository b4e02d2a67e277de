"""The host of the store dies: ranks whose store is on replicas shrink, make groups and go on."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from simulated import host_names

import torchestra as dist
from ports import free_port
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.host_id import HOST_VARIABLE
from torchestra.errors import InvalidArgumentError
from torchestra.rendezvous import replication
from torchestra.rendezvous.replication import (
    REPLICAS_VARIABLE,
    moved_to_replicas,
    replicas_to_join,
    replicas_wanted,
)
from torchestra.store import HashStore, PrefixStore, ReplicatedStore, Store
from torchestra.store.base import pauses
from torchestra.store.replicated import server
from torchestra.store.secret import SECRET_VARIABLE
from worlds import processes

sys.path.append(str(Path(__file__).parents[1] / "shrinking"))
sys.path.append(str(Path(__file__).parents[1] / "store"))
from replicas import takes_part
from test_shrink import check_group, until_it_fails

LAYOUT = (1, 1, 2)
LONG = 30.0


def lose_the_master(store: Store, rank: int, size: int, init_method: str) -> Any:
    """The life of a rank whose world loses rank 0, at whose store it met the others."""
    variables = {
        HOST_VARIABLE: host_names(LAYOUT)[rank],
        SECRET_VARIABLE: "a secret of these tests",
        REPLICAS_VARIABLE: "3",
        HEARTBEAT_VARIABLE: "4",
    }
    os.environ.update(variables)
    dist.init_process_group(init_method=init_method, rank=rank, world_size=size, timeout=60.0)
    dist.barrier()
    store.barrier("begun", size)  # none waits for rank 0 any more
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    until_it_fails()
    world = dist.group.WORLD
    assert world is not None
    new = world.shrink()
    check_group(new)
    pair = dist.new_group([0, 2])
    if isinstance(pair, dist.ProcessGroup):
        check_group(pair)
    kinds = []
    inner: Store = new.store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    kinds.append(type(inner).__name__)
    dist.barrier()
    store.barrier("end", size - 1)
    return new.previous_ranks, kinds


def test_the_survivors_of_the_master_shrink_and_make_groups() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with processes(sum(LAYOUT), lose_the_master, address, init=False) as world:
        ended = world.finish()
    assert [outcome.result() for outcome in ended[1:]] == [((1, 2, 3), ["ReplicatedStore"])] * 3


def test_a_rank_that_serves_no_replica_replaces_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three replicas two are lost in the end, one after the other; who joins finds those there are."""
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "0.5")
    monkeypatch.setattr(server, "VIEW_CHANGE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(replication, "standbys", standbys := [])
    meeting, size = HashStore(), 4
    with ThreadPoolExecutor(size) as ranks:
        moved = [ranks.submit(moved_to_replicas, meeting, rank, size, 3, LONG) for rank in range(size)]
        stores = [each.result() for each in moved]
    try:
        stores[0].set("k", "v")
        by_address = {each.listener.address: each for each in standbys}
        began = stores[3].addresses
        (fourth,) = by_address.keys() - {*began}
        by_address[began[0]].close()
        for _ in pauses(LONG):
            if stores[3].get("k") == b"v" and fourth in stores[3].addresses:
                break
        assert stores[3].addresses == (fourth, *began[1:])
        for _ in pauses(LONG):
            if takes_part(fourth):
                break
        by_address[began[1]].close()
        stores.append(replicas_to_join(meeting, 3, LONG))
        assert [each.get("k") for each in stores] == [b"v"] * (size + 1)
    finally:
        for each in (*standbys, *stores):
            each.close()


@pytest.mark.parametrize("wrong", ["0", "three", "5", "-1"])
def test_a_number_of_replicas_that_cannot_be_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLICAS_VARIABLE, wrong)
    with pytest.raises(InvalidArgumentError, match=f"from 1 to 4, the world size, got '{wrong}'"):
        replicas_wanted(HashStore(), 4)


def test_a_store_stays_where_it_is_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPLICAS_VARIABLE, raising=False)
    assert replicas_wanted(HashStore(), 4) is None
    monkeypatch.setenv(REPLICAS_VARIABLE, "3")
    assert replicas_wanted(HashStore(), 4) == 3
    assert replicas_wanted(object.__new__(ReplicatedStore), 4) is None
