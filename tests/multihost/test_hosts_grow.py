"""Ranks and whole hosts join a group: on its host, on another, or in the place of a lost one."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated import be_on_host

import torchestra as dist
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.host_id import HOST_VARIABLE
from torchestra.store import HashStore, Store
from torchestra.store.secret import SECRET_VARIABLE
from torchestra.world.registry import thread_rank
from worlds import Outcome, processes

# What ranks do there, they do here.
sys.path.append(str(Path(__file__).parents[1] / "shrinking"))
import test_grow as within
from test_grow import await_joiners, seen
from test_shrink import check_group, leave, meet, results, until_it_fails, world

SOON = 50.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look eight times as often at what another host says."""
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "4")


def on_hosts(
    members: Sequence[str], joiners: Sequence[str], life: Callable[..., Any], *arguments: Any
) -> list[Outcome]:
    """Run ``life(joins, store, *arguments)`` on threads that pretend to be on these hosts."""
    store, hosts = HashStore(), [*members, *joiners]
    ended = [Outcome() for _ in hosts]

    def body(rank: int) -> None:
        joins = rank >= len(members)
        try:
            with thread_rank(rank, len(members), store, hosts[rank]):
                if not joins:
                    dist.init_process_group(timeout=SOON)
                ended[rank] = Outcome(life(joins, store, *arguments))
        except BaseException as error:
            ended[rank] = Outcome(error=error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def let_in(joins: bool, store: Store, joiners: int) -> tuple[Any, ...]:
    if joins:
        dist.join(store=store, timeout=SOON)
    else:
        await_joiners(joiners)
        world().grow()
    found = seen(world())
    hosts = world().communicator.engine.hosts
    return (*found, None if hosts is None else hosts.members)


@pytest.mark.parametrize(
    ("members", "joiners", "hosts"),
    [
        (("a",), ("b",), ((0,), (1,))),
        (("a", "b"), ("b", "c"), None),
        (("a", "a", "b"), ("c", "c"), ((0, 1), (2,), (3, 4))),
    ],
)
def test_ranks_join_over_hosts(members: Any, joiners: Any, hosts: Any) -> None:
    ended = results(on_hosts(members, joiners, let_in, len(joiners)))
    size = len(members) + len(joiners)
    everybody, joined = tuple(range(size)), tuple(range(len(members), size))
    previous = (*range(len(members)), *[-1] * len(joiners))
    assert all(each[:-1] == ("default~1", everybody, joined, previous, ()) for each in ended)
    if hosts is not None:
        assert all(each[-1] == hosts for each in ended)


def replace_a_host(joins: bool, store: Store) -> tuple[Any, ...]:
    """Host b, with ranks 1 and 2, is lost; two on host c take their numbers in the same step."""
    if joins:
        dist.join(store=store, timeout=SOON, member=store.add("joiner", 1))
        return seen(world())
    meet()
    if dist.get_rank() in (1, 2):
        leave()
    until_it_fails()
    while len(world().admission.waiting()) < 2:  # type: ignore[union-attr]
        time.sleep(0.002)
    return seen(world().grow())


def test_a_lost_host_is_replaced_by_another_in_one_step() -> None:
    expected = ("default~1", (0, 1, 2, 3), (1, 2), (0, -1, -1, 3), (1, 2))
    assert results(on_hosts("abba", "cc", replace_a_host)) == [expected] * 4


def shrink_then_grow_across(joins: bool, store: Store) -> tuple[Any, ...]:
    """A group that was on two hosts, and shrinks to one, grows over two again."""
    if joins:
        dist.join(store=store, timeout=SOON)
        return seen(world())
    meet()
    if dist.get_rank() == 1:
        leave()
    until_it_fails()
    world().shrink()
    check_group(world())
    await_joiners()
    return seen(world().grow())


def test_a_group_that_has_shrunk_to_one_host_grows_over_two_again() -> None:
    expected = ("default~2", (0, 1, 2), (1,), (0, -1, 1), ())
    assert results(on_hosts("aba", "b", shrink_then_grow_across)) == [expected] * 3


def test_shrink_and_grow_may_be_mixed_over_hosts() -> None:
    assert results(on_hosts("ab", "c", within.one_calls_shrink)) == ["default~2"] * 3


def join_over_the_network(store: Store, rank: int, size: int) -> Any:
    """Two members on two hosts, and a joiner on a third, by the default bridge with the job's secret."""
    if rank < 2:
        return be_on_host(
            store, rank, 2, (1, 1), SOON, {HEARTBEAT_VARIABLE: "4"}, grow_over_the_network, (store,)
        )
    os.environ.update(
        {HOST_VARIABLE: "h2", SECRET_VARIABLE: "a secret of these tests", HEARTBEAT_VARIABLE: "4"}
    )
    served = dist.TCPStore("127.0.0.1", int(store.get("port")))
    dist.join(store=served, timeout=SOON)
    found = use_it()
    dist.barrier()  # as the others do
    dist.destroy_process_group()
    return found


def grow_over_the_network(_: Store) -> Any:
    await_joiners()
    world().grow()
    return use_it()


def use_it() -> Any:
    check_group(world())
    return world().member_ids, world().communicator.engine.bridge_kind


def test_a_process_on_another_host_joins_and_proves_the_secret() -> None:
    with processes(3, join_over_the_network, init=False) as ranks:
        assert results(ranks.finish()) == [((0, 1, 2), "curve")] * 3
