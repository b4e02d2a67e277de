"""Entries, the builtin functions of plain calls: references, turns, interrupts, deaths, the general way."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_frames import functions_entered, needs_entries
from torch.autograd import profiler

import torchestra as dist
from torchestra.communicator.entries import _Plans
from torchestra.engine.entry_layout import PlanRecord
from torchestra.types import ReduceOp
from worlds import await_note, leave_note, outcomes, run

pytestmark = needs_entries

SOON = 60.0


def count_references() -> None:
    """Call many times, well and badly; nothing is held that was not before."""
    communicator: Any = dist.group.WORLD.communicator
    tensor, output = torch.ones(4), torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: communicator.all_reduce(tensor, ReduceOp.SUM),
        lambda: communicator.all_gather_into_tensor(output, tensor),
        lambda: communicator.all_reduce_list([tensor, output], ReduceOp.SUM),
        lambda: communicator.reduce(tensor, ReduceOp.SUM, 0),
        lambda: communicator.gather([output], tensor, 0),
        lambda: communicator.scatter(output, [tensor], 0),
        lambda: communicator.reduce_scatter(output, [tensor], ReduceOp.SUM),
        lambda: communicator.all_to_all([output], [tensor]),
        communicator.barrier,
        dist.all_reduce_init(tensor),
        dist.all_gather_init([output], tensor),
    ]
    for call in calls:
        call()
    held = (None, False, tensor, output, ReduceOp.SUM)
    gc.collect()
    before = [sys.getrefcount(each) for each in held]
    blocks = sys.getallocatedblocks()
    for _ in range(10_000):
        for call in calls:
            call()
    after = [sys.getrefcount(each) for each in held]
    assert sys.getallocatedblocks() - blocks < 200
    assert all(abs(now - then) < 100 for now, then in zip(after, before, strict=True))


def test_no_reference_is_lost_or_kept() -> None:
    run("threads", 1, count_references)


def call_with_two_threads() -> int:
    """The entry of one thread and the general way of another take turns: no operation is mixed or lost."""
    communicator: Any = dist.group.WORLD.communicator
    tensor = torch.zeros(1 << 12)
    communicator.all_reduce(tensor, ReduceOp.SUM)
    begun: int = communicator.engine.sequence_number()
    strided = torch.zeros(8, 2)[:, 0]
    number = 300
    threads = [
        threading.Thread(
            target=lambda given: [communicator.all_reduce(given, ReduceOp.SUM) for _ in range(number)],
            args=(given,),
        )
        for given in (tensor, strided, torch.zeros(1))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)
    return int(communicator.engine.sequence_number()) - begun - 3 * number


def test_threads_of_one_rank_take_turns() -> None:
    assert run("threads", 1, call_with_two_threads) == [0]


def take_tensors_out_of_lists(name: str, told: queue.SimpleQueue[Any]) -> list[bool]:
    """Rank 1 empties the lists of rank 0, which waits for it in an operation; return which were kept."""
    communicator: Any = dist.group.WORLD.communicator

    def call(lists: list[list[torch.Tensor]]) -> None:
        if name == "all_to_all":
            communicator.all_to_all(*lists)
        elif name == "reduce_scatter":
            communicator.reduce_scatter(torch.zeros(2), lists[0], dist.ReduceOp.SUM)
        elif name == "all_gather":
            communicator.all_gather(lists[0], torch.ones(2))
        else:
            communicator.all_reduce_list(lists[0], dist.ReduceOp.SUM)

    lists = [[torch.ones(2) for _ in range(2)] for _ in range(1 + (name == "all_to_all"))]
    call(lists)
    if dist.get_rank() == 0:
        told.put((communicator.queue.state, lists))
        call(lists)
        dist.barrier()
        return []
    state, others = told.get(timeout=SOON)
    kept = [weakref.ref(tensor) for each in others for tensor in each]
    while not state.inside:
        time.sleep(0.001)
    for each in others:
        each.clear()
    found = [tensor() is not None for tensor in kept]
    call(lists)
    dist.barrier()
    assert all(tensor() is None for tensor in kept)
    return found


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce_list"])
def test_a_call_keeps_the_tensors_of_a_list_that_another_thread_changes_meanwhile(name: str) -> None:
    *_, found = run("threads", 2, take_tensors_out_of_lists, name, queue.SimpleQueue())
    assert len(found) >= 2
    assert all(found)


def interrupt_when_inside(state: Any) -> None:
    """Interrupt the main thread as soon as it waits in an entry: before, it would be in no operation."""
    while not state.inside:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def wait_for_an_interrupt() -> str:
    """Rank 0 waits in an entry for rank 1, which calls only when rank 0 has left."""
    rank, tensor = dist.get_rank(), torch.ones(1)
    dist.all_reduce(tensor)
    communicator: Any = dist.group.WORLD.communicator
    if rank == 0:
        await_note("rank 1 has completed it")  # in the first operation it would find the group aborted, too
        threading.Thread(target=interrupt_when_inside, args=(communicator.queue.state,)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor)
    else:
        leave_note("rank 1 has completed it")
        while not communicator.engine.is_aborted:
            time.sleep(0.01)
    with pytest.raises(dist.GroupAbortedError, match="KeyboardInterrupt") as caught:
        dist.all_reduce(tensor)
    assert communicator.queue.state.inside == 0
    return type(caught.value).__name__


def test_an_interrupt_ends_the_wait_of_an_entry_and_makes_the_group_unusable() -> None:
    assert run("processes", 2, wait_for_an_interrupt) == ["GroupAbortedError"] * 2


def wait_for_the_dead() -> str:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RankFailedError, match="rank 1 died"):
        dist.all_reduce(tensor)
    return "told"


def test_the_death_of_a_peer_ends_the_wait_of_an_entry() -> None:
    assert outcomes("processes", 2, wait_for_the_dead)[0].value == "told"


def look_at_pending() -> None:
    """A synchronous operation comes after those that are queued; no entry runs one with a profiler on."""
    communicator: Any = dist.group.WORLD.communicator
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    with dist.group.WORLD.communicator.queue.coalescing() as steps:
        dist.all_reduce(tensor)
    assert len(steps) == 1
    communicator.queue.run_coalesced(steps, "steps")
    assert functions_entered(lambda: communicator.all_reduce(tensor, ReduceOp.SUM)) == []
    profiler._is_profiler_enabled = True
    try:
        assert "run" in functions_entered(lambda: communicator.all_reduce(tensor, ReduceOp.SUM))
        assert "checked" in functions_entered(lambda: communicator.send(tensor, 0))
        assert "checked" in functions_entered(lambda: communicator.recv(tensor, 0))
    finally:
        profiler._is_profiler_enabled = False


def test_what_is_pending_or_profiled_goes_the_general_way() -> None:
    run("threads", 1, look_at_pending)


def exchange(tensor: torch.Tensor, tag: int = 0, source: int | None = None) -> torch.Tensor:
    """Send a tensor to the other of two ranks, and return what that sends."""
    got = torch.empty_like(tensor)
    other = 1 - dist.get_rank()
    for sends in (True, False) if other else (False, True):
        if sends:
            dist.send(tensor, other, tag=tag)
        else:
            assert dist.recv(got, source, tag=tag) == other
    return got


def exchange_all() -> None:
    """Send and receive: in machine code alone if nothing is to be waited for, and to the end if it is."""
    rank, communicator = dist.get_rank(), dist.group.WORLD.communicator
    other, tensor, got = 1 - rank, torch.arange(8.0), torch.empty(8)
    exchange(tensor)  # which imports what is missing
    dist.barrier()
    assert functions_entered(lambda: dist.send(tensor + rank, other)) == ["send"]
    dist.barrier()
    assert functions_entered(lambda: dist.recv(got, other)) == ["recv"]
    assert got.tolist() == (tensor + other).tolist()
    with pytest.raises(dist.CollectiveTimeoutError):
        communicator.recv(got, other, 0, 0.001)
    dist.barrier()
    for count, dtype in ((1, torch.uint8), (9, torch.float32), (3000, torch.int64), (200_000, torch.float64)):
        for tag, source in ((0, other), ((1 << 62) - 1, None)):
            given = torch.arange(count).to(dtype)
            assert torch.equal(exchange(given + rank, tag, source), given + other)
    held, tag = tensor, 1 << 40
    before = [sys.getrefcount(each) for each in (held, tag)]
    for _ in range(100):
        exchange(tensor, tag, other)
        dist.barrier()  # so that some messages are there, and others are waited for
    assert [sys.getrefcount(each) for each in (held, tag)] == before


def test_messages_reach_their_kernel_without_other_functions_and_arrive() -> None:
    run("processes", 2, exchange_all)


def exchange_by_threads() -> None:
    """The threads of a rank, whose calls share the entries' memory, each get what is theirs."""
    wrong: list[int] = []

    def talk(tag: int) -> None:
        given = torch.full((1 + 40 * tag,), float(tag))
        wrong.extend(tag for _ in range(80) if not torch.equal(exchange(given, tag), given))

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_threads_of_one_rank_send_and_receive_at_once() -> None:
    run("processes", 2, exchange_by_threads)


def call_persistent_ones() -> None:
    """No Python function is entered between the call of a plan and its kernel, and a misuse is told."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    tensor, received = torch.full((5,), float(rank)), torch.zeros(5)
    # However late the other rank is: a kernel that has slept for so long comes back to Python.
    dist.group.WORLD.communicator.engine.context.sleep_times.set(SOON)  # type: ignore[union-attr]
    plans = [
        dist.all_reduce_init(torch.ones(3)),
        dist.broadcast_init(torch.ones(3), 1),
        dist.all_gather_init([torch.ones(2), torch.ones(2)], torch.ones(2)),
        dist.reduce_scatter_init(torch.ones(2), [torch.ones(2), torch.ones(2)]),
        dist.all_to_all_single_init(torch.ones(4), torch.ones(4)),
    ]
    for plan in plans:
        plan()
        plan()
        dist.barrier()
        with pytest.raises(TypeError, match="argument"):
            plan(3)  # type: ignore[call-arg]
        assert functions_entered(plan) == []
    sends, receives = dist.send_init(tensor, other), dist.recv_init(received, other)
    for step in range(3):
        tensor.fill_(10.0 * step + rank)
        sends()
        dist.barrier()
        receives()
        assert receives.source_rank() == other
        assert received.tolist() == [10.0 * step + other] * 5
        dist.barrier()


def test_a_persistent_operation_reaches_its_kernel_without_python() -> None:
    run("processes", 2, call_persistent_ones)


def keep_a_builtin() -> None:
    communicator: Any = dist.group.WORLD.communicator
    first, sends, receives = communicator.all_reduce, communicator.send, communicator.recv
    first(torch.ones(1), ReduceOp.SUM)  # makes the entry
    kept = communicator.all_reduce
    first(torch.ones(1), ReduceOp.SUM)
    assert communicator.all_reduce is kept is not first
    dist.destroy_process_group()
    for reduces in (first, kept):
        with pytest.raises(dist.GroupDestroyedError):
            reduces(torch.ones(1), ReduceOp.SUM)
    assert "all_reduce" not in vars(communicator)
    for message in (sends, receives):
        with pytest.raises(dist.GroupDestroyedError):
            message(torch.ones(1), 0)


def test_a_builtin_that_was_kept_knows_that_its_group_is_destroyed() -> None:
    run("threads", 1, keep_a_builtin)


def plans_of(method: str) -> Any:
    communicator = dist.group.WORLD.communicator  # type: ignore[union-attr]
    return vars(vars(communicator)[method].__self__)["kept"][-1]


class WritesTwice(_Plans):
    """In the middle of a thread's first change of the records another thread changes them, too."""

    met = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "_records" and not self.met:
            self.met = True
            thread = threading.Thread(target=self.add, args=((3, 0, 0, 0),))
            thread.start()
            thread.join()
        return found

    def add(self, record: tuple[int, int, int, int]) -> None:
        self._known.append(record)
        self._write()


def two_plans_at_once() -> None:
    dist.all_reduce(torch.ones(1))
    plans = plans_of("all_reduce")
    known = len(plans._known)
    plans.__class__ = WritesTwice
    plans.add((5, 0, 0, 0))
    address = plans._entry().plans
    assert address in [ctypes.addressof(each) for each in plans._records]
    assert (PlanRecord * (known + 3)).from_address(address)[known + 1].dtype in (3, 5)


def test_plans_that_two_threads_make_at_once_are_kept_and_found() -> None:
    run("threads", 1, two_plans_at_once)


def longer_and_longer_lists() -> None:
    def reduce(number: int) -> None:
        dist.group.WORLD.communicator.all_reduce_list([torch.ones(1)] * number, dist.ReduceOp.SUM)  # type: ignore[union-attr]

    reduce(2)
    plans = plans_of("all_reduce_list")
    entry = plans._entry()
    table = (ctypes.c_int64 * 1).from_address(entry.iovec)
    before = ctypes.addressof(table)
    reduce(100)
    assert entry.longest_list >= 100
    assert entry.iovec != before
    assert before in [ctypes.addressof(each) for each in plans._iovecs]


def test_the_table_of_a_list_that_a_thread_may_be_using_is_kept_when_a_longer_one_comes() -> None:
    run("threads", 1, longer_and_longer_lists)
