"""Entries, the builtin functions of plain calls, give what the general way gives, and hold nothing back."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_frames import functions_entered
from torch.autograd import profiler

import torchestra as dist
from torchestra.engine.entries import tensor_access
from torchestra.types import ReduceOp
from worlds import outcomes, run

pytestmark = pytest.mark.skipif(tensor_access.access_to_tensors() is None, reason=tensor_access.why_not())

SOON = 20.0
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


class Subclass(torch.Tensor):
    pass


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def shortened(tensor: torch.Tensor, part: int = 2) -> torch.Tensor:
    """Return a tensor with a part of its memory; 0: with none."""
    made = tensor.clone()
    made.untyped_storage().resize_(made.untyped_storage().nbytes() // part if part else 0)
    return made


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": plain,
    "offset": lambda tensor: torch.cat([tensor, tensor])[tensor.shape[0] :],
    "strided": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "stacked": lambda tensor: tensor.unsqueeze(1).unsqueeze(0).squeeze(0),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "subclass": lambda tensor: tensor.as_subclass(Subclass),
    "negative": lambda tensor: torch._neg_view(tensor) if tensor.dtype.is_floating_point else tensor,
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "short": shortened,
    "freed": lambda tensor: shortened(tensor, 0),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
}
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "list", "send", "recv")
OPS = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.BXOR]


def outcome_of(communicator: Any, name: str, form: str, dtype: torch.dtype, count: int, op: ReduceOp) -> Any:
    """Call an operation on one rank by the communicator's method of now; what came of it."""
    torch.manual_seed(1)
    tensor = FORMS[form]((torch.rand(count) * 9).to(dtype))
    output = torch.zeros(count, dtype=dtype)
    try:
        if name == "all_reduce":
            communicator.all_reduce(tensor, op)
        elif name == "list":
            communicator.all_reduce_list([tensor, output], op)
        elif name == "broadcast":
            communicator.broadcast(tensor, 0)
        elif name == "all_gather":
            communicator.all_gather_into_tensor(output, tensor)
        elif name == "reduce_scatter":
            communicator.reduce_scatter_tensor(output, tensor, op)
        elif name == "all_to_all":
            communicator.all_to_all_single(output, tensor)
        elif name == "send":
            communicator.send(tensor, 0, 7)
            communicator.recv(output, 0, 7)
        else:
            communicator.send(torch.ones(count, dtype=dtype), 0)
            try:
                communicator.recv(tensor, None)
            except Exception:
                communicator.recv(output, 0)
                raise
    except Exception as error:
        return type(error), str(error)
    shown = tensor.to_dense() if tensor.is_sparse else tensor
    return shown.tolist() if form not in ("short", "freed", "meta") else None, output.tolist()


def compare_both_ways() -> None:
    communicator: Any = dist.group.WORLD.communicator
    served = {name: value for name, value in vars(communicator).items() if name in dir(type(communicator))}
    entries = {name: value for name, value in served.items() if type(value) is type(len)}
    assert len(entries) == 9
    turns = itertools.count()
    cases = [(name, form, DTYPES[next(turns) % 7]) for name in OPERATIONS for form in FORMS]
    cases += [(name, "plain", dtype) for name in OPERATIONS for dtype in DTYPES]
    for name, form, dtype in cases:
        case = name, form, dtype, 1 + next(turns) % 5, OPS[next(turns) % 4]
        found = [outcome_of(communicator, *case) for _ in range(2)]
        for entry in entries:
            vars(communicator).pop(entry)
        try:
            expected = outcome_of(communicator, *case)
        finally:
            vars(communicator).update(entries)
        assert repr(found) == repr([expected] * 2), case
    assert communicator.queue.state.inside == communicator.queue.state.general == 0


def test_both_ways_give_the_same_bits_and_the_same_errors() -> None:
    run("threads", 1, compare_both_ways)


def count_references() -> None:
    """Call many times, well and badly; nothing is held that was not before."""
    communicator: Any = dist.group.WORLD.communicator
    tensor, output = torch.ones(4), torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: communicator.all_reduce(tensor, ReduceOp.SUM),
        lambda: communicator.all_gather_into_tensor(output, tensor),
        lambda: communicator.all_reduce_list([tensor, output], ReduceOp.SUM),
        communicator.barrier,
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


def interrupt_when_inside(state: Any) -> None:
    """Interrupt the main thread as soon as it waits in an entry: before, it would be in no operation."""
    while not state.inside:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def wait_for_an_interrupt() -> str:
    """Rank 0 waits in an entry for a rank that does not come until it has left."""
    rank, tensor = dist.get_rank(), torch.ones(1)
    dist.all_reduce(tensor)
    communicator: Any = dist.group.WORLD.communicator
    if rank == 0:
        threading.Thread(target=interrupt_when_inside, args=(communicator.queue.state,)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor)
    else:
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


def keep_a_builtin() -> None:
    communicator: Any = dist.group.WORLD.communicator
    kept, sends, receives = communicator.all_reduce, communicator.send, communicator.recv
    kept(torch.ones(1), ReduceOp.SUM)
    dist.destroy_process_group()
    with pytest.raises(dist.GroupDestroyedError):
        kept(torch.ones(1), ReduceOp.SUM)
    for message in (sends, receives):
        with pytest.raises(dist.GroupDestroyedError):
            message(torch.ones(1), 0)


def test_a_builtin_that_was_kept_knows_that_its_group_is_destroyed() -> None:
    run("threads", 1, keep_a_builtin)
