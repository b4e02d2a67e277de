"""The search for the best thresholds for groups of as many ranks as run it: :func:`measure_thresholds`.

Variants take turns, and the best turn of each counts, on the slowest rank: other programs can only make a
turn longer. A threshold keeps its usual value unless another is better by more than the noise between turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import torchestra as dist
from torchestra.engine.kernels.selection import Choices

_TURNS = 5
_SETTINGS = 44  # about how many are timed
_BETTER = 0.95
_KIB, _MIB = 1 << 10, 1 << 20
_NEVER = 1 << 62
_LARGE, _SHARED = 8 * _MIB, 2 * _MIB  # bytes per rank, several chunks
_LARGEST_STREAMED = 32 * _MIB
_SMALLEST_PIECE, _LARGEST_PIECE = 32 * _KIB, 2 * _MIB


def join_and_measure(seconds: float) -> Choices:
    """Run a rank of ``torchestra tune``: join the group and call :func:`measure_thresholds`."""
    torch.set_num_threads(1)
    dist.init_process_group()
    try:
        group = dist.group.WORLD
        assert group is not None
        return measure_thresholds(group.communicator.engine, seconds)
    finally:
        dist.destroy_process_group()


def measure_thresholds(engine: Any, seconds: float) -> Choices:
    """Return the best thresholds for the default group; every rank calls this, and gets the same result.

    Args:
        engine: the engine of that group, which is on one host.
        seconds: about how long to measure.
    """
    timing = _Timing(engine, seconds / _SETTINGS / _TURNS)
    buffer_bytes = engine.context.arena.buffer_bytes
    choices = Choices.for_group(engine.size, buffer_bytes)
    large = torch.zeros(_LARGE // 4)
    sizes = _powers(64 * _KIB, buffer_bytes)
    choices = timing.best("chunk", choices, sizes, partial(dist.all_reduce, large))
    part, whole = torch.zeros(_SHARED // 4), torch.zeros(_SHARED // 4 * engine.size)
    choices = timing.best("share", choices, sizes, partial(dist.all_gather_into_tensor, whole, part))
    choices = replace(choices, direct=_direct(timing, choices, buffer_bytes))
    choices = replace(choices, stream_above=_stream_above(timing, choices))
    return replace(choices, single_copy=_single_copy(timing, choices))


def _direct(timing: _Timing, choices: Choices, buffer_bytes: int) -> int:
    """Return the largest size in bytes at which it is not slower that every rank reads every tensor."""
    tensor, direct = torch.zeros(buffer_bytes // 4), 0
    for size in _powers(4 * _KIB, buffer_bytes):
        variants = [replace(choices, direct=0), replace(choices, direct=size)]
        chunked, at_once = timing.times(variants, partial(dist.all_reduce, tensor[: size // 4]))
        if at_once * _BETTER > chunked:
            break
        direct = size
    return direct


def _stream_above(timing: _Timing, choices: Choices) -> int:
    """Return the size in bytes above which it is faster to write results past the caches."""
    tensor, above = torch.zeros(_LARGEST_STREAMED // 4), choices.stream_above
    for size in reversed(_powers(_MIB, _LARGEST_STREAMED)):
        variants = [replace(choices, stream_above=_NEVER), replace(choices, stream_above=0)]
        cached, streamed = timing.times(variants, partial(dist.broadcast, tensor[: size // 4], 0))
        if streamed > cached * _BETTER:
            break
        above = size // 2
    return above


def _single_copy(timing: _Timing, choices: Choices) -> int:
    """Return the size in bytes above which it is faster to read pieces where they lie.

    The usual size, if that is not faster for the largest, or if ranks may not do it.
    """
    size, above = timing.ranks, choices.single_copy
    source, target = (torch.zeros(_LARGEST_PIECE // 4 * size) for _ in range(2))
    for piece in reversed(_powers(_SMALLEST_PIECE, _LARGEST_PIECE)):
        words = piece // 4 * size
        variants = [replace(choices, single_copy=_NEVER), replace(choices, single_copy=piece - 1)]
        call = partial(dist.all_to_all_single, target[:words], source[:words])
        copied_twice, copied_once = timing.times(variants, call)
        if copied_once > copied_twice * _BETTER:
            break
        above = piece - 1
    return above


def _powers(first: int, last: int) -> list[int]:
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 2
    return sizes


class _Timing:
    """Times calls with different thresholds, each for some turns of a fixed time."""

    def __init__(self, engine: Any, seconds: float) -> None:
        self._engine = engine
        self._seconds = seconds
        self.ranks: int = engine.size

    def best(self, name: str, usual: Choices, values: Sequence[int], call: Callable[[], object]) -> Choices:
        """Return the choices with the best value of one threshold, which may be the usual one."""
        variants = [usual, *(replace(usual, **{name: value}) for value in values)]
        times = self.times(variants, call)
        fastest = min(range(len(variants)), key=times.__getitem__)
        return variants[fastest] if times[fastest] < times[0] * _BETTER else usual

    def times(self, variants: Sequence[Choices], call: Callable[[], object]) -> list[float]:
        """Return the seconds that a call takes with each of the variants."""
        count = max(1, round(self._seconds / max(self._turn(variants[0], call, 2), 1e-7)))
        turns = [[self._turn(variant, call, count) for variant in variants] for _ in range(_TURNS)]
        return [min(taken) for taken in zip(*turns, strict=True)]

    def _turn(self, variant: Choices, call: Callable[[], object], count: int) -> float:
        """Return the mean time of some calls on the slowest rank: the same on every rank, as all use it."""
        dist.barrier()
        self._engine.choices = variant
        call()
        start = time.perf_counter()
        for _ in range(count):
            call()
        slowest = torch.tensor((time.perf_counter() - start) / count, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)
