"""An operation that a rank called and does not take part in: every rank learns of it.

Otherwise the rank's next operation would be taken for it by the others, who would get the sum of two
different things. What fails here stands for an allocation or a copy that fails on one rank only.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.communicator import communicator as communicator_file
from torchestra.communicator import multi_tensor
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.host_staging import run_staged
from torchestra.errors import GroupAbortedError
from torchestra.tensors import contiguity
from torchestra.types import ReduceOp
from worlds import run

failing: set[int] = set()
"""The tensors whose copies fail."""


@pytest.fixture(autouse=True)
def _copies_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in failing:
            raise MemoryError("no memory for a copy")
        return contiguity.make_contiguous(tensor)

    monkeypatch.setattr(communicator_file, "make_contiguous", make_contiguous)
    monkeypatch.setattr(multi_tensor, "make_contiguous", make_contiguous)
    yield
    failing.clear()


def run_together(body: Callable[..., None], *args: Any) -> None:
    """Run it on two ranks, neither of which is still making the group when the other begins."""
    ready = threading.Barrier(2)

    def begin() -> None:
        ready.wait(20)
        body(*args)

    run("threads", 2, begin)


def is_failing_rank() -> bool:
    return dist.get_rank() == 0


def matrix(value: float) -> torch.Tensor:
    """Return a tensor that is copied before it is reduced; on rank 0 the copy fails."""
    tensor = torch.full((4, 4), value).t()[:, :3]
    if is_failing_rank():
        failing.add(id(tensor))
    return tensor


def expect_abort(call: Callable[[], object], said: str) -> None:
    """Check that the call fails on all ranks, and so does the one after it."""
    with pytest.raises(
        (MemoryError, KeyboardInterrupt) if is_failing_rank() else GroupAbortedError
    ) as caught:
        call()
    if not is_failing_rank():
        assert f"rank 0 left {said}" in str(caught.value)
    after = torch.full((4, 3), 100.0)
    with pytest.raises(GroupAbortedError, match="rank 0 left"):
        dist.all_reduce(after)
    assert after[0, 0].item() == 100.0


def queue_two() -> None:
    first, second = matrix(1.0), torch.full((4, 3), 100.0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    expect_abort(works[0].wait, "all_reduce(SUM) with MemoryError: no memory for a copy")
    with pytest.raises(GroupAbortedError, match="rank 0 left"):
        works[1].wait()
    assert first[0, 0].item() == 1.0
    assert second[0, 0].item() == 100.0


def call_one() -> None:
    tensor = matrix(1.0)
    expect_abort(lambda: dist.all_reduce(tensor), "all_reduce(SUM) with MemoryError: no memory for a copy")
    assert tensor[0, 0].item() == 1.0


def call_from_a_callback() -> None:
    called, works = threading.Event(), []
    tensor = matrix(1.0)

    def call_next(_: object) -> None:
        works.append(dist.all_reduce(tensor, async_op=True))
        called.set()

    group = dist.group.WORLD
    assert group is not None
    first = group.allreduce(torch.ones(1))
    first.get_future().then(call_next)
    assert called.wait(20)
    expect_abort(works[0].wait, "all_reduce(SUM) with MemoryError")


def coalesce() -> None:
    tensors = [torch.ones(1), matrix(1.0), torch.ones(1)]

    def call() -> None:
        with dist.coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)

    expect_abort(call, "coalesced all_reduce(SUM) with MemoryError")
    assert tensors[2].item() == 1


def leave_a_block() -> None:
    def call() -> None:
        with dist.coalescing_manager():
            dist.all_reduce(torch.ones(4, 3))
            if is_failing_rank():
                raise MemoryError("of the program")

    expect_abort(call, "coalesced all_reduce(SUM) with MemoryError: of the program")


def reduce_several() -> None:
    group = dist.group.WORLD
    assert group is not None
    tensors = [matrix(1.0), matrix(2.0)]
    work = group.allreduce(tensors)
    expect_abort(work.wait, "all_reduce(SUM) with MemoryError")


def reduce_mixed() -> None:
    """The second of two reductions, of different dtypes, that are called as one."""
    tensors = [torch.ones(3, dtype=torch.float64), matrix(2.0)]
    communicator = dist.group.WORLD.communicator
    work = multi_tensor.all_reduce_coalesced(communicator, tensors, ReduceOp.SUM, async_op=True)
    assert work is not None
    expect_abort(work.wait, "all_reduce_coalesced(SUM) with MemoryError")


def stage() -> None:
    """Memory for copies of tensors of a GPU."""

    class Copies:
        def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
            raise MemoryError("no pinned memory")

    def call() -> Any:
        tensor, op = torch.ones(2, dtype=torch.float64), ReduceOp.SUM
        if not is_failing_rank():
            return dist.all_reduce(tensor)
        bound = inspect.signature(Communicator.all_reduce).bind(dist.group.WORLD.communicator, tensor, op)
        is_of_device = torch.is_floating_point
        return run_staged(Communicator.all_reduce, bound, is_of_device, Copies)  # type: ignore[arg-type]

    expect_abort(call, "all_reduce of tensors of a GPU with MemoryError: no pinned memory")


@pytest.mark.parametrize(
    "body",
    [queue_two, call_one, call_from_a_callback, coalesce, leave_a_block, reduce_several, reduce_mixed, stage],
    ids=lambda body: body.__name__,
)
def test_an_operation_that_fails_before_its_kernel_begins_aborts_the_group(body: Callable[[], None]) -> None:
    run_together(body)


def start_no_thread() -> None:
    if not is_failing_rank():
        expect_abort(
            lambda: dist.all_reduce(torch.ones(1)),
            "all_reduce(SUM) with RuntimeError: can't start new thread",
        )
        return
    progress = dist.group.WORLD.communicator.queue.thread

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    progress._start = fail
    with pytest.raises(RuntimeError, match="can't start new thread"):
        dist.all_reduce(torch.ones(1), async_op=True)
    assert progress.pending == 0
    with pytest.raises(GroupAbortedError, match="rank 0 left"):
        dist.all_reduce(torch.ones(1))


def test_an_operation_that_cannot_be_queued_aborts_the_group() -> None:
    run_together(start_no_thread)


def sum_sparse(kernels: int, error: type[BaseException]) -> None:
    """Rank 0 fails after so many of the three kernels that a sum of sparse tensors consists of."""
    tensor = torch.sparse_coo_tensor([[0, dist.get_rank() + 1]], [1.0, 2.0], (4,), check_invariants=True)
    if is_failing_rank():
        engine = dist.group.WORLD.communicator.engine
        collective, left = engine.collective, [kernels]

        def fail_after(*args: Any) -> None:
            collective(*args)
            left[0] -= 1
            if left[0] == 0:
                raise error("between two kernels")

        engine.collective = fail_after
    expect_abort(lambda: dist.all_reduce(tensor), f"all_reduce(SUM, sparse) with {error.__name__}")


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("kernels", [1, 2])
def test_an_operation_of_several_kernels_that_is_left_between_two_aborts_the_group(
    kernels: int, error: type[BaseException]
) -> None:
    run_together(sum_sparse, kernels, error)


def fail_afterwards() -> None:
    tensor = torch.ones(4, 4).t()[:, :3]
    works = [dist.all_reduce(each, async_op=True) for each in (tensor, torch.ones(3))]
    if is_failing_rank():
        with pytest.raises(MemoryError):
            works[0].wait()
    else:
        works[0].wait()
        assert tensor[0, 0].item() == 2
    works[1].wait()
    again = torch.ones(3)
    dist.all_reduce(again)
    assert again[0].item() == 2


def test_an_operation_that_fails_after_its_last_kernel_leaves_the_group_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks find each other's next operation all the same."""

    def write_back(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if is_failing_rank() and buffers[0].dim() == 2:
            raise MemoryError
        return contiguity.write_back(tensors, buffers)

    monkeypatch.setattr(communicator_file, "write_back", write_back)
    run_together(fail_afterwards)
