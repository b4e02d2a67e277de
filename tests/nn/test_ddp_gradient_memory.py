"""Large gradients are born in memory that the ranks share, and are the same as anywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchestra as dist
from forking import Child
from torchestra.algorithms.join import Join
from torchestra.engine.memory import torch_allocator
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run

RANKS = 2
SEED = 3
WIDTH = 512  # a square of floats is a large gradient: 1 MiB


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """The same values on all ranks, which may be threads."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH)
    return module


def model() -> torch.nn.Module:
    return filled(
        torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, 4),
        )
    )


def samples(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def expected(step: int = 0) -> list[torch.Tensor]:
    """The averages, computed by one process as the ranks' sum and division."""
    total: list[torch.Tensor] = []
    for rank in range(RANKS):
        alone = model()
        loss(alone(samples(rank, step))).backward()
        gradients = [each.grad for each in alone.parameters()]
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
    return [each / RANKS for each in total]


def large_in_heap(wrapped: DistributedDataParallel) -> list[bool]:
    engine = wrapped.process_group.communicator.engine
    large = [each for each in wrapped.parameters() if each.nbytes >= 1 << 20]
    assert len(large) == 2
    return [engine.is_in_heap(each.grad.data_ptr()) for each in large]


def assert_averages(wrapped: DistributedDataParallel, step: int = 0) -> None:
    for parameter, average in zip(wrapped.parameters(), expected(step), strict=True):
        torch.testing.assert_close(parameter.grad, average)


def step_of(wrapped: DistributedDataParallel, step: int = 0) -> None:
    loss(wrapped(samples(dist.get_rank(), step))).backward()


def some_steps() -> list[Any]:
    wrapped = DistributedDataParallel(model())
    found = []
    for step in range(3):
        wrapped.zero_grad()
        step_of(wrapped, step)
        assert_averages(wrapped, step)
        found.append((large_in_heap(wrapped), [each.grad.data_ptr() for each in wrapped.parameters()][2]))
    return found


def test_large_gradients_lie_in_shared_memory_in_every_step_and_are_the_averages() -> None:
    for found in run("processes", RANKS, some_steps):
        assert [where for where, _ in found] == [[True, True]] * 3
        assert len({address for _, address in found}) == 1  # the block is used again


def convolutions() -> torch.nn.Module:
    """oneDNN makes buffers of the lengths of their weights."""
    layers = [torch.nn.Conv2d(1, 64, 3, padding=1), torch.nn.Conv2d(64, 512, 3, padding=1)]
    return filled(torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1)))


def convolve() -> bool:
    wrapped = DistributedDataParallel(convolutions())
    for step in range(3):
        images = [
            torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            for rank in range(RANKS)
        ]
        wrapped.zero_grad()
        loss(wrapped(images[dist.get_rank()])).backward()
        alone = convolutions()
        for image in images:
            (loss(alone(image)) / RANKS).backward()
        for parameter, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
    engine = wrapped.process_group.communicator.engine
    return bool(engine.is_in_heap(wrapped.module[1].weight.grad.data_ptr()))


def test_gradients_of_convolutions_lie_in_shared_memory() -> None:
    """It ended in an internal error of torch's: oneDNN takes its buffers from the allocator, too."""
    assert run("processes", RANKS, convolve) == [True] * RANKS


class Residual(torch.nn.Module):
    """Layers of which autograd holds some results at once that have the length of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(3)])
        filled(self)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            sample = sample + layer(sample).tanh()
        return sample


def share_lengths() -> list[int]:
    """In each step, how many of the weights' gradients lie in the heap."""
    wrapped = DistributedDataParallel(Residual())
    engine = wrapped.process_group.communicator.engine
    found = []
    for step in range(6):
        samples = [
            torch.randn(256, 256, generator=torch.Generator().manual_seed(100 * step + rank))
            for rank in range(RANKS)
        ]
        wrapped.zero_grad()
        loss(wrapped(samples[dist.get_rank()])).backward()
        alone = Residual()
        for sample in samples:
            (loss(alone(sample)) / RANKS).backward()
        for parameter, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
        found.append(sum(engine.is_in_heap(each.weight.grad.data_ptr()) for each in wrapped.module.layers))
    return found


def test_gradients_that_found_no_block_of_their_length_find_one_in_a_later_step() -> None:
    """Results on the way have the same length, and take some blocks for a moment."""
    for found in run("processes", RANKS, share_lengths):
        assert found[0] < 3
        assert found[-1] > found[0]


def without_shared_memory(how: str) -> list[bool]:
    """Where one rank, or all, have ordinary memory for some gradients or all."""
    if how == "no allocator" and dist.get_rank() == 0:
        torch_allocator._outcome.cache_clear()
        torch_allocator._KNOWN = ((9, 0), (9, 1))
    wrapped = DistributedDataParallel(model())
    kept = []
    if how == "kept":
        step_of(wrapped)
        if dist.get_rank() == 0:
            kept = [each.grad for each in wrapped.parameters()]
        wrapped.zero_grad()
    step_of(wrapped)
    assert_averages(wrapped)
    del kept
    return large_in_heap(wrapped)


@pytest.mark.parametrize("how", ["no allocator", "kept"])
def test_a_rank_whose_gradients_lie_elsewhere_gets_the_same_averages(how: str) -> None:
    zero, one = run("processes", RANKS, without_shared_memory, how)
    assert zero == [False, False]
    assert one == [True, True]


def full_heap() -> list[bool]:
    """Rank 0's heap has no room after the first block."""
    wrapped = DistributedDataParallel(model())
    engine = wrapped.process_group.communicator.engine
    empty, made = engine.empty, []

    def bounded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if made:
            raise InvalidArgumentError("no bytes are left")
        made.append(empty(shape, dtype))
        return made[-1]

    if dist.get_rank() == 0:
        engine.empty = bounded
    step_of(wrapped)
    assert_averages(wrapped)
    return large_in_heap(wrapped)


def test_a_full_heap_leaves_ordinary_memory_for_the_rest() -> None:
    zero, one = run("processes", RANKS, full_heap)
    assert sum(zero) == 1
    assert sum(one) == 2


def accumulate() -> list[bool]:
    wrapped = DistributedDataParallel(model())
    with wrapped.no_sync():
        step_of(wrapped, 0)
    step_of(wrapped, 1)
    sums = [a + b for a, b in zip(expected(0), expected(1), strict=True)]
    for parameter, total in zip(wrapped.parameters(), sums, strict=True):
        torch.testing.assert_close(parameter.grad, total)
    return large_in_heap(wrapped)


def test_gradients_that_accumulate_lie_in_shared_memory_from_the_first_backward() -> None:
    assert run("processes", RANKS, accumulate) == [[True, True]] * RANKS


def uneven() -> list[torch.Tensor]:
    wrapped = DistributedDataParallel(model())
    with Join([wrapped]):
        for step in range(1 + 2 * dist.get_rank()):
            wrapped.zero_grad()
            step_of(wrapped, step)
    return [each.grad for each in wrapped.parameters()]


def test_a_rank_that_has_joined_takes_part_in_the_same_operations() -> None:
    _, one = run("processes", RANKS, uneven)
    alone = model()
    loss(alone(samples(1, 2))).backward()
    for gradient, parameter in zip(one, alone.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad / RANKS)


def unused() -> None:
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(2):
        wrapped.zero_grad()
        wrapped(samples(dist.get_rank()), branch=(step + dist.get_rank()) % 2).square().mean().backward()
        alone = Branches()
        totals = [torch.zeros_like(each) for each in alone.parameters()]
        for rank in range(RANKS):
            alone.zero_grad()
            alone(samples(rank), branch=(step + rank) % 2).square().mean().backward()
            for total, parameter in zip(totals, alone.parameters(), strict=True):
                if parameter.grad is not None:
                    total += parameter.grad / RANKS
        for parameter, total in zip(wrapped.parameters(), totals, strict=True):
            torch.testing.assert_close(parameter.grad, total)


class Branches(torch.nn.Module):
    """Two branches of large parameters, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, WIDTH)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)])
        filled(self)

    def forward(self, sample: torch.Tensor, branch: int) -> torch.Tensor:
        result: torch.Tensor = self.branches[branch](self.first(sample))
        return result


def test_large_parameters_that_some_ranks_do_not_use_get_the_averages() -> None:
    run("processes", RANKS, unused)


def others_memory() -> bool:
    """What the program makes between backward passes takes no block."""
    wrapped = DistributedDataParallel(model())
    step_of(wrapped)
    wrapped.zero_grad()
    engine = wrapped.process_group.communicator.engine
    copies = [each.detach().clone() for each in wrapped.parameters()]
    step_of(wrapped)
    assert large_in_heap(wrapped) == [True, True]
    return any(engine.is_in_heap(each.data_ptr()) for each in copies)


def test_only_what_backward_makes_lies_in_shared_memory() -> None:
    assert run("processes", RANKS, others_memory) == [False] * RANKS


def outlive() -> bool:
    """Gradients are read when wrapper and group are gone, and in a child that is forked."""
    wrapped = DistributedDataParallel(model())
    step_of(wrapped)
    gradients = [each.grad for each in wrapped.parameters()]
    wanted = [each.clone() for each in gradients]
    del wrapped
    dist.destroy_process_group()
    same = all(map(torch.equal, gradients, wanted))
    return same and bool(Child(lambda: all(map(torch.equal, gradients, wanted))).result())


def test_gradients_outlive_wrapper_and_group() -> None:
    assert run("processes", RANKS, outlive) == [True] * RANKS


def ordinary(options: dict[str, Any]) -> list[bool]:
    wrapped = DistributedDataParallel(model(), **options)
    step_of(wrapped)
    assert_averages(wrapped)
    assert wrapped.reducer._bucket_reducer._memory is None or wrapped.reducer._bucket_reducer.needs_flat
    return large_in_heap(wrapped)


def test_threads_have_ordinary_memory() -> None:
    assert run("threads", RANKS, ordinary, {}) == [[False, False]] * RANKS


def test_gradients_that_are_views_of_buckets_need_no_blocks() -> None:
    for found in run("processes", RANKS, ordinary, {"gradient_as_bucket_view": True}):
        assert found == [True, True]  # as the buckets are
