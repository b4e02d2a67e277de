"""Ranks that die, leave, are interrupted or never come: the others soon hear which, and nothing is left."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cases import ONE_OF_EACH, Case, Maker

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.failure import collecting
from torchestra.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupDestroyedError,
    RankFailedError,
    StoreTimeoutError,
)
from torchestra.system.thread_frames import current_frames, without_collections
from worlds import (
    Outcome,
    RankDied,
    await_arrival,
    await_note,
    descriptors,
    leave_note,
    mapped_files,
    mappings,
    meet_and_set_timeout,
    outcomes,
    processes,
    run,
    store_barrier,
)

# In what time a fault must be seen: before an operation would time out. Noticing takes about 0.1 s; the rest
# is for a machine that is busy.
SOON = 25.0


def forget_the_group() -> None:
    """After a failed operation: destroy the group, and see that nothing of it is left in this process."""
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + SOON
    while mappings() or threading.active_count() > 1:
        assert time.monotonic() < deadline, (mappings(), threading.enumerate())
        gc.collect()
        time.sleep(0.01)


# -- killed


def until_killed(case: Case, length: int) -> tuple[str, tuple[int, ...], float, set[str]]:
    """Repeat an operation until it fails; how, and the descriptors that are left open afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    leave_note(f"ready {rank}")
    make = Maker(torch.float32, in_arena=length % 2 == 1)
    try:
        while True:
            case(make, rank, size, length)
            make.check_guards("")
    except RankFailedError as error:
        failed, message, seen = error.ranks, str(error), time.monotonic()
    with pytest.raises(GroupAbortedError):
        dist.all_reduce(torch.ones(1))
    del make
    forget_the_group()
    return message, failed, seen, {name.split(" ", 1)[1] for name in descriptors()}


def check_survivors(victim: int, killed_at: float, ended: list[Outcome]) -> None:
    for rank, outcome in enumerate(ended):
        if rank == victim:
            assert isinstance(outcome.error, RankDied)
            assert outcome.exit_code == -signal.SIGKILL
        else:
            message, failed, seen, left_open = outcome.result()
            assert failed == (victim,)
            assert f"rank {victim} died" in message
            assert seen - killed_at < SOON
            assert not [name for name in left_open if "pidfd" in name or "memfd:torchestra" in name]


@pytest.mark.parametrize(
    ("case", "length"), [(case, (7, 300_001)[number % 2]) for number, case in enumerate(ONE_OF_EACH)]
)
def test_a_killed_rank_is_named_to_all_others(case: Case, length: int) -> None:
    """tools/kill_test.py does this some hundred times."""
    dice = random.Random(f"{case.__name__} {length}")
    size = dice.choice((2, 3))
    victim = dice.randrange(size)
    with processes(size, until_killed, case, length) as world:
        for rank in range(size):
            world.await_file(f"ready {rank}")
        time.sleep(dice.random() * 0.05)
        killed_at = time.monotonic()
        world.signal(victim, signal.SIGKILL)
        check_survivors(victim, killed_at, world.finish())


def until_killed_in_the_background() -> list[tuple[int, ...]]:
    """Asynchronous operations when a rank dies: each fails, those behind the first too."""
    dist.barrier()
    group = dist.new_group()
    leave_note(f"ready {dist.get_rank()}")
    while True:
        works = [dist.all_reduce(torch.ones(2000), group=group, async_op=True) for _ in range(20)]
        errors = []
        for work in works:
            try:
                work.wait()
            except RankFailedError as error:
                errors.append(error.ranks)
        if errors:
            assert all(work.is_completed() for work in works)
            return errors


def test_a_killed_rank_is_named_by_every_work_that_it_leaves_undone() -> None:
    with processes(3, until_killed_in_the_background) as world:
        for rank in range(3):
            world.await_file(f"ready {rank}")
        world.signal(1, signal.SIGKILL)
        zero, _, two = world.finish()
    assert set(zero.result()) == set(two.result()) == {(1,)}


def wait_for_the_late() -> str:
    """Rank 2 is killed, and rank 1 does not call before rank 0 has heard of it."""
    dist.barrier()
    store_barrier()
    rank = dist.get_rank()
    leave_note(f"ready {rank}")
    if rank == 2:
        signal.pause()
    if rank == 1:
        await_note("rank 0 has failed")
    with pytest.raises(RankFailedError, match="rank 2 died") as caught:
        dist.all_reduce(torch.ones(1))
    leave_note(f"rank {rank} has failed")
    return str(caught.value)


def test_a_death_is_seen_while_waiting_for_another_rank_that_lives() -> None:
    with processes(3, wait_for_the_late) as world:
        world.await_file("ready 2")
        world.signal(2, signal.SIGKILL)
        world.await_file("rank 0 has failed", SOON)
        zero, one, _ = world.finish()
    assert "rank 0 saw it in all_reduce(SUM, float32, 1 element)" in zero.result()
    assert "rank 0 saw it" in one.result()


def stand_still() -> str:
    """Rank 1 is stopped by a signal, so that it can neither call nor say where it is."""
    meet_and_set_timeout(0.3)
    leave_note(f"ready {dist.get_rank()}")
    if dist.get_rank() == 1:
        await_note("continued")
    else:
        await_note("stopped")
    with pytest.raises(GroupAbortedError if dist.get_rank() else CollectiveTimeoutError) as caught:
        dist.all_reduce(torch.ones(1))
    leave_note(f"failed {dist.get_rank()}")
    return str(caught.value)


def test_a_rank_that_is_stopped_is_named_when_the_time_is_over() -> None:
    with processes(2, stand_still) as world:
        world.await_file("ready 1")
        world.signal(1, signal.SIGSTOP)
        open(world.path("stopped"), "w").close()
        world.await_file("failed 0", SOON)
        open(world.path("continued"), "w").close()
        world.signal(1, signal.SIGCONT)
        zero, one = world.finish()
    assert "rank 1 had not arrived" in zero.result()
    (line,) = (line for line in zero.result().splitlines() if line.startswith("  rank 1 "))
    assert line.startswith("  rank 1 last called operation 2, barrier(), ")
    assert re.search(r" s ago; did not say where it is; last seen at \S+ in \w+, \d+\.\d s ago$", line)
    assert (
        "can no longer be used: all_reduce(SUM, float32, 1 element) of group 'default' timed out"
        in one.result()
    )


def go_on_and_go(how: str) -> list[float]:
    """Rank 0 needs nobody for its broadcasts, and is gone when rank 1 comes."""
    tensors = [torch.full((length,), float(length)) for length in (1, 11, 2000)]
    if dist.get_rank() == 0:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        if how == "destroys":
            dist.destroy_process_group()
        leave_note("gone")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return []
    await_note("gone")
    found = [torch.zeros_like(tensor) for tensor in tensors]
    for tensor in found:
        dist.broadcast(tensor, 0)
    return [tensor.mean().item() for tensor in found]


@pytest.mark.parametrize("how", ["destroys", "is killed"])
def test_what_a_rank_broadcast_before_it_went_is_not_lost(how: str) -> None:
    with processes(2, go_on_and_go, how) as world:
        _, one = world.finish()
    assert one.result() == [1.0, 11.0, 2000.0]


# -- interrupted


def interrupt_inside(function: Callable[..., Any]) -> None:
    """Interrupt the main thread when it has been in this function for a while."""
    main, looks = threading.main_thread().ident, 0
    while looks < 20:
        with without_collections():
            frame: FrameType | None = current_frames()[main]
            while frame is not None and frame.f_code is not function.__code__:
                frame = frame.f_back
        looks = 0 if frame is None else looks + 1
        del frame
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)


def be_interrupted() -> str:
    """Rank 0 waits in an operation and gets Ctrl-C; rank 1 calls after that."""
    dist.barrier()
    if dist.get_rank() == 0:
        leave_note("pid", str(os.getpid()))
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(1))
        leave_note("interrupted")
        with pytest.raises(GroupAbortedError) as caught:
            dist.all_reduce(torch.ones(1))
    else:
        await_arrival(0)
        leave_note("waiting")
        await_note("interrupted")
        with pytest.raises(GroupAbortedError) as caught:
            dist.barrier()  # instead of what rank 0 called; but that it has left counts for more
    message = str(caught.value)
    del caught  # its traceback holds the group
    forget_the_group()
    return message


@pytest.mark.parametrize("after", [0, 0.02, 0.2])
def test_ctrl_c_gets_through_inside_an_operation_and_the_others_learn_of_it(after: float) -> None:
    with processes(2, be_interrupted) as world:
        world.await_file("waiting")
        time.sleep(after)  # in the kernel's first wait, in its sleep, and in a later call of it
        world.signal(0, signal.SIGINT)
        world.await_file("interrupted", SOON)
        for outcome in world.finish():
            assert "rank 0 left operation" in outcome.result()
            assert "all_reduce(SUM, float32, 1 element) with KeyboardInterrupt" in outcome.result()


def be_interrupted_in_wait() -> bool:
    dist.barrier()
    if dist.get_rank() == 1:
        await_note("interrupted")
        dist.all_reduce(torch.ones(1))
        return True
    context = dist.group.WORLD.communicator.engine.context
    before = context.load_word(at.SEQUENCE)
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    while context.load_word(at.SEQUENCE) == before:
        time.sleep(0.001)  # until the group's thread has begun it: this one would run it itself
    threading.Thread(target=interrupt_inside, args=(type(work).wait,)).start()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    leave_note("interrupted")
    return work.wait() and tensor.item() == 2


def test_ctrl_c_gets_through_while_waiting_for_an_asynchronous_operation_which_goes_on() -> None:
    assert run("processes", 2, be_interrupted_in_wait) == [True, True]


def be_interrupted_behind_another_thread() -> list[float]:
    """Rank 0's main thread gets Ctrl-C while it waits for the group, which another of its threads uses."""
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        await_note("interrupted")
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        return []
    context = dist.group.WORLD.communicator.engine.context
    before = context.load_word(at.SEQUENCE)
    tensors = [torch.ones(1), torch.ones(1)]
    pool = ThreadPoolExecutor(1)
    use = pool.submit(dist.all_reduce, tensors[0], group=dist.group.WORLD)
    while context.load_word(at.SEQUENCE) == before:
        time.sleep(0.001)
    threading.Thread(target=interrupt_inside, args=(dist.all_reduce,)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(tensors[1])
    leave_note("interrupted")
    use.result(SOON)
    dist.all_reduce(tensors[1])
    return [tensor.item() for tensor in tensors]


def test_ctrl_c_while_another_thread_uses_the_group_leaves_it_to_that_thread() -> None:
    assert run("processes", 2, be_interrupted_behind_another_thread)[0] == [2.0, 2.0]


# -- leaving


def one_rank_raises() -> str:
    dist.barrier()
    store_barrier()
    if dist.get_rank() == 1:
        raise LookupError("on purpose")
    with pytest.raises(GroupAbortedError) as caught:
        dist.all_gather(list(torch.ones(3, 2)), torch.ones(2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "told"), [("threads", "rank 1 has destroyed the group"), ("processes", "rank 1 died")]
)
def test_a_rank_that_raises_is_named_to_the_others(kind: str, told: str) -> None:
    zero, one, two = outcomes(kind, 3, one_rank_raises)
    assert isinstance(one.error, LookupError)
    assert told in zero.result()
    assert told in two.result()


def leave_early() -> str:
    dist.barrier()
    store_barrier()
    if dist.get_rank() == 2:
        dist.destroy_process_group()
        return ""
    with pytest.raises(GroupAbortedError, match="do all ranks call the same operations") as caught:
        dist.all_reduce(torch.ones(2))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_has_destroyed_the_group_is_named(kind: str) -> None:
    zero, one, _ = run(kind, 3, leave_early)
    assert "rank 2 has destroyed the group" in zero
    assert "rank 2 has destroyed the group" in one


def end_with_an_operation(count: int) -> list[float]:
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    return [tensor[0].item(), tensor[-1].item()]


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("count", [1, 400_000])
def test_a_rank_may_leave_as_soon_as_its_last_operation_is_done(kind: str, count: int) -> None:
    """The others are still in it, and must not take the rank for one that they wait for in vain."""
    for _ in range(8):
        assert run(kind, 3, end_with_an_operation, count) == [[3.0, 3.0]] * 3


# -- late


def one_rank_is_late(is_away: threading.Event, step: threading.Event, asynchronous: bool) -> str:
    """Rank 1 calls when rank 0 has given up."""
    meet_and_set_timeout(0.3)
    if dist.get_rank() == 1:
        is_away.set()
        assert step.wait(SOON)  # here rank 1 is found
        with pytest.raises(GroupAbortedError) as caught:
            dist.all_reduce(torch.ones(300_000))
        return str(caught.value)
    assert is_away.wait(SOON)
    works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(3 * asynchronous)]
    with pytest.raises(CollectiveTimeoutError) as caught:
        works[0].wait() if asynchronous else dist.all_reduce(torch.ones(300_000))
    for work in works[1:]:
        with pytest.raises(GroupAbortedError, match="can no longer be used"):
            work.wait()
    step.set()
    assert caught.value.missing == (1,)
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_time_out_names_who_is_missing_and_where_its_program_is(asynchronous: bool) -> None:
    zero, one = run("threads", 2, one_rank_is_late, threading.Event(), threading.Event(), asynchronous)
    assert "all_reduce(SUM, float32, 300000 elements) of group 'default' timed out after " in zero
    assert "rank 1 had not arrived" in zero
    waiting, missing = zero.splitlines()[-2:]
    assert "rank 0 is in operation 3, all_reduce(SUM, float32, 300000 elements), for " in waiting
    assert f", and waits for rank 1; is at {__file__}:" in waiting
    assert "rank 1 last called operation 2, barrier(), " in missing
    assert f" s ago; is at {__file__}:" in missing
    assert missing.endswith("in one_rank_is_late")
    assert "timed out after " in one


def one_process_is_late() -> str:
    meet_and_set_timeout(0.3)
    folder = Path(os.environ["WORLD_DIRECTORY"])
    if dist.get_rank() == 1:
        (folder / "away").touch()  # not by a function of another file: here rank 1 is found
        while not (folder / "timed out").exists():
            pass  # or here
        with pytest.raises(GroupAbortedError):
            dist.broadcast(torch.ones(5_000_000), 0)
        return ""
    await_note("away")
    collecting._ANSWER_SECONDS = collecting._MAX_ANSWER_SECONDS = SOON  # for its answer, on a busy machine
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.broadcast(torch.ones(5_000_000), 0)
    leave_note("timed out")
    return str(caught.value)


def test_a_time_out_tells_where_the_program_of_another_process_is() -> None:
    zero, _ = run("processes", 2, one_process_is_late)
    assert "rank 1 had not arrived" in zero
    missing = zero.splitlines()[-1]
    assert "rank 1 last called operation 2, barrier(), " in missing
    assert f" s ago; is at {__file__}:" in missing


def use_after_failure(step: threading.Event) -> list[str]:
    """Rank 0 gives up in an operation; whatever it calls then must not find the pieces of that one."""
    meet_and_set_timeout(0.2)
    if dist.get_rank() == 1:
        assert step.wait(SOON)
        return []
    with pytest.raises(CollectiveTimeoutError):
        dist.all_reduce(torch.ones(10))
    messages = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for length in (3, 300_000):
        for case in ONE_OF_EACH:
            with pytest.raises(GroupAbortedError) as caught:
                case(Maker(torch.float32, in_arena=False), rank, size, length)
            messages.append(str(caught.value))
    step.set()
    return messages


def test_every_operation_is_refused_after_one_was_left_halfway() -> None:
    messages, _ = run("threads", 2, use_after_failure, threading.Event())
    assert len(messages) == 2 * len(ONE_OF_EACH)
    assert all("can no longer be used: all_reduce(SUM, float32, 10 elements)" in text for text in messages)


def give_up_on_shared_tensors(step: threading.Event, length: int) -> str:
    """Rank 0 has arrived in an operation on tensors of the arena and given it up; then rank 1 comes."""
    meet_and_set_timeout(0.2)
    tensor = dist.ones(length)
    if dist.get_rank() == 1:
        assert step.wait(SOON)
        with pytest.raises(GroupAbortedError, match="timed out") as caught:
            dist.all_reduce(tensor)
        step.clear()
        return str(caught.value)
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.all_reduce(tensor)
    tensor.fill_(7)
    step.set()
    deadline = time.monotonic() + SOON
    while step.is_set() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (tensor == 7).all()
    return str(caught.value)


@pytest.mark.parametrize("length", [4, 1_000_000])
def test_who_comes_too_late_does_not_touch_the_tensors_of_who_gave_up(length: int) -> None:
    run("threads", 2, give_up_on_shared_tensors, threading.Event(), length)


def give_up_one_group(step: threading.Event) -> None:
    """A group that cannot be used any more does not concern the others, and a new one can be made."""
    group = dist.new_group()
    store_barrier()
    group.set_timeout(0.2)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match=f"of group '{group.group_name}' timed out"):
            dist.barrier(group)
        step.set()
    assert step.wait(SOON)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    with pytest.raises(GroupAbortedError, match=f"group '{group.group_name}' can no longer be used"):
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    dist.all_reduce(tensor, group=dist.new_group())
    assert tensor.tolist() == [4.0, 4.0]


def test_other_groups_go_on_when_one_has_failed() -> None:
    run("threads", 2, give_up_one_group, threading.Event())


def destroy_what_a_thread_waits_in(step: threading.Event) -> str:
    group = dist.new_group()
    store_barrier()
    if dist.get_rank() == 1:
        assert step.wait(SOON)
        with pytest.raises(GroupAbortedError) as caught:
            dist.barrier(group)
        return str(caught.value)
    sequence = group.communicator.engine.context.load_word(at.SEQUENCE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dist.all_reduce, torch.ones(2), group=group)
        while group.communicator.engine.context.load_word(at.SEQUENCE) == sequence:
            time.sleep(0.001)
        dist.destroy_process_group(group)
        with pytest.raises(
            GroupDestroyedError, match="rank 0 destroyed group '1' while it was in all_reduce"
        ):
            waiting.result(SOON)
    step.set()
    return ""


def test_a_group_can_be_destroyed_while_a_thread_waits_in_it() -> None:
    _, told = run("threads", 2, destroy_what_a_thread_waits_in, threading.Event())
    assert "rank 0 left operation" in told


def come_if_not_last() -> str:
    if threading.current_thread().name == "rank 2":
        return ""
    with pytest.raises(StoreTimeoutError) as caught:
        dist.init_process_group(timeout=0.3)
    return str(caught.value)


def test_a_thread_that_never_comes_is_named() -> None:
    zero, one, _ = run("threads", 3, come_if_not_last, init=False)
    assert "2 to come" in zero
    assert "2 to come" in one


def come_unless_last(store: dist.Store, rank: int, size: int) -> str:
    if rank == size - 1:
        return ""
    before = mappings()  # of the process that this one was forked from
    with pytest.raises(StoreTimeoutError) as caught:
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=0.5)
    assert mappings() == before
    return str(caught.value)


def test_a_process_that_never_comes_is_named_and_nothing_is_left_of_the_attempt() -> None:
    zero, one, _ = run("processes", 3, come_unless_last, init=False)
    assert "2 to come" in zero
    assert "2 to come" in one


# -- nothing is left


def begin_and_end(times: int) -> None:
    """After any number of groups no more is open than after one."""
    after_one = 0
    for _ in range(times):
        group = dist.new_group()
        tensor = dist.ones(1000, group=group)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        del group, tensor
        after_one = after_one or len(descriptors())
    deadline = time.monotonic() + SOON
    while len(descriptors()) > after_one:  # a thread that ends holds what is left for a moment
        assert time.monotonic() < deadline, descriptors()
        time.sleep(0.01)


def begin_and_end_uncollected(times: int) -> None:
    gc.disable()
    begin_and_end(times)


def test_groups_that_come_and_go_leave_nothing_to_the_garbage_collector() -> None:
    run("processes", 2, begin_and_end_uncollected, 6)


def test_worlds_of_threads_leave_nothing() -> None:
    gc.collect()
    before = descriptors(), mapped_files(), set(threading.enumerate())
    for _ in range(3):
        run("threads", 4, begin_and_end, 2)
    gc.collect()
    deadline = time.monotonic() + SOON
    # What was there before may go meanwhile, and a thread that ends holds what is left for a moment.
    while any(left := (descriptors() - before[0], mapped_files() - before[1], new_threads(before[2]))):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


# -- on a busy host


def give_up_though_yielding_takes_long(wait: str, step: threading.Event) -> None:
    """A yield may take as long as another program's time slice: here a wait would yield for hours."""
    meet_and_set_timeout(0.3)
    if dist.get_rank() == 1:
        assert step.wait(60)
        return
    dist.group.WORLD.communicator.engine.context.store_word(at.YIELDS, 1 << 40)
    try:
        with pytest.raises(CollectiveTimeoutError):
            dist.all_reduce(torch.ones(2)) if wait == "all_reduce" else dist.recv(torch.ones(2), 1)
    finally:
        step.set()


@pytest.mark.parametrize("wait", ["all_reduce", "recv"])
def test_a_wait_looks_around_though_each_of_its_yields_may_take_long(wait: str) -> None:
    run("threads", 2, give_up_though_yielding_takes_long, wait, threading.Event())
