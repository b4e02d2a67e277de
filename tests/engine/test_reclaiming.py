"""A rank that is stopped inside an operation, and goes on when the others have given it up, does no harm.

Ranks are stopped in the middle of a reduction: in a function that the kernel calls in place of the real one.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable
from itertools import count, takewhile
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import torchestra as dist
from interrupts import interrupted_at
from torchestra.engine import layout as at
from torchestra.engine import local, reclaiming
from torchestra.engine.failure import abort
from torchestra.engine.kernels.buffers import SHARED_PATH
from torchestra.engine.kernels.reductions import reduction
from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership import rank_context
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.operations import ALL_REDUCE, COLLECTIVES, Kind
from torchestra.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError
from torchestra.system.deadline import Deadline
from torchestra.types import ReduceOp
from worlds import OP_SECONDS, await_note, leave_note, meet_and_set_timeout, processes, run, set_timeout

LENGTH = 1 << 20  # 4 MiB, which a rank reduces in many blocks
_REDUCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_kept: list[object] = []
_thread_is_out = threading.Event()


def engine_here() -> LocalEngine:
    found = dist.group.WORLD.communicator.engine
    assert isinstance(found, LocalEngine)
    return found


def call_in_the_middle(engine: LocalEngine, kind: Kind, root: int | None, pause: Callable[[], None]) -> None:
    """Have this rank call something once, between the first two blocks of its next reduction."""
    real = _REDUCTION(reduction(torch.float32, ReduceOp.SUM))
    blocks = 0

    def reduce(target: int, sources: int, number: int, count: int) -> None:
        nonlocal blocks
        blocks += 1
        if blocks == 2:
            pause()
        real(target, sources, number, count)

    function = _REDUCTION(reduce)
    _kept.append(function)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    plan = engine.plan(COLLECTIVES[kind.name], torch.float32, ReduceOp.SUM, root)
    ctypes.c_int64.from_address(plan.address + at.PLAN_FUNCTION).value = address


def reduce_here(tensor: torch.Tensor, kind: Kind, root: int | None, as_list: bool = False) -> None:
    if as_list:  # two parts that share a page, and what is not in the heap
        middle = tensor.numel() // 2 + 5
        dist.all_reduce_coalesced([tensor[:middle], torch.ones(3), tensor[middle:]])
    elif kind is Kind.reduce:
        assert root is not None
        dist.reduce(tensor, root)
    else:
        dist.all_reduce(tensor)


# -- processes


def give_up_a_stopped_rank(kind: Kind, root: int | None, as_list: bool) -> list[int]:
    """Rank 1 stops itself; the others shrink, use the tensor, and let it go on. How much it has changed.

    Only the others have a short time-out, and only in the operation that they give up.
    """
    rank = dist.get_rank()
    before, tensor, behind = dist.empty(3), dist.empty(LENGTH), dist.empty(3)
    tensor.fill_(1.0)
    meet_and_set_timeout(1.0 if rank != 1 else OP_SECONDS)
    if rank == 1:
        call_in_the_middle(engine_here(), kind, root, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        with pytest.raises(GroupAbortedError):
            reduce_here(tensor, kind, root, as_list)
        return []
    with pytest.raises((CollectiveTimeoutError, GroupAbortedError)):
        reduce_here(tensor, kind, root, as_list)
    set_timeout(OP_SECONDS)
    dist.group.WORLD.shrink(exclude=[1])
    for each in (before, tensor, behind):
        each.fill_(7.0)
    dist.all_reduce(tensor[:0])
    dist.barrier()
    leave_note(f"used-{rank}")
    await_note("awake")
    return [int((each != 7.0).sum()) for each in (before, tensor, behind)]


@pytest.mark.parametrize(
    ("kind", "root", "as_list"),
    [(Kind.all_reduce, None, False), (Kind.reduce, 0, False), (Kind.all_reduce, None, True)],
)
def test_a_process_that_was_stopped_does_not_write_into_what_others_have_taken_back(
    kind: Kind, root: int | None, as_list: bool
) -> None:
    with processes(3, give_up_a_stopped_rank, kind, root, as_list) as world:
        for rank in (0, 2):
            world.await_file(f"used-{rank}")
        world.signal(1, signal.SIGCONT)
        assert world.wait(1).result() == []  # an error told it that its result is not one
        with open(world.path("awake"), "w"):
            pass
        assert [world.wait(rank).result() for rank in (0, 2)] == [[0, 0, 0]] * 2


def test_ranges_of_a_page_are_one_even_if_one_lies_in_another() -> None:
    """Else the page's second copy would replace the first, or a part of a tensor would get none."""
    page = at.LARGEST_PAGE
    assert reclaiming._apart([(3 * page, 9), (0, page + 1), (page + 5, 7), (5, 8)]) == [
        (0, page + 12),
        (3 * page, 9),
    ]


# -- threads


def give_up_a_slow_thread(gone_on: threading.Event) -> int:
    """Rank 1 does not go on until rank 0 has its tensor back, or for a while if rank 0 waits for it."""
    engine = engine_here()
    tensor = dist.empty(LENGTH)
    tensor.fill_(1.0)
    meet_and_set_timeout(0.5 if dist.get_rank() == 0 else OP_SECONDS)
    if dist.get_rank() == 1:

        def wait_for_the_other() -> None:
            while not engine.context.is_aborted:
                gone_on.wait(0.01)
            gone_on.wait(0.3)

        call_in_the_middle(engine, Kind.all_reduce, None, wait_for_the_other)
        with pytest.raises(GroupAbortedError):
            dist.all_reduce(tensor)
        _thread_is_out.set()
        return 0
    with pytest.raises(CollectiveTimeoutError):
        dist.all_reduce(tensor)
    tensor.fill_(7.0)
    gone_on.set()
    assert _thread_is_out.wait(OP_SECONDS)
    return int((tensor != 7.0).sum())


def test_a_thread_that_is_slow_is_waited_for() -> None:
    _thread_is_out.clear()
    assert run("threads", 2, give_up_a_slow_thread, threading.Event()) == [0, 0]


def expire_only_after(event: threading.Event) -> None:
    """Let no operation of this rank time out before an event, however late that is."""
    context: Any = engine_here().context
    check = context.check

    def check_later(doing: str, blocked: int, deadline: Deadline, suspect: int | None, **more: Any) -> Any:
        return check(doing, blocked, deadline if event.is_set() else None, suspect, **more)

    context.check = check_later


def give_up_a_thread_for_ever(served: bool, is_inside: threading.Event, go_on: threading.Event) -> str:
    """By an entry, which serves all calls but the first, or not; what the error says."""
    tensor = dist.empty(LENGTH)
    tensor.fill_(1.0)
    if served:
        dist.all_reduce(tensor)
    meet_and_set_timeout(0.3 if dist.get_rank() == 0 else OP_SECONDS)
    if dist.get_rank() == 1:

        def stay() -> None:
            is_inside.set()
            go_on.wait(OP_SECONDS)

        call_in_the_middle(engine_here(), Kind.all_reduce, None, stay)
        with pytest.raises(GroupAbortedError):
            dist.all_reduce(tensor)
        _thread_is_out.set()
        return ""
    expire_only_after(is_inside)
    address, number = tensor.data_ptr(), id(tensor)
    told = give_up([tensor])
    del tensor
    gc.collect()
    others = [dist.empty(LENGTH)]
    assert others[0].data_ptr() != address
    go_on.set()
    assert _thread_is_out.wait(OP_SECONDS)
    reclaiming._held.clear()
    if served:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(number, ctypes.py_object))
    others.append(dist.empty(LENGTH))
    assert others[1].data_ptr() == address
    return told


def give_up(tensors: list[torch.Tensor]) -> str:
    """Take the tensor out of the list, and let nothing refer to it but who must keep it."""
    with pytest.raises(DistBackendError) as caught:
        dist.all_reduce(tensors.pop())
    assert isinstance(caught.value.__cause__, CollectiveTimeoutError)
    return str(caught.value)


@pytest.mark.parametrize("served", [False, True])
def test_what_a_thread_may_use_that_is_not_waited_for_any_longer_is_never_freed(
    monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    _thread_is_out.clear()
    monkeypatch.setattr(reclaiming, "_SECONDS_FOR_THREADS", 0.1)
    told, _ = run("threads", 2, give_up_a_thread_for_ever, served, threading.Event(), threading.Event())
    assert "do not use the tensor" in told
    assert "rank 1 may still use it, and has been there for 0.1 s" in told


# -- interrupts


def interrupt_twice(place: int) -> list[str]:
    """Interrupt a rank that waits in an operation, and then somewhere in what that leads to; return where."""
    arena, descriptor = Arena.create(layout_for(2), "pair")
    os.close(descriptor)
    engines = [LocalEngine(RankContext(arena, rank, "pair", SpinPolicy(0, 0))) for rank in range(2)]
    engine, context = engines[0], cast(Any, engines[0].context)
    context.sleep_times.set(0.001)
    context.check = Mock(side_effect=KeyboardInterrupt)
    plan, tensors = engine.plan(ALL_REDUCE, torch.float32, ReduceOp.SUM), [torch.ones(1)]
    with (
        interrupted_at(place, [each.__file__ for each in (abort, local, rank_context, reclaiming)]) as where,
        pytest.raises(KeyboardInterrupt),
    ):
        engine.collective(plan, tensors, tensors, OP_SECONDS)
    if context.check.called:
        assert engines[1].is_aborted, where
        with pytest.raises(GroupAbortedError):
            engine.collective(plan, tensors, tensors, OP_SECONDS)
    return where


def test_whatever_interrupts_the_end_of_an_operation_the_others_learn_of_it() -> None:
    assert len([*takewhile(bool, map(interrupt_twice, count()))]) > 50


# -- what reads the tensors of others


@pytest.mark.parametrize(
    ("kind", "kernel", "reader"),
    [
        (Kind.all_gather, "all_gather", at.REFUSED),
        (Kind.all_gather, "all_gather", at.BY_ADDRESS),
        (Kind.broadcast, "broadcast", at.REFUSED),
        (Kind.all_reduce, "all_reduce", at.REFUSED),
    ],
)
def test_who_has_read_others_tensors_does_not_succeed_once_they_may_have_changed_them(
    kind: Kind, kernel: str, reader: int
) -> None:
    """Rank 0 is through, and the group aborted, before rank 1 has seen that rank 0 is."""
    arena, descriptor = Arena.create(layout_for(2), "pair")
    os.close(descriptor)
    codes = []
    calls = []
    for rank in range(2):
        context = RankContext(arena, rank, "pair", SpinPolicy(0, 0))
        context.sleep_times.set(0.001)
        engine = LocalEngine(context)
        context.store_word(at.READER, reader)
        tensor, output = engine.empty((LENGTH,), torch.float32).fill_(1.0), torch.empty(2 * LENGTH)
        addresses = [tensor.data_ptr()]
        if kind is Kind.all_gather:
            addresses.append(output.data_ptr())
        plan = engine.plan(
            COLLECTIVES[kind.name],
            torch.float32,
            ReduceOp.SUM if kind is Kind.all_reduce else None,
            0 if kind is Kind.broadcast else None,
        )
        calls.append(
            (engine, getattr(engine.kernels, kernel), (plan.address, LENGTH, *addresses), tensor, output)
        )
    for rank in (0, 1, 0, 1):
        engine, call, arguments, *_ = calls[rank]
        codes.append(call(*arguments))
        if len(codes) == 2:
            assert engine.context.load_word(at.RESUME) == SHARED_PATH
        if len(codes) == 3:
            engine.context.abort("rank 0 goes on otherwise")
    assert codes == [at.PENDING, at.PENDING, at.DONE, at.ABORTED]


# -- replacing pages


def test_pages_that_were_made_private_keep_what_is_in_them_and_are_seen_by_nobody_else() -> None:
    page = mmap.PAGESIZE
    arena, descriptor = Arena.create(at.Layout(1, 4096, 4096, 0, 64 * page), "private")
    other = Arena.attach(descriptor, arena.layout)
    os.close(descriptor)
    arena.heaps[:] = 1
    arena.make_heap_private(3 * page + 100, 5 * page, keep=False)
    assert bool((arena.heaps == 1).all())
    other.heaps[: 64 * page] = 2
    expected = np.full(64 * page, 2, dtype=np.uint8)
    expected[3 * page : 9 * page] = 1
    assert bool((arena.heaps == expected).all())


def test_the_memory_that_copies_replace_goes_back_to_the_system() -> None:
    page = mmap.PAGESIZE
    arena, descriptor = Arena.create(at.Layout(1, 4096, 4096, 0, 16384 * page), "private")
    arena.heaps[:] = 1
    before = os.fstat(descriptor).st_blocks
    arena.make_heap_private(0, 8192 * page, keep=False)
    halved = os.fstat(descriptor).st_blocks
    arena.make_heap_private(8192 * page, 8192 * page, keep=True)
    after = os.fstat(descriptor).st_blocks
    os.close(descriptor)
    assert before - halved >= 8000 * page // 512
    assert after == halved
    assert bool((arena.heaps == 1).all())
