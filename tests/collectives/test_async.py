"""Asynchronous operations: their order, their Work, and many of them at once."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from cases import ONE_OF_EACH, Maker, pattern

import torchestra as dist
from devices import DEVICES
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistError,
    GroupDestroyedError,
)
from worlds import KINDS, run

SOON = 60.0


def a_thousand(device: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((7,), float(rank + number), device=device) for number in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work.wait() is True
        assert tensor.tolist() == [sum(range(size)) + size * number] * 7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_operations_may_be_in_flight(kind: str, device: str) -> None:
    run(kind, 2, a_thousand, device)


def mix(seed: int) -> None:
    """Operations on one tensor, each on the result of the one before, some of them asynchronous."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dice = torch.Generator().manual_seed(seed)
    tensor, expected, works = torch.full((5,), float(rank)), None, []
    value = {peer: float(peer) for peer in range(size)}
    for _ in range(60):
        choice = int(torch.randint(0, 4, (), generator=dice))
        asynchronous = bool(torch.randint(0, 2, (), generator=dice))
        if choice == 0:
            works.append(dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=asynchronous))
            value = dict.fromkeys(value, max(value.values()))
        elif choice == 1:
            root = int(torch.randint(0, size, (), generator=dice))
            works.append(dist.broadcast(tensor, root, async_op=asynchronous))
            value = dict.fromkeys(value, value[root])
        elif choice == 2:
            works.append(dist.reduce(tensor, 0, async_op=asynchronous))
            value[0] = sum(value.values()) % 1e6
        else:
            dist.barrier(async_op=asynchronous)
        if not asynchronous:
            expected = value[rank]
            assert tensor.tolist() == [expected] * 5
            if value[0] > 1e5:
                break
    for work in works:
        assert work is None or work.wait()
    assert tensor.tolist() == [value[rank]] * 5


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_the_program_holds_whatever_is_asynchronous(seed: int) -> None:
    run("threads", 3, mix, seed)


def every_operation(device: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty(3, device=device) for _ in range(size)]
    inputs = [torch.full((3,), float(rank), device=device)] * size
    whole, into = torch.full((3 * size,), float(rank), device=device), torch.empty(3 * size, device=device)
    total = sum(range(size))
    gathered = outputs if rank == 0 else None
    calls: list[tuple[Callable[[], dist.Work], torch.Tensor, list[float]]] = [
        (lambda: dist.all_reduce(inputs[0].clone(), async_op=True), None, [total] * 3),
        (lambda: dist.broadcast(inputs[0].clone(), 1, async_op=True), None, [1.0] * 3),
        (lambda: dist.all_gather_into_tensor(into, inputs[0], async_op=True), into, None),
        (lambda: dist.reduce_scatter_tensor(outputs[0], whole, async_op=True), outputs[0], [total] * 3),
        (lambda: dist.all_to_all_single(into, whole, async_op=True), into, None),
    ]
    in_order = [float(peer) for peer in range(size) for _ in range(3)]
    for call, output, expected in calls:
        work = call()
        work.wait()
        (result,) = work.result()
        assert result.tolist() == (expected or in_order)
        assert output is None or result is output
    work = dist.all_gather(outputs, inputs[0], async_op=True)
    assert work.wait()
    assert all(found is given for found, given in zip(work.result(), outputs, strict=True))
    assert torch.cat(outputs).tolist() == in_order
    work = dist.gather(inputs[0], gathered, 0, async_op=True)
    assert work.wait()
    assert len(work.result()) == (size if rank == 0 else 0)
    work = dist.scatter(outputs[0], inputs if rank == 1 else None, 1, async_op=True)
    assert work.wait()
    assert outputs[0].tolist() == [1.0] * 3
    for work in (
        dist.reduce(inputs[0].clone(), 0, async_op=True),
        dist.reduce_scatter(outputs[0], inputs, async_op=True),
        dist.all_to_all(outputs, inputs, async_op=True),
        dist.barrier(async_op=True),
    ):
        assert work.wait()
        assert work.is_success()
    assert torch.cat(outputs).tolist() == in_order


@pytest.mark.parametrize("device", DEVICES)
def test_every_operation_can_be_asynchronous(device: str) -> None:
    run("threads", 2, every_operation, device)


def ask_the_work(gate: threading.Event) -> None:
    tensor = torch.ones(2)
    if dist.get_rank() == 1:
        assert gate.wait(SOON)
        dist.all_reduce(tensor)
        return
    work = dist.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    assert "all_reduce(SUM) of group 'default', running" in repr(work)
    with pytest.raises(DistError, match=r"has no result yet; call wait\(\) first"):
        work.result()
    for timeout in (0.01, timedelta(milliseconds=10)):
        with pytest.raises(CollectiveTimeoutError, match=r"is not done after waiting 0.01 s for it"):
            work.wait(timeout)
    future = work.get_future()
    assert future is work.get_future()
    assert not future.done()
    shape = future.then(lambda done: done.value()[0].shape)
    gate.set()
    assert work.wait(SOON) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is tensor
    assert future.wait()[0].tolist() == [2.0, 2.0]
    assert shape.wait() == (2,)
    assert work.get_future().value()[0] is tensor
    assert repr(work).endswith(", done>")
    late = dist.Work("late")
    late.finish([tensor])
    assert late.get_future().value()[0] is tensor


def test_work_tells_how_the_operation_stands() -> None:
    run("threads", 2, ask_the_work, threading.Event())


def fail_asynchronously() -> None:
    works = [dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True), dist.barrier(async_op=True)]
    futures = [work.get_future() for work in works]
    assert works[1].wait()
    assert works[0].is_completed()
    assert not works[0].is_success()
    assert isinstance(works[0].exception(), CollectiveMismatchError)
    for call in (works[0].wait, works[0].result):
        with pytest.raises(CollectiveMismatchError, match="fail_asynchronously"):
            call()
    with pytest.raises(RuntimeError, match="called different operations"):
        futures[0].wait()
    assert futures[1].wait() == []
    assert "failed: CollectiveMismatchError" in repr(works[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_told_to_whoever_asks() -> None:
    run("threads", 2, fail_asynchronously)


def drop_the_work() -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(100_000), async_op=True)  # nobody holds this tensor
    gc.collect()
    dist.barrier()
    assert tensor.sum() == 2000


def test_a_work_may_be_dropped() -> None:
    run("threads", 2, drop_the_work)


def keep_nothing_alive() -> None:
    """The tensors of an operation, and the frames of its callers, live no longer than it does."""
    tensor = torch.ones(3)
    seen = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    dist.barrier(async_op=True).wait()
    del tensor
    assert seen() is None


def test_an_operation_that_is_done_keeps_no_tensor_alive() -> None:
    gc.disable()
    try:
        run("threads", 2, keep_nothing_alive)
    finally:
        gc.enable()


def go_on_in_a_callback(registered: threading.Barrier) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = torch.ones(2), torch.ones(2)
    callers = []

    def sum_of_all(done: torch.futures.Future[list[torch.Tensor]]) -> list[float]:
        callers.append(threading.current_thread())
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        dist.all_reduce(second.add_(done.value()[0]))
        return second.tolist()

    if rank == 0:
        registered.wait(SOON)  # so that the operation cannot be done before the others have their callbacks
    future = dist.all_reduce(first, async_op=True).get_future().then(sum_of_all)
    if rank != 0:
        registered.wait(SOON)
    deadline = time.monotonic() + SOON
    while not future.done():
        assert time.monotonic() < deadline, "the callback has not returned"
        time.sleep(0.001)
    assert future.value() == [(size + 1.0) * size] * 2
    assert rank == 0 or callers[0] is not threading.current_thread()


def test_a_callback_knows_its_rank_and_may_call_operations() -> None:
    run("threads", 3, go_on_in_a_callback, threading.Barrier(3))


def wait_in_a_callback(rank_that_is_late: int) -> list[float]:
    """One rank adds the callback when the operation is done already, so that it runs on this thread there."""
    found = []
    for number in range(5):
        first, second, third = torch.ones(50_000), torch.full((3,), float(number)), torch.ones(2)
        work = dist.all_reduce(first, async_op=True)
        if dist.get_rank() == rank_that_is_late:
            work.wait()
        chained = work.get_future().then(
            lambda _, second=second: dist.all_reduce(second, async_op=True).get_future().wait()[0]
        )
        last = dist.all_reduce(third, async_op=True)
        last.wait(SOON)
        assert chained.done(), "the operation in the callback comes before what was queued after it"
        found.append(chained.wait()[0].item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_may_wait_for_an_asynchronous_operation_of_its_own(kind: str) -> None:
    assert run(kind, 2, wait_in_a_callback, 1) == [[0, 2, 4, 6, 8]] * 2


def fail_in_a_callback() -> str:
    """An operation that the ranks call differently, in a callback, is an error of that operation's work."""
    works: list[dist.Work] = []
    tensor = torch.ones(2 + dist.get_rank())
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.then(lambda _: works.append(dist.all_reduce(tensor, async_op=True))).wait()
    with pytest.raises(CollectiveMismatchError) as caught:
        works[0].wait()
    return str(caught.value)


def test_what_fails_in_a_callback_fails_there() -> None:
    for text in run("threads", 2, fail_in_a_callback):
        assert "all_reduce" in text


def know_the_rank_in_a_callback_of_a_message(registered: threading.Event) -> None:
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    if rank == 1:
        assert registered.wait(SOON)
        dist.send(tensor, 0)
        return
    future = (
        dist.irecv(tensor, 1).get_future().then(lambda done: (dist.get_rank(), done.value()[0][0].item()))
    )
    registered.set()
    deadline = time.monotonic() + SOON
    while not future.done():
        assert time.monotonic() < deadline, "the callback has not been called"
        time.sleep(0.001)
    assert future.value() == (0, 1.0)


def test_a_callback_of_a_message_knows_its_rank() -> None:
    run("threads", 2, know_the_rank_in_a_callback_of_a_message, threading.Event())


def use_groups_from_threads(rounds: int) -> None:
    """Four groups, each used by a thread of its own on every rank, at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(4)]

    def use(number: int) -> float:
        value = 0.0
        for turn in range(rounds):
            tensor = torch.full((10 + 1000 * (turn % 3),), float(rank + number))
            work = dist.all_reduce(tensor, group=groups[number], async_op=turn % 2 == 0)
            if work is not None:
                work.wait()
            value += tensor[-1].item()
        return value

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(use, range(4)))
    assert found == [rounds * (sum(range(size)) + size * number) for number in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_several_groups_at_once_from_several_threads(kind: str) -> None:
    run(kind, 2, use_groups_from_threads, 30)


def share_a_group_between_threads() -> None:
    """Two threads of a rank use one group: in no particular order, but never both at once."""
    rank = dist.get_rank()
    group = dist.group.WORLD

    def use(number: int) -> None:
        for _ in range(100):
            tensor = torch.full((300,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            assert tensor.sum() == 900

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, range(2)))


def test_two_threads_of_a_rank_may_use_one_group() -> None:
    run("threads", 2, share_a_group_between_threads)


def leave_with_operations_under_way() -> None:
    tensors = [torch.ones(1000) for _ in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    group = dist.group.WORLD
    dist.destroy_process_group()
    for work, tensor in zip(works, tensors, strict=True):
        assert work.is_success()
        assert tensor.sum() == 2000
    for async_op in (False, True):
        with pytest.raises(GroupDestroyedError, match="has destroyed group 'default'"):
            dist.all_reduce(tensors[0], group=group, async_op=async_op)


def test_what_is_queued_is_run_before_the_group_is_left() -> None:
    run("threads", 2, leave_with_operations_under_way)


def arena_tensors_in_flight() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    make = Maker(torch.float32, in_arena=True)
    engine = dist.group.WORLD.communicator.engine
    for length in (5, engine.choices.chunk):
        works = []
        for number in range(6):
            tensor = make.holding(pattern(rank, length, number))
            works.append((dist.all_reduce(tensor, async_op=True), tensor, number))
            del tensor
        for work, tensor, number in works:
            assert work.wait()
            expected = sum(pattern(peer, length, number) for peer in range(size))
            make.check(tensor, expected, f"number {number}")


def test_tensors_of_the_arena_in_flight() -> None:
    run("threads", 2, arena_tensors_in_flight)


def all_cases_behind_a_queue() -> None:
    """Synchronous calls that have to wait behind asynchronous ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in ONE_OF_EACH:
        make = Maker(torch.float32, in_arena=False)
        works = [dist.all_reduce(torch.ones(20_000), async_op=True) for _ in range(3)]
        case(make, rank, size, 33)
        make.check_guards(case.__name__)
        assert all(work.is_completed() for work in works)


def test_synchronous_operations_wait_for_what_is_queued() -> None:
    run("threads", 3, all_cases_behind_a_queue)
