"""Persistent operations do what the ordinary ones do, as often as they are started, and refuse misuse."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from typing import Any

import pytest
import torch
from cases import (
    Case,
    all_gather_in_place,
    all_gather_into_tensor,
    all_gather_uneven,
    all_reduce,
    all_to_all_single,
    all_to_all_single_split,
    broadcast_last,
    check_case,
    reduce_scatter_tensor,
    reduce_scatter_uneven,
)
from test_frames import needs_entries

import torchestra as dist
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    GroupDestroyedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotReadyError,
    RankFailedError,
)
from worlds import KINDS, WORLD_SECONDS, RankDied, leave_note, processes, run, store_barrier

CASES: dict[str, Case] = {
    "all_gather": all_gather_in_place,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather uneven": all_gather_uneven,
    "all_reduce": all_reduce,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single split": all_to_all_single_split,
    "broadcast": broadcast_last,
    "reduce_scatter": reduce_scatter_uneven,
    "reduce_scatter_tensor": reduce_scatter_tensor,
}
NAMES = [name for name in CASES if " " not in name]


def in_list(given: Any) -> list[torch.Tensor]:
    return [each for each in (given if isinstance(given, list) else [given]) if torch.is_tensor(each)]


def start_often(name: str, *arguments: Any) -> None:
    """In the place of an ordinary operation: start the persistent one in every way, from the same values."""
    plan = getattr(dist, f"{name}_init")(*arguments)
    tensors = [tensor for given in arguments for tensor in in_list(given)]
    before = [tensor.clone() for tensor in tensors]

    def start_and_wait() -> None:
        plan.start()
        assert plan.is_active()
        assert plan.wait()

    def start_all_and_wait() -> None:
        dist.start_all([plan])
        assert plan.wait()

    for begin in (plan, start_and_wait, plan, start_all_and_wait, plan):
        for tensor, held in zip(tensors, before, strict=True):
            tensor.copy_(held)
        begin()
        assert not plan.is_active()


def check_all_cases() -> None:
    for name in NAMES:
        setattr(dist, name, functools.partial(start_often, name))
    for case in CASES.values():
        check_case(case, (0, 1, 33, 40_001), (torch.float32,), ("mixed",))
        check_case(case, (9,), (torch.complex64,), ("ordinary",))


@pytest.mark.parametrize(("kind", "size"), [("threads", 3), ("processes", 2)])
def test_every_start_gives_what_the_ordinary_operation_gives(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:  # which the ranks replace
        monkeypatch.setattr(dist, name, getattr(dist, name))
    run(kind, size, check_all_cases)


def several_layouts() -> None:
    """Copied in and out on every start, to the bits of the ordinary operation; peers may call that."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    whole = torch.randn(6, 8)
    strided = whole.t()[1:5, ::2]
    twin = strided.clone()
    factor = dist.ReduceOp.premul_sum(0.3)
    plan = dist.all_reduce_init(strided, factor)
    for _ in range(3):
        dist.all_reduce(twin, factor)
        plan()
        assert torch.equal(strided, twin)
    if rank == 0:
        plan()
    else:
        dist.all_reduce(strided, factor)
    dist.all_reduce(twin, factor)
    assert torch.equal(strided, twin)


def test_layouts_are_taken_and_other_ranks_cannot_tell() -> None:
    run("threads", 2, several_layouts)


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    here = torch.zeros(10, 2)[:, 0]
    plans = [
        dist.recv_init(here, tag=3),
        dist.send_init(mine := torch.zeros(2, 10).t()[:, 0], (rank + 1) % size, tag=3),
    ]
    for step in range(3):
        mine.fill_(10 * step + rank)
        dist.start_all(plans)
        for plan in plans:
            assert plan.wait()
        sender = (rank - 1) % size
        assert here.tolist() == [10 * step + sender] * 10
        assert plans[0].source_rank() == sender
        assert plans[1].source_rank() == -1
    if rank == 0:
        plans[1]()
        plans[0]()
    else:
        plans[0]()
        plans[1]()
    assert plans[0].source_rank() == (rank - 1) % size


@pytest.mark.parametrize("kind", KINDS)
def test_messages(kind: str) -> None:
    run(kind, 2, messages)


def several_in_flight() -> None:
    """Operations of one group run in the order of their starts, ordinary ones among them."""
    tensor = torch.ones(5)
    doubled, other = dist.all_reduce_init(tensor), dist.broadcast_init(tensor, 0)
    dist.start_all([doubled, other])
    with pytest.raises(NotReadyError, match="started before"):
        doubled()
    work = dist.all_reduce(tensor, async_op=True)
    assert other.wait()
    assert doubled.wait()
    other()  # behind what is queued
    assert work is not None
    work.wait()
    assert tensor.tolist() == [4.0] * 5


def test_starts_and_calls_run_in_the_program_s_order() -> None:
    run("threads", 2, several_in_flight)


def misuse() -> None:
    tensor = torch.ones(8)
    with pytest.raises(InvalidArgumentError, match=r"^broadcast_init: `src`: global rank 7"):
        dist.broadcast_init(tensor, 7)
    with pytest.raises(InvalidArgumentTypeError, match=r"^all_reduce_init: .*parameter `tensor`"):
        dist.all_reduce_init([tensor])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^all_gather_into_tensor_init: "):
        dist.all_gather_into_tensor_init(tensor, tensor)
    with pytest.raises(InvalidArgumentTypeError, match="a list of PersistentOperations"):
        dist.start_all([dist.all_reduce_init(tensor), None])  # type: ignore[list-item]
    plan = dist.all_reduce_init(tensor)
    assert plan.wait()
    assert plan.is_completed()
    with pytest.raises(InvalidArgumentError, match="twice"):
        dist.start_all([plan, plan])
    plan.start()
    for start in (plan.start, plan, lambda: dist.start_all([dist.all_reduce_init(tensor), plan])):
        with pytest.raises(NotReadyError, match=r"^all_reduce\(SUM\): .*wait\(\)"):
            start()
    plan.wait()
    plan()
    assert tensor.tolist() == [4.0 if dist.get_world_size() == 2 else 1.0] * 8
    other = torch.ones(8)  # made now: later it might be where the tensor was
    for change in (
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.resize_(8 * 4096),
        lambda: tensor.set_(other.untyped_storage()),
    ):
        change()
        for start in (plan.start, plan):
            with pytest.raises(InvalidArgumentError, match="make a new one"):
                start()
    dist.barrier()  # the group is as usable as before


def test_misuse_is_refused_before_anything_is_sent() -> None:
    run("threads", 2, misuse)


def mismatch_and_end() -> None:
    rank, tensor = dist.get_rank(), torch.ones(8)
    plan = dist.all_reduce_init(tensor) if rank else dist.broadcast_init(torch.ones(3000), 0)
    for start in (plan, lambda: (plan.start(), plan.wait())):
        with pytest.raises(CollectiveMismatchError, match=r"all_reduce.*test_persistent"):
            start()
        assert not plan.is_active()
    plan = dist.all_reduce_init(tensor)
    plan()
    plan()
    late = dist.recv_init(tensor, 1 - rank)
    late.start()
    with pytest.raises(CollectiveTimeoutError):
        late.wait(0.01)
    assert late.is_active()
    dist.barrier()  # neither sends before both have waited in vain
    dist.send(tensor, 1 - rank)
    assert late.wait()
    dist.barrier()
    dist.destroy_process_group()
    for ended in (plan, late):
        for start in (ended, ended.start):
            with pytest.raises(GroupDestroyedError):
                start()


def test_mismatches_are_found_and_a_group_that_is_gone_says_so() -> None:
    run("threads", 2, mismatch_and_end)


def not_in_the_group() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return
    tensor = torch.ones(1)
    with pytest.warns(UserWarning, match="all_reduce_init on global rank 1"):
        plan = dist.all_reduce_init(tensor, group=group)
    plan()
    dist.start_all([plan])
    assert plan.wait()
    assert tensor.item() == 1


def test_a_rank_that_is_not_in_the_group_does_nothing() -> None:
    run("threads", 2, not_in_the_group)


def test_a_fake_world_takes_them() -> None:
    dist.init_process_group("fake", rank=1, world_size=4, store=dist.FakeStore())
    try:
        output, tensor = torch.zeros(8, device="meta"), torch.zeros(2, device="meta")
        for plan in (
            dist.all_gather_into_tensor_init(output, tensor),
            dist.send_init(tensor, 0),
            dist.recv_init(tensor),
        ):
            plan()
            plan.start()
            assert plan.wait()
    finally:
        dist.destroy_process_group()


def start_for_ever(plan: dist.PersistentOperation) -> None:
    while True:
        plan()
        plan.start()
        plan.wait()


def until_killed() -> tuple[int, ...]:
    plan = dist.all_reduce_init(torch.ones(1000))
    plan()
    leave_note(f"ready {dist.get_rank()}")
    with pytest.raises(RankFailedError) as caught:
        start_for_ever(plan)
    for start in (plan, lambda: (plan.start(), plan.wait())):
        with pytest.raises(GroupAbortedError):
            start()
    return caught.value.ranks


def test_a_killed_rank_is_named() -> None:
    with processes(2, until_killed) as world:
        for rank in range(2):
            world.await_file(f"ready {rank}")
        world.signal(1, signal.SIGKILL)
        ended = world.finish()
    assert ended[0].result() == (1,)
    assert isinstance(ended[1].error, RankDied)


class Told(Exception):
    """What a rank's operation is left with."""


def call_one_from_two_threads(fails: bool, inside: threading.Event, called: threading.Event) -> None:
    """Another thread calls an operation, wrongly, while this one waits in it, or leaves it, in Python."""
    group: Any = dist.group.WORLD
    context, tensor = group.communicator.engine.context, torch.ones(3)
    plan, wrong, check, references = dist.all_reduce_init(tensor), object(), context.check, 5
    plan()
    store_barrier()  # nobody is in it when the next one fails
    if dist.get_rank() == 1:
        assert called.wait(WORLD_SECONDS)
        if not fails:
            plan()
        return

    def hold(*arguments: Any, **more: Any) -> Any:
        inside.set()
        assert called.wait(WORLD_SECONDS)
        return None if fails else check(*arguments, **more)

    def fail(*_: Any, **__: Any) -> None:
        raise Told

    def call_wrongly() -> None:
        assert inside.wait(WORLD_SECONDS)
        try:
            for _ in range(references):
                with pytest.raises(TypeError):
                    plan(wrong)
        finally:
            called.set()

    if fails:
        context.check, context.note_failure = fail, hold
    else:
        context.check = hold
    before = sys.getrefcount(wrong)
    other = threading.Thread(target=call_wrongly)
    other.start()
    with pytest.raises(Told) if fails else contextlib.nullcontext():
        plan()
    other.join()
    assert sys.getrefcount(wrong) == before
    assert fails or torch.equal(tensor, torch.full((3,), 4.0))


@needs_entries
@pytest.mark.parametrize("fails", [False, True])
def test_one_that_waits_is_called_by_another_thread(fails: bool) -> None:
    """Its arguments took the place of the wait's, and were dropped for those, or raised for its error."""
    run("threads", 2, call_one_from_two_threads, fails, threading.Event(), threading.Event())
