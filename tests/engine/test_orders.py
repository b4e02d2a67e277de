"""The protocol by which ranks hand each other memory, in every order in which they may come.

Right kernels give right results in all of them. And so that this says something: kernels that are wrong in
one of the ways that matter, made from the right ones, are found out.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

import torchestra as dist
from kernel_order import Deadlock, Kernel, KernelScheduler, rebuilt
from thresholds import use_thresholds
from torchestra.engine import layout as at
from torchestra.engine.kernels import buffers, move, reduce
from torchestra.engine.kernels.waiting import wait_for_step
from torchestra.engine.native.atomics import kernel, load
from worlds import outcomes, run

sys.path.append(str(Path(__file__).parent.parent / "collectives"))

from cases import CASES, Case, Maker, all_gather_into_tensor, all_reduce


def run_rank(
    scheduler: KernelScheduler, names: list[str], kernels: dict[str, Kernel] | None, arenas: bool
) -> None:
    """A program of operations, the same on every rank; each on memory of its own choice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = dist.group.WORLD.communicator.engine
    # A chunk has 128 elements of every rank's piece; the lengths make no chunk, one, a few, and many, and the
    # last of them is cut into pieces of 64.
    whole = 128 * size
    use_thresholds(direct=32, chunk=4 * whole, stream_above=9000)
    lengths = (1, 8, whole - 9, 3 * whole + 70, 5 * whole + whole // 2, 6 * whole + whole // 2)
    dice = random.Random(",".join(names))
    try:
        scheduler.attach(engine, kernels)
        for salt, name in enumerate(names):
            case = next(case for case in CASES if case.__name__ == name)
            in_arena = arenas and (rank + dice.randrange(3)) % 3 > 0
            make = Maker(torch.float32, in_arena, salt)  # other values in each operation
            length = dice.choice(lengths)
            case(make, rank, size, length)
            make.check_guards(f"{name} of {length}")
    finally:
        scheduler.leave(rank)


def program(seed: int, cases: tuple[Case, ...], length: int) -> list[str]:
    dice = random.Random(seed)
    return [dice.choice(cases).__name__ for _ in range(length)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_results_are_right_in_whatever_order_the_ranks_come(seed: int, size: int) -> None:
    scheduler = KernelScheduler(size, seed)
    run("threads", size, run_rank, scheduler, program(seed, CASES, 25), None, seed % 2 == 1)
    assert scheduler.calls > 25 * size  # some kernels had to be called more than once


def fails(size: int, cases: tuple[Case, ...], kernels: dict[str, Kernel], tries: int) -> bool:
    """Return whether a wrong result is seen within so many programs."""
    for seed in range(tries):
        scheduler = KernelScheduler(size, seed)
        ended = outcomes("threads", size, run_rank, scheduler, program(seed, cases, 12), kernels, False)
        errors = [outcome.error for outcome in ended if outcome.error is not None]
        if any(isinstance(error, AssertionError) for error in errors):
            return True
        assert all(isinstance(error, Deadlock) for error in errors), errors
    return False


SLOTS, SLOT_BYTES, CHUNK_BUFFERS, CHUNK_BUFFER_BYTES = (
    at.SLOTS,
    at.SLOT_BYTES,
    at.CHUNK_BUFFERS,
    at.CHUNK_BUFFER_BYTES,
)


@kernel
def one_slot(context, rank, chunk):
    """buffers.buffer_of with one slot instead of two: the first chunk is written where others still read."""
    if chunk == 0:
        return load(context + SLOTS) + rank * 2 * load(context + SLOT_BYTES)
    return buffers.buffer_of(context, rank, chunk)


@kernel
def one_pipe(context, rank, chunk):
    """buffers.buffer_of with one pipe instead of several: a chunk is written where others still read."""
    if chunk == 0:
        return buffers.buffer_of(context, rank, chunk)
    return load(context + CHUNK_BUFFERS) + rank * 3 * load(context + CHUNK_BUFFER_BYTES)


@kernel
def two_pipes(context, rank, chunk):
    """buffers.buffer_of with two pipes instead of three: the pieces of the last chunk begin elsewhere."""
    if chunk == 0:
        return buffers.buffer_of(context, rank, chunk)
    return load(context + CHUNK_BUFFERS) + (rank * 3 + chunk % 2) * load(context + CHUNK_BUFFER_BYTES)


@kernel
def wait_too_short(context, step):
    """waiting.wait_for_step as if every rank published a step before it has done it."""
    return wait_for_step(context, step - 1)


@kernel
def one_first_piece(context, rank, longest):
    """buffers.first_piece with one slot."""
    return one_slot(context, rank, 0)


WRONG = {
    "one_slot": {"buffer_of": one_slot, "first_piece": one_first_piece},
    "one_pipe": {"buffer_of": one_pipe},
    "two_pipes": {"buffer_of": two_pipes},
    "wait_too_short": {"wait_for_step": wait_too_short},
}


@pytest.mark.parametrize("wrong", ["two_pipes", "wait_too_short"])
def test_wrong_kernels_that_reduce_are_found_out(wrong: str) -> None:
    kernel = rebuilt(reduce, "all_reduce", **WRONG[wrong])
    assert fails(3, (all_reduce,), {"all_reduce": kernel}, tries=20)


@pytest.mark.parametrize("wrong", ["one_slot", "one_pipe", "wait_too_short"])
def test_wrong_kernels_that_move_are_found_out(wrong: str) -> None:
    kernel = rebuilt(move, "all_gather", **WRONG[wrong])
    assert fails(3, (all_gather_into_tensor,), {"all_gather": kernel}, tries=20)


def test_rebuilt_kernels_are_right_when_nothing_is_wrong() -> None:
    """It is not the rebuilding that is found out."""
    kernel = rebuilt(move, "all_gather")
    assert not fails(3, (all_gather_into_tensor,), {"all_gather": kernel}, tries=20)
