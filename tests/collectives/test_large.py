"""Tensors far larger than any buffer, and more ranks than most people have."""

from __future__ import annotations

import torch
from cases import ONE_OF_EACH, Case, check_case

import torchestra as dist
from worlds import run

_LARGE = 75_000_000  # float32 elements: 300 MB


def sum_a_large_tensor(in_arena: bool) -> bool:
    """One tensor of 300 MB, with values that tell every position from those nearby and from other chunks."""
    rank = dist.get_rank()
    tensor = dist.empty(_LARGE) if in_arena else torch.empty(_LARGE)
    tensor.copy_(torch.arange(_LARGE, dtype=torch.int32).remainder_(65_521))
    if rank:
        tensor.neg_().sub_(1)
    tensor[_LARGE // 3] = 7
    dist.all_reduce(tensor)
    tensor[_LARGE // 3] -= 15
    return bool((tensor == -1).all())


def test_300_megabytes_through_buffers() -> None:
    assert run("processes", 2, sum_a_large_tensor, False, limit=110) == [True, True]


def test_300_megabytes_in_the_arena() -> None:
    assert run("processes", 2, sum_a_large_tensor, True, limit=110) == [True, True]


def move_a_large_tensor() -> bool:
    """Through the pipes of operations that only move."""
    tensor = torch.zeros(40_000_000, dtype=torch.uint8)
    if dist.get_rank() == 1:
        tensor.fill_(3)
        tensor[-1] = 9
    dist.broadcast(tensor, 1)
    return tensor[-1].item() == 9 and int(tensor.sum()) == 3 * 39_999_999 + 9


def test_40_megabytes_to_everybody() -> None:
    assert run("threads", 2, move_a_large_tensor) == [True, True]


def small_cases(cases: tuple[Case, ...], lengths: tuple[int, ...]) -> None:
    for case in cases:
        check_case(case, lengths, (torch.float32,), ("mixed",))


def test_16_processes() -> None:
    run("processes", 16, small_cases, ONE_OF_EACH, (1, 50), limit=110)


def test_64_threads() -> None:
    run("threads", 64, small_cases, ONE_OF_EACH, (3,), limit=110)
