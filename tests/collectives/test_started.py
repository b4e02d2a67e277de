"""A persistent collective that was started waits for nobody, and whatever comes next ends it first."""

from __future__ import annotations

import functools
import gc
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_frames import needs_entries

import torchestra as dist
from torchestra.communicator.persistent import PersistentCollective
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupDestroyedError,
    NotReadyError,
)
from worlds import KINDS, run

pytestmark = needs_entries

NOTHING = torch.zeros(1)


def queue() -> Any:
    return dist.group.WORLD.communicator.queue  # type: ignore[union-attr]


def bound(tensor: torch.Tensor) -> Any:
    """Return an all_reduce that machine code runs, with the tensor as it was."""
    plan, held = dist.all_reduce_init(tensor), tensor.clone()
    plan()
    tensor.copy_(held)
    return plan


def tell() -> None:
    dist.send(NOTHING, 1)


def hear() -> None:
    dist.recv(torch.zeros(1), 0)


def every_operation(count: int) -> None:
    """Rank 0 starts each before rank 1 begins it, and nothing goes through the queue."""
    rank = dist.get_rank()
    tensor, whole, other, first, second = (torch.zeros(count * n) for n in (1, 2, 2, 1, 1))
    tensors, pieces = (tensor, whole, other, first, second), [first, second]

    def outcome_of(operation: Any) -> list[torch.Tensor]:
        for place, each in enumerate(tensors):
            each.copy_(torch.arange(float(len(each))) + 10 * place + rank)
        operation()
        return [each.clone() for each in tensors]

    def started(plan: Any) -> None:
        if rank == 0:
            plan.start()
            assert queue().state.started == id(plan)
            tell()
        else:
            hear()
            plan.start()
        assert plan.is_active()
        assert plan.wait() is True
        assert queue().state.started == 0

    for plan in (
        dist.all_reduce_init(tensor),
        dist.broadcast_init(tensor, 1),
        dist.all_gather_into_tensor_init(whole, tensor),
        dist.all_gather_init(pieces, tensor),
        dist.reduce_scatter_tensor_init(tensor, whole),
        dist.reduce_scatter_init(tensor, pieces),
        dist.all_to_all_single_init(other, whole),
    ):
        expected = outcome_of(plan)
        vars(queue())["run"] = None  # whoever calls it fails
        found = outcome_of(functools.partial(started, plan))
        del vars(queue())["run"]
        assert not plan.is_active()
        assert all(map(torch.equal, found, expected)), plan


def every_size_and_operation() -> None:
    for count in (1, 10, 9000):
        every_operation(count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_publishes_and_the_wait_does_the_rest(kind: str) -> None:
    run(kind, 2, every_size_and_operation)


def what_comes_next() -> None:
    """Rank 0 does not wait: each way of beginning another operation ends the started one first."""
    rank = dist.get_rank()
    tensor, other = torch.ones(5), torch.ones(3)
    plan, second = bound(tensor), bound(other)

    def in_the_queue() -> None:
        work = dist.all_reduce(other, async_op=True)
        assert work is not None
        work.wait()

    def started() -> None:
        second.start()
        second.wait()

    for following in (
        lambda: dist.all_reduce(other),
        in_the_queue,
        second,
        started,
        dist.barrier,
        lambda: dist.all_gather_object([None, None], 0),
    ):
        tensor.fill_(1 + rank)
        if rank == 0:
            plan.start()
            tell()
        else:
            hear()
            plan()
        following()  # type: ignore[no-untyped-call]
        assert tensor.tolist() == [3.0] * 5
        assert queue().state.started == 0
        assert plan.is_active() is (rank == 0)
        if rank == 0:
            for again in (plan, plan.start):
                with pytest.raises(NotReadyError):
                    again()
        assert plan.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_comes_next_ends_it_first(kind: str) -> None:
    run(kind, 2, what_comes_next)


def nobody_waits() -> None:
    rank = dist.get_rank()
    tensor = torch.ones(5)
    plan = bound(tensor)
    if rank == 0:
        plan.start()
        gone = weakref.ref(plan)
        del plan
        gc.collect()
        assert gone() is not None
        tell()
        dist.barrier()
        assert gone() is None
    else:
        hear()
        plan()
        dist.barrier()
    assert tensor.tolist() == [2.0] * 5
    last = bound(tensor)
    if rank == 0:
        last.start()
        tell()
        dist.destroy_process_group()
        assert last.wait()
    else:
        hear()
        last()
    assert tensor.tolist() == [4.0] * 5


def test_it_may_be_dropped_and_is_ended_before_the_group() -> None:
    run("threads", 2, nobody_waits)


def asked_whether_it_is_done() -> None:
    """Rank 1 comes late: a wait with a time-out gives up, and asking often is enough."""
    rank = dist.get_rank()
    tensor = torch.ones(5)
    plan = bound(tensor)
    for ask in (False, True):
        if rank == 0:
            plan.start()
            if ask:
                assert not plan.is_completed()
            else:
                with pytest.raises(CollectiveTimeoutError):
                    plan.wait(0.01)
            assert plan.is_active()
            tell()
            while ask and not plan.is_completed():
                pass
            assert plan.wait(timeout=30.0)
        else:
            hear()
            plan()
    for wrong in ((1, 2), (1, 2, 3)):
        with pytest.raises(TypeError):
            plan.wait(*wrong)
    for wrong in ({"a": 1}, {"timeout": 1, "a": 1}):
        with pytest.raises(TypeError):
            plan.wait(**wrong)
    with pytest.raises(TypeError):
        plan.start(1)
    assert tensor.tolist() == [4.0] * 5


def test_it_ends_when_it_is_asked_for() -> None:
    run("threads", 2, asked_whether_it_is_done)


def far_ahead() -> None:
    """The root of broadcasts starts one more than it may be ahead; the queue publishes that, unwaited for."""
    rank, tensor = dist.get_rank(), torch.zeros(5)
    plan = dist.broadcast_init(tensor, 0)
    plan()
    dist.barrier()
    if rank == 0:
        for step in range(8):
            tensor.fill_(step)
            plan.start()
            if step < 7:
                plan.wait()
        tell()
        dist.recv(torch.zeros(1), 1)  # and nobody has waited for the last
        plan.wait()
    else:
        hear()
        for step in range(8):
            plan.start()
            plan.wait()
            assert tensor.tolist() == [step] * 5
        dist.send(NOTHING, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_cannot_be_published_yet_is_handed_to_the_queue(kind: str) -> None:
    run(kind, 2, far_ahead)


def errors_are_the_waiter_s() -> None:
    rank, tensor = dist.get_rank(), torch.ones(5)
    plan, other = bound(tensor), bound(torch.ones(3))
    other = other if rank else plan
    for ended_by_another in (False, True):
        other.start()
        if ended_by_another:
            dist.barrier()
        where = r"in bound \(at its first start\)" if ended_by_another else "in errors_are_the_waiter_s"
        with pytest.raises(CollectiveMismatchError, match=where):
            other.wait()
        assert not other.is_active()
        plan()
    if rank == 1:
        dist.send(NOTHING, 0)  # it is out of the operations before
    else:
        dist.recv(torch.zeros(1), 1)
        plan.start()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(dist.DistError, match=r"other memory"):
            plan.wait()
    with pytest.raises(GroupAbortedError):
        dist.recv(torch.ones(1), 1 - rank)


def test_its_errors_are_raised_by_its_wait_whoever_ends_it() -> None:
    run("threads", 2, errors_are_the_waiter_s)


def interrupted() -> None:
    tensor = torch.ones(5)
    plan = bound(tensor)
    if dist.get_rank() == 1:
        dist.send(NOTHING, 0)
        with pytest.raises(GroupAbortedError):
            dist.recv(tensor, 0)
        return
    dist.recv(torch.zeros(1), 1)  # it is out of the operation before
    signal.signal(signal.SIGALRM, _interrupt)
    plan.start()
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    with pytest.raises(KeyboardInterrupt):
        plan.wait()
    assert not plan.is_active()
    assert queue().state.inside == queue().state.started == 0
    with pytest.raises(GroupAbortedError):
        plan()


def _interrupt(*_: object) -> None:
    if queue().state.inside:  # wait() runs the kernel
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def test_an_interrupt_while_it_is_ended_aborts_the_group() -> None:
    run("processes", 2, interrupted)


def messages_at_once() -> None:
    """What needs no waiting is sent and received by the start, without a transfer."""
    rank, tensor, large = dist.get_rank(), torch.zeros(5), torch.zeros(1 << 20)
    mailbox: Any = queue().engine.mailbox
    if rank == 0:
        plans = [dist.send_init(tensor, 1, tag=tag) for tag in range(2)]
        vars(mailbox)["isend"] = None  # whoever calls it fails
        for step in range(3):
            for plan in plans:
                tensor.fill_(step)
                plan.start()
                assert plan.is_active()
                assert plan.is_completed()
                with pytest.raises(NotReadyError):
                    plan.start()
                assert plan.wait(5.0) if step == 1 else plan.wait()
                assert not plan.is_active()
                tensor.fill_(-1.0)
            dist.barrier()
        back = dist.recv_init(tensor, 1)
        dist.start_all([back, plans[0]])  # the send first, not behind the receive
        del vars(mailbox)["isend"]
        assert plans[0].wait()
        assert back.wait()
        long = dist.send_init(large, 1)  # has no room
        long.start()
        plans[0].start()  # waits behind it
        assert long.wait()
        assert plans[0].wait()
    else:
        first, any_rank = dist.recv_init(tensor, 0), dist.recv_init(tensor, tag=1)
        for step in range(3):
            dist.barrier()
            vars(mailbox)["irecv"] = None
            first.start()
            del vars(mailbox)["irecv"]
            assert (first.is_active(), first.is_completed(), first.source_rank()) == (True, True, 0)
            assert first.wait()
            assert tensor.tolist() == [step] * 5
            any_rank.start()
            assert any_rank.wait()
            assert (any_rank.source_rank(), tensor.tolist()) == (0, [step] * 5)
        first()
        dist.send(tensor, 0)
        dist.recv_init(large, 0)()
        first.start()
        first.wait()


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_need_not_wait_is_moved_by_its_start(kind: str) -> None:
    run(kind, 2, messages_at_once)


def order_of_messages() -> None:
    """Rank 0 sends one by one; rank 1 starts receives before and after they come: none overtakes another."""
    rank, tensor, other = dist.get_rank(), torch.zeros(1), torch.zeros(1)
    if rank == 0:
        plan = dist.send_init(tensor, 1)
        for step in range(200):
            tensor.fill_(step)
            plan.start()
            plan.wait()
        return
    plans = [dist.recv_init(tensor, 0), dist.recv_init(other, 0)]
    for step in range(0, 200, 4):
        dist.start_all(plans)
        for plan in reversed(plans):
            plan.wait()
        assert (tensor.item(), other.item()) == (step, step + 1)
        work = dist.irecv(other, 0)
        plans[0].start()
        assert work is not None
        work.wait()
        plans[0].wait()
        assert (other.item(), tensor.item()) == (step + 2, step + 3)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_are_started_keep_their_order(kind: str) -> None:
    run(kind, 2, order_of_messages)


def refused_messages() -> None:
    rank, tensor = dist.get_rank(), torch.zeros(2)
    plan = dist.send_init(tensor, 1) if rank == 0 else dist.recv_init(torch.zeros(3), 0)
    with pytest.raises(TypeError):
        plan.start(1)  # type: ignore[call-arg]
    plan.start()
    if rank == 1:
        with pytest.raises(dist.DistBackendError):
            plan.wait()
        assert not plan.is_active()
    else:
        assert plan.wait()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(dist.InvalidArgumentError, match="other memory"):
            plan.start()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(GroupDestroyedError):
        plan.start()


def test_a_start_of_a_message_is_refused_as_it_would_be_in_python() -> None:
    run("threads", 2, refused_messages)


class StartsFirst:
    """A group's lock that another thread takes first, to start an operation."""

    def __init__(self, lock: Any, start: Callable[[], None]) -> None:
        self._lock, self._start = lock, start

    def __enter__(self) -> None:
        self._start()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def call_while_another_starts() -> list[float]:
    first, second = torch.full((2,), 1.0), torch.full((2,), 10.0)
    one, other = bound(first), bound(second)
    communicator = dist.group.WORLD.communicator  # type: ignore[union-attr]
    lock = communicator.lock
    communicator.lock = StartsFirst(lock, other.start)
    try:
        PersistentCollective.__call__(one)
    finally:
        communicator.lock = lock
    assert queue().state.started == 0
    other.wait()
    return [first[0].item(), second[0].item()]


def test_an_operation_that_another_thread_has_started_meanwhile_is_ended_first() -> None:
    assert run("threads", 2, call_while_another_starts) == [[2.0, 20.0]] * 2
