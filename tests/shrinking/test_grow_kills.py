"""Joiners and members killed with SIGKILL at every step of joining: the others agree, and go on."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

import pytest
from test_grow import SOON, await_joiners, live
from test_shrink import check_group, meet, world

import torchestra as dist
from torchestra.engine.membership.admission import Admission
from torchestra.engine.membership.arena_registers import ArenaRegisters
from torchestra.process_group import growing
from torchestra.store import Store
from worlds import RankDied, await_note, leave_note, processes


def die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it goes on")


def die_at(owner: Any, step: str, when: str) -> None:
    """Have this process die before or after it has taken a step for the first time."""
    take = getattr(owner, step)

    def take_and_die(*arguments: Any, **named: Any) -> Any:
        if when == "after":
            take(*arguments, **named)
        die()

    setattr(owner, step, take_and_die)


def go_on(size: int) -> tuple[int, ...]:
    """Grow and shrink until there is a group of so many that all live; their member ids."""
    while True:
        try:
            check_group(world())
            if world().size() == size:
                return world().member_ids
            await_joiners()
            world().grow()
        except dist.GroupAbortedError:
            world().grow()


JOINERS_STEPS = {
    "asked": (Admission, "ask", "after"),
    "invited": (Admission, "offer", "before"),
    "has read the offer": (Admission, "offer", "after"),
    "enters": (growing, "start", "before"),
    "is in": (growing, "start", "after"),
    "reads the verdict": (Admission, "remove", "before"),
}


def lose_a_joiner(joins: bool, store: Store, step: str) -> tuple[int, ...]:
    """The first joiner dies at a step; the second comes when it is gone, and gets its number."""
    if not joins:
        store.set(f"member {dist.get_rank()} is ready", b"")
        if step == "asked":
            await_note("died")
        else:
            await_joiners()
            world().grow()
        leave_note(f"member {dist.get_rank()} has grown")
        return go_on(3)
    store.wait(["member 0 is ready"])
    if store.add("joiner", 1) == 1:
        leave_note("first", str(os.getpid()))
        die_at(*JOINERS_STEPS[step])
        dist.join(store=store, timeout=SOON)
        die()
    await_note("died")
    dist.join(store=store, timeout=SOON)
    return go_on(3)


@pytest.mark.parametrize("step", JOINERS_STEPS)
def test_a_joiner_may_die_at_any_step_of_joining(step: str) -> None:
    with processes(4, live, 2, lose_a_joiner, (step,), init=False) as ranks:
        first = ranks.pids.index(int(ranks.await_file("first")))
        ranks.wait(first)
        open(ranks.path("died"), "w").close()
        ended = ranks.finish()
    assert isinstance(ended.pop(first).error, RankDied)
    assert [outcome.result() for outcome in ended] == [(0, 1, 2)] * 3


MEMBERS_STEPS = {
    "before it comes": (ArenaRegisters, "announce", "before"),
    "has come": (ArenaRegisters, "announce", "after"),
    "has written the offer": (Admission, "write", "after"),
    "has proposed": (ArenaRegisters, "propose", "after"),
    "has invited": (Admission, "invite", "after"),
    "enters": (growing, "start", "before"),
    "is in": (growing, "start", "after"),
    "is ready": (ArenaRegisters, "acknowledge", "after"),
    "before the verdict": (Admission, "write_verdict", "before"),
    "after the verdict": (Admission, "write_verdict", "after"),
}


def lose_a_member(joins: bool, store: Store, step: str) -> tuple[int, ...]:
    """Rank 0 of three, which proposes, dies at a step of letting one in."""
    if joins:
        dist.join(store=store, timeout=SOON)
        return go_on(3)
    await_joiners()
    if dist.get_rank() == 0:
        die_at(*MEMBERS_STEPS[step])
    world().grow()
    if dist.get_rank() == 0:
        die()
    return go_on(3)


@pytest.mark.parametrize("step", MEMBERS_STEPS)
def test_a_member_may_die_at_any_step_of_letting_others_in(step: str) -> None:
    """It is never in two groups, nor out of both: the others and the joiner end in one."""
    with processes(4, live, 3, lose_a_member, (step,), init=False) as ranks:
        zero, *others = ranks.finish()
    assert isinstance(zero.error, RankDied)
    ids = [outcome.result() for outcome in others]
    assert ids in ([(1, 2, 3)] * 3, [(0, 1, 2)] * 3)


def sleep_through_it(joins: bool, store: Store) -> Any:
    """Rank 2 is stopped after it has entered; the others exclude it, and it can do nothing in their group."""
    if joins:
        dist.join(store=store, timeout=SOON)
        check_group(world())
        return world().member_ids
    meet()
    rank = dist.get_rank()
    await_joiners()
    if rank == 2:
        come = ArenaRegisters.acknowledge

        def stop(self: ArenaRegisters, *arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)
            come(self, *arguments)

        setattr(ArenaRegisters, "acknowledge", stop)  # noqa: B010
        with pytest.raises(dist.RankExcludedError) as caught:
            world().grow()
        return caught.value.survivors
    if rank == 0:
        missing: tuple[int, ...] = ()
        while missing != (2,):  # the others may be slow
            with pytest.raises(dist.CollectiveTimeoutError) as late:
                world().grow(timeout=1.5)
            missing = late.value.missing
        assert "rank 2 lives, but does not go on with it" in str(late.value)
        new = world().grow(exclude=[2])
    else:
        new = world().grow()
    check_group(new)
    leave_note(f"gone on {rank}")
    return new.member_ids


def test_a_member_that_sleeps_is_excluded_and_cannot_act_in_the_new_group() -> None:
    with processes(4, live, 3, sleep_through_it, (), init=False) as ranks:
        for rank in (0, 1):
            ranks.await_file(f"gone on {rank}")
        ranks.signal(2, signal.SIGCONT)
        ended = ranks.finish()
    assert [outcome.result() for outcome in ended] == [(0, 1, 2), (0, 1, 2), (0, 1), (0, 1, 2)]
