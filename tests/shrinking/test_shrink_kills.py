"""Ranks killed with SIGKILL at every step of shrinking, and at any time: the others agree, nothing stays."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from typing import Any, NoReturn

import pytest
import torch
from test_shrink import check_group, meet, until_it_fails, world

import torchestra as dist
from torchestra.engine.membership.arena_registers import ArenaRegisters
from worlds import RankDied, await_note, descriptors, leave_note, mappings, processes

SOON = 20.0


def note_path(name: str) -> str:
    return os.path.join(os.environ["WORLD_DIRECTORY"], name)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on")


def die_at(step: str, when: str) -> None:
    """Have this rank die before or after it has taken a step of the protocol for the first time."""
    take = getattr(ArenaRegisters, step)

    def take_and_die(self: ArenaRegisters, *arguments: Any) -> Any:
        if when == "after":
            take(self, *arguments)
        die()

    setattr(ArenaRegisters, step, take_and_die)


def left_behind() -> list[str]:
    """Return what of torchestra this process still holds after it has destroyed its groups."""
    dist.destroy_process_group()
    deadline = time.monotonic() + SOON
    while (mappings() or threading.active_count() > 1) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    open_here = {name.split(" ", 1)[1] for name in descriptors()}
    with open("/proc/net/unix") as file:
        sockets = {f"socket:[{line.split()[6]}]" for line in file if "@torchestra-" in line}
    left = [name for name in open_here if "pidfd" in name or "memfd:torchestra" in name or name in sockets]
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return left + mappings() + threads


def go_on(members: tuple[int, ...]) -> tuple[int, ...]:
    """Shrink until there is a group all of whose ranks live; their original numbers."""
    while True:
        new = world().shrink()
        members = tuple(members[rank] for rank in new.previous_ranks)
        try:
            check_group(new)
        except dist.GroupAbortedError:
            continue
        return members


# -- at every step


def lose_two(victim: int, step: str, when: str) -> tuple[tuple[int, ...], list[str]]:
    meet()
    if dist.get_rank() == 3:
        die()
    if dist.get_rank() == victim:
        die_at(step, when)
    until_it_fails()
    members = go_on((0, 1, 2, 3))
    return members, left_behind()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["announce", "propose", "acknowledge", "commit"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_second_rank_may_die_at_any_step_of_shrinking(victim: int, step: str, when: str) -> None:
    """Rank 0 is the one that proposes. Who commits is open: the victim may not come to it, and then lives."""
    with processes(4, lose_two, victim, step, when) as ranks:
        ended = ranks.finish()
    alive = tuple(rank for rank in range(4) if not isinstance(ended[rank].error, RankDied))
    assert set(alive) >= {0, 1, 2} - {victim}
    assert 3 not in alive
    if step in ("announce", "acknowledge") or (step, victim) == ("propose", 0):
        assert victim not in alive
    assert [ended[rank].result() for rank in alive] == [(alive, [])] * len(alive)


def lose_all_others() -> tuple[tuple[int, ...], list[str]]:
    """Three of four: one at once, one when it comes to shrink(), and the proposer of what is left."""
    meet()
    rank = dist.get_rank()
    if rank == 2:
        die()
    if rank == 1:
        die_at("announce", "after")
    if rank == 0:
        die_at("propose", "after")
    until_it_fails()
    return go_on((0, 1, 2, 3)), left_behind()


def test_all_but_one_may_die() -> None:
    with processes(4, lose_all_others) as ranks:
        *others, last = ranks.finish()
    assert all(isinstance(outcome.error, RankDied) for outcome in others)
    assert last.result() == ((3,), [])


# -- standing still


def stand_still_with_the_proposal() -> Any:
    """Rank 0 has proposed, and is stopped before it hands anything out."""
    meet()
    rank = dist.get_rank()
    if rank == 3:
        die()
    until_it_fails()
    if rank == 0:
        propose = ArenaRegisters.propose

        def propose_and_stop(self: ArenaRegisters, *arguments: Any) -> bool:
            proposed = propose(self, *arguments)
            os.kill(os.getpid(), signal.SIGSTOP)
            return proposed

        setattr(ArenaRegisters, "propose", propose_and_stop)  # noqa: B010
        with pytest.raises(dist.RankExcludedError) as caught:
            world().shrink()
        return caught.value.survivors
    # Until both have been told: each is told of rank 0 alone only while the other calls as well.
    while not all(os.path.exists(note_path(f"rank {each} knows")) for each in (1, 2)):
        with pytest.raises(dist.CollectiveTimeoutError) as late:
            world().shrink(timeout=0.5)
        if late.value.missing == (0,) and "rank 0 lives, but does not go on with it" in str(late.value):
            leave_note(f"rank {rank} knows")
    leave_note(f"rank {rank} has given up")
    await_note(f"rank {3 - rank} has given up")  # or what this rank does next would end its last call
    previous = world().shrink(exclude=[0]).previous_ranks
    check_group(world())
    leave_note(f"rank {rank} has gone on")
    return previous


def test_a_proposer_that_stands_still_is_named_and_can_be_left_behind() -> None:
    with processes(4, stand_still_with_the_proposal) as ranks:
        for rank in (1, 2):
            ranks.await_file(f"rank {rank} has gone on")
        ranks.signal(0, signal.SIGCONT)
        ended = ranks.finish()
    assert [ended[rank].result() for rank in range(3)] == [(1, 2)] * 3


# -- with the store


def lose_the_server(store: dist.FileStore, rank: int, size: int) -> tuple[tuple[int, ...], list[str]]:
    """Rank 0 serves the store, as it does at MASTER_PORT, and dies; the others make groups afterwards."""
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True)
        store.set("port", str(served.port))
    else:
        served = dist.TCPStore("127.0.0.1", int(store.get("port")))
    dist.init_process_group(store=served, rank=rank, world_size=size, timeout=SOON)
    if rank == 0:
        dist.all_reduce(torch.ones(100))
        die()
    until_it_fails()
    members = go_on((0, 1, 2, 3))
    pair = dist.new_group([0, 2])
    if isinstance(pair, dist.ProcessGroup):
        check_group(pair)
    dist.barrier()
    del pair, served
    return members, left_behind()


def test_rank_0_may_die_and_the_store_with_it() -> None:
    with processes(4, lose_the_server, init=False) as ranks:
        zero, *others = ranks.finish()
    assert isinstance(zero.error, RankDied)
    assert [outcome.result() for outcome in others] == [((1, 2, 3), [])] * 3


# -- at any time


def shrink_all_the_time() -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Whatever happens: shrink, and use the group once. Which members each group had, by its name."""
    meet()
    members: tuple[int, ...] = tuple(range(dist.get_world_size()))
    seen = {world().group_name: members}
    leave_note(f"ready {dist.get_rank()}")
    stop = note_path("stop")
    while True:
        try:
            over = torch.tensor([float(os.path.exists(stop))])
            dist.all_reduce(over)
            if over.item():
                break
        except dist.GroupAbortedError:
            pass
        members = tuple(members[rank] for rank in world().shrink().previous_ranks)
        seen[world().group_name] = members
    return seen, left_behind()


def kill_at_random(seed: int, size: int = 5) -> None:
    """Kill all but two of the ranks, one after the other; all who ever had a group had the same one."""
    dice = random.Random(seed)
    victims = dice.sample(range(size), size - 2)
    with processes(size, shrink_all_the_time) as ranks:
        for rank in range(size):
            ranks.await_file(f"ready {rank}")
        for victim in victims:
            time.sleep(dice.random() * 0.05)
            ranks.signal(victim, signal.SIGKILL)
        for victim in victims:
            ranks.wait(victim)
        open(ranks.path("stop"), "w").close()
        ended = ranks.finish()
    seen: dict[str, tuple[int, ...]] = {}
    for rank, outcome in enumerate(ended):
        if rank in victims:
            assert isinstance(outcome.error, RankDied)
            continue
        groups, left = outcome.result()
        assert left == []
        for name, members in groups.items():
            assert rank in members
            assert seen.setdefault(name, members) == members, f"two groups have the name {name}"


@pytest.mark.parametrize("seed", range(3))
def test_ranks_killed_at_any_moment_never_split_the_others(seed: int) -> None:
    kill_at_random(seed)
