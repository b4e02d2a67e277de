"""Ranks join a job that runs: members, numbers, replacements, other groups, refusals, and errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_shrink import await_candidate, check_group, leave, meet, results, until_it_fails, world

import torchestra as dist
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.store import HashStore, Store
from torchestra.world.registry import thread_rank
from worlds import KINDS, OP_SECONDS, WORLD_SECONDS, Outcome, await_note, leave_note, processes

SOON = OP_SECONDS
Life = Callable[..., Any]


def live(store: Store, rank: int, size: int, members: int, life: Life, arguments: tuple[Any, ...]) -> Any:
    """The life of a rank, or of a joiner, in a process."""
    if rank < members:
        dist.init_process_group(store=store, rank=rank, world_size=members, timeout=SOON)
    return life(rank >= members, store, *arguments)


def on_threads(members: int, joiners: int, life: Life, arguments: tuple[Any, ...]) -> list[Outcome]:
    store = HashStore()
    ended = [Outcome() for _ in range(members + joiners)]

    def body(rank: int) -> None:
        try:
            with thread_rank(rank, members, store):
                if rank < members:
                    dist.init_process_group(timeout=SOON)
                ended[rank] = Outcome(life(rank >= members, store, *arguments))
        except BaseException as error:
            ended[rank] = Outcome(error=error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(members + joiners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WORLD_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def together(kind: str, members: int, joiners: int, life: Life, *arguments: Any) -> list[Outcome]:
    """Run ``life(joins, store, *arguments)`` on members of a group, and on ranks that are in none."""
    if kind == "threads":
        return on_threads(members, joiners, life, arguments)
    with processes(members + joiners, live, members, life, arguments, init=False) as ranks:
        return ranks.finish()


def await_joiners(count: int = 1) -> None:
    """Look, as all ranks do after each step, until so many wait."""
    deadline = time.monotonic() + SOON
    while world().pending_joiners() < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def seen(group: dist.ProcessGroup) -> tuple[Any, ...]:
    """What all ranks of a grown group must see alike."""
    assert group is world()
    assert dist.get_rank() == group.rank()
    assert dist.get_process_group_ranks() == list(range(group.size()))
    check_group(group)
    return (
        group.group_name,
        group.member_ids,
        group.joined_ranks,
        tuple(group.previous_ranks),
        group.lost_ranks,
    )


# -- who is in, under which number


def let_in(joins: bool, store: Store, joiners: int) -> tuple[Any, ...]:
    if joins:
        dist.join(store=store, timeout=SOON)
        return seen(world())
    old = world()
    await_joiners(joiners)
    new = old.grow()
    with pytest.raises(dist.GroupDestroyedError):
        dist.all_reduce(torch.ones(1), group=old)
    assert new.timeout == old.timeout
    assert new.generation == 1
    return seen(new)


@pytest.mark.parametrize(("members", "joiners"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_join_and_have_the_group_that_the_members_have(kind: str, members: int, joiners: int) -> None:
    everybody = tuple(range(members + joiners))
    previous = (*range(members), *[-1] * joiners)
    expected = ("default~1", everybody, everybody[members:], previous, ())
    assert results(together(kind, members, joiners, let_in, joiners)) == [expected] * len(everybody)


def replace(joins: bool, store: Store) -> tuple[Any, ...]:
    """Rank 1 of three is lost; a joiner takes its number, in one step with the loss."""
    if joins:
        dist.join(store=store, timeout=SOON, member=1)
        return seen(world())
    meet()
    if dist.get_rank() == 1:
        leave()
    until_it_fails()
    assert dist.get_rank() in (0, 2)
    while not world().admission.waiting():  # type: ignore[union-attr]
        time.sleep(0.001)
    return seen(world().grow())


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_takes_the_number_of_the_dead_in_one_step(kind: str) -> None:
    expected = ("default~1", (0, 1, 2), (1,), (0, -1, 2), (1,))
    assert results(together(kind, 3, 1, replace)) == [expected] * 3


def come_and_go(joins: bool, store: Store) -> list[tuple[int, ...]]:
    """Shrink by rank 0, grow by one with its number, and by one without a wish; ids stay with their ranks."""
    ids = []
    if joins:
        member = 0 if store.add("joiner", 1) == 1 else None
        if member is None:
            store.wait(["first is in"])
        dist.join(store=store, timeout=SOON, member=member)
        if member is not None:
            store.set("first is in", b"")
            ids.append(world().member_ids)
            check_group(world())
            await_joiners()
            world().grow()
        ids.append(world().member_ids)
        check_group(world())
        return ids
    meet()
    if dist.get_rank() == 0:
        leave()
    until_it_fails()
    ids.append(world().shrink().member_ids)
    for _ in range(2):
        await_joiners()
        ids.append(world().grow().member_ids)
        check_group(world())
    assert world().group_name == "default~3"
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_member_ids_stay_while_the_group_shrinks_and_grows(kind: str) -> None:
    *members, first, second = results(together(kind, 3, 2, come_and_go))
    assert members == [[(1, 2), (0, 1, 2), (0, 1, 2, 3)]] * 2
    assert sorted([first, second]) == [[(0, 1, 2), (0, 1, 2, 3)], [(0, 1, 2, 3)]]


def want_the_same(joins: bool, store: Store) -> tuple[Any, ...]:
    if joins:
        dist.join(store=store, timeout=SOON, member=0)
    else:
        await_joiners(2)
        world().grow()
    return world().member_ids, dist.get_rank()


def test_a_number_that_a_member_has_is_given_to_nobody_else() -> None:
    ended = results(together("threads", 2, 2, want_the_same))
    assert {rank for _, rank in ended} == {0, 1, 2, 3}
    assert {ids for ids, _ in ended} == {(0, 1, 2, 3)}
    assert [rank for _, rank in ended[:2]] == [0, 1]


def grow_without_joiners(joins: bool, store: Store) -> tuple[Any, ...]:
    meet()
    return seen(world().grow())


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_joiner_it_is_the_same_group_anew(kind: str) -> None:
    expected = ("default~1", (0, 1), (), (0, 1), ())
    assert results(together(kind, 2, 0, grow_without_joiners)) == [expected] * 2


def one_calls_shrink(joins: bool, store: Store) -> Any:
    """Rank 0 calls shrink() where the other calls grow(): nobody is let in, and the joiner waits on."""
    if joins:
        dist.join(store=store, timeout=SOON)
        return world().group_name
    await_joiners()
    meet()  # shrink() calls ranks out of operations
    first = world().shrink() if dist.get_rank() == 0 else world().grow()
    assert (first.size(), first.joined_ranks) == (2, ())
    await_joiners()
    return world().grow().group_name


@pytest.mark.parametrize("kind", KINDS)
def test_shrink_and_grow_mixed_let_nobody_in_until_all_grow(kind: str) -> None:
    assert results(together(kind, 2, 1, one_calls_shrink)) == ["default~2"] * 3


# -- what goes on in the new world


def use_the_new_world(joins: bool, store: Store) -> tuple[Any, ...]:
    pair = None
    if joins:
        dist.join(store=store, timeout=SOON)
    else:
        pair = dist.new_group([0, 1])
        await_joiners()
        world().grow()
    if pair is not None:
        check_group(pair)
    trio = dist.new_group([0, 2, 1], sort_ranks=False)
    check_group(trio)
    torch.manual_seed(0)
    model = dist.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
    gradient = model.module.weight.grad
    assert torch.equal(gradient, torch.full((2, 4), 3.0))
    world().get_group_store().set(f"key {dist.get_rank()}", b"value")
    value = world().get_group_store().get("key 2")
    dist.barrier()
    return trio.group_name, value


@pytest.mark.parametrize("kind", KINDS)
def test_groups_ddp_and_the_store_work_in_the_grown_world(kind: str) -> None:
    assert results(together(kind, 2, 1, use_the_new_world)) == [("1@default~1", b"value")] * 3


# -- by the environment


def launched(rank: int, address: str) -> tuple[Any, ...]:
    """The life of a script that only calls init_process_group()."""
    dist.init_process_group(timeout=SOON)
    if world().generation == 0:
        await_joiners()
        world().grow()
    assert "TORCHESTRA_JOIN" not in os.environ
    return seen(world())


def live_by_the_environment(store: Store, rank: int, size: int) -> tuple[Any, ...]:
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True)
        store.set("port", str(served.port))
    port = int(store.get("port"))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHESTRA_STORE=f"127.0.0.1:{port}", RANK=str(rank % 2))
    os.environ["WORLD_SIZE"] = "2"
    if rank == 2:
        os.environ.update(TORCHESTRA_JOIN="1", TORCHESTRA_MEMBER="5")
    found = launched(rank, f"127.0.0.1:{port}")
    dist.destroy_process_group()
    store.barrier("end", size)
    return found


def test_a_script_that_only_inits_joins_where_the_launcher_says_so() -> None:
    with processes(3, live_by_the_environment, init=False) as ranks:
        ended = ranks.finish()
    assert results(ended) == [("default~1", (0, 1, 5), (2,), (0, 1, -1), ())] * 3


# -- errors


def come_alone(joins: bool, store: Store) -> Any:
    if joins:
        store.wait(["member is there"])
        with pytest.raises(dist.CollectiveTimeoutError, match=r"to join: no member has let it in.*grow\(\)"):
            dist.join(store=store, timeout=0.5)
        assert not dist.is_initialized()
        store.set("given up", b"")
        return None
    store.set("member is there", b"")
    store.wait(["given up"])
    assert world().admission.waiting() == []  # type: ignore[union-attr]
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_joiner_that_nobody_lets_in_says_so_and_withdraws(kind: str) -> None:
    results(together(kind, 1, 1, come_alone))


def outlive_the_job(joins: bool, store: Store) -> Any:
    if joins:
        with pytest.raises(dist.DistBackendError, match="the job has ended, as all its members have left"):
            dist.join(store=store, timeout=SOON)
        return None
    await_joiners()
    if dist.get_rank() == 1:
        store.wait(["first"])  # one that leaves is not the end
    world().destroy()
    dist.destroy_process_group()
    store.set("first", b"")
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_joiner_is_told_when_the_job_ends_without_it(kind: str) -> None:
    results(together(kind, 2, 1, outlive_the_job))


def be_late(joins: bool, store: Store) -> Any:
    if joins:
        dist.join(store=store, timeout=SOON)
        return world().size()
    await_joiners()
    if dist.get_rank() == 0:
        with pytest.raises(
            dist.CollectiveTimeoutError, match=r"not grown within 0.3 s: rank 1 lives.*grow\(\)"
        ) as late:
            world().grow(timeout=0.3)
        assert late.value.missing == (1,)
        store.set("named", b"")
    else:
        store.wait(["named"])
    return world().grow().size()


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_has_not_called_is_named_and_the_call_repeated(kind: str) -> None:
    assert results(together(kind, 2, 1, be_late)) == [3] * 3


def refuse_a_misfit(store: Store) -> None:
    """A thread cannot be a rank among processes."""
    dist.init_process_group(store=store, rank=0, world_size=1, timeout=SOON)
    caught: list[BaseException] = []

    def misfit() -> None:
        with thread_rank(0, 1, store):
            try:
                dist.join(timeout=SOON)
            except dist.DistError as error:
                caught.append(error)

    joiner = threading.Thread(target=misfit)
    joiner.start()
    await_joiners()
    assert world().grow().size() == 1
    joiner.join(SOON)
    assert "have refused this rank: its ranks are processes, and it is a thread" in str(caught[0])


def live_with_a_misfit(store: Store, rank: int, size: int) -> None:
    refuse_a_misfit(store)


def test_one_that_cannot_be_a_rank_is_told_why_and_the_group_goes_on() -> None:
    with processes(1, live_with_a_misfit, init=False) as ranks:
        results(ranks.finish())


def test_wrong_calls_are_refused() -> None:
    def life(joins: bool, store: Store) -> None:
        other = dist.new_group([0])
        for call in (other.grow, other.pending_joiners):
            with pytest.raises(dist.InvalidArgumentError, match="is not that"):
                call()
        with pytest.raises(dist.InvalidArgumentError, match="default process group twice"):
            dist.join(store=store)
        with pytest.raises(dist.InvalidArgumentError, match="grow: `exclude` must be other ranks"):
            world().grow(exclude=[0])
        dist.destroy_process_group()
        with pytest.raises(dist.InvalidArgumentError, match="`member` must not be negative"):
            dist.join(store=store, member=-1)
        with pytest.raises(dist.InvalidArgumentError, match="fake world has no other ranks"):
            dist.join(store=store, backend="fake")
        with pytest.raises(dist.StoreTimeoutError, match="its ranks have not met there"):
            dist.join(store=HashStore(), timeout=0.1)

    results(on_threads(1, 0, life, ()))


def be_interrupted(joins: bool, store: Store) -> Any:
    """Ctrl-C in join(), and in grow() while a rank is waited for; both may be called again."""
    if joins:
        with pytest.raises(KeyboardInterrupt):
            dist.join(store=store)
        leave_note("joiner interrupted")
        dist.join(store=store, timeout=SOON)
        return world().size()
    if dist.get_rank() == 1:
        while not world().admission.waiting():  # type: ignore[union-attr]
            time.sleep(0.002)
        leave_note("joining")
    await_note("joiner interrupted")
    await_joiners()
    if dist.get_rank() == 0:
        with pytest.raises(KeyboardInterrupt):
            world().grow()
        leave_note("interrupted")
    else:
        await_candidate(0)
        leave_note("growing")
    await_note("interrupted")
    return world().grow().size()


def test_ctrl_c_gets_through_on_both_sides() -> None:
    with processes(3, live, 2, be_interrupted, (), init=False) as ranks:
        for note, rank in (("joining", 2), ("growing", 0)):
            ranks.await_file(note)
            ranks.signal(rank, signal.SIGINT)
        assert results(ranks.finish()) == [3] * 3


def lose_the_store(store: Store, rank: int, size: int) -> Any:
    """Rank 0 serves the store and dies: the others go on, but nobody can join them any more."""
    os.environ[HEARTBEAT_VARIABLE] = "1"
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True)
        store.set("port", str(served.port))
    else:
        served = dist.TCPStore("127.0.0.1", int(store.get("port")))
    dist.init_process_group(store=served, rank=rank, world_size=size, timeout=SOON)
    world().pending_joiners()
    if rank == 0:
        dist.all_reduce(torch.ones(100))
        os.kill(os.getpid(), signal.SIGKILL)
    until_it_fails()
    with pytest.raises(dist.DistNetworkError, match="cannot grow, because the job's store"):
        world().grow()
    new = world().shrink()
    assert world().pending_joiners() == 0
    check_group(new)
    return new.member_ids


def test_without_the_store_nobody_joins_and_the_ranks_go_on() -> None:
    with processes(3, lose_the_store, init=False) as ranks:
        _, *others = ranks.finish()
    assert results(others) == [(1, 2)] * 2
