"""Every collective, on ranks of both kinds, for world sizes and lengths on both sides of every threshold."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, check_case

import torchestra as dist
from devices import gpu
from thresholds import thresholds_in_use, use_thresholds
from worlds import KINDS, run

SIZES = (1, 2, 3, 4, 7)


def many_chunks(case: Case, thorough: bool) -> None:
    """With thresholds of a few bytes: a chunk has 128 elements of every rank's piece, the last one fewer."""
    whole = 128 * dist.get_world_size()
    use_thresholds(direct=128, chunk=4 * whole, stream_above=9000)
    check_case(case, (0, 33, 4 * whole + 75), (torch.float32,), ("mixed",))
    if thorough:
        check_case(case, (0, 1, 32, 33, whole, whole + 1, 4 * whole + 75), (torch.float32,), ("ordinary",))
        check_case(case, (13, 4 * whole + 75), (torch.float32,), ("arena",))
        check_case(case, (77,), (torch.uint8, torch.complex128), ("mixed",))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_every_operation_gives_what_its_formula_says(case: Case, size: int) -> None:
    run("threads", size, many_chunks, case, True)


def every_operation_in_many_chunks() -> None:
    for case in CASES:
        many_chunks(case, thorough=False)


@pytest.mark.parametrize("size", SIZES)
def test_every_operation_gives_the_same_in_processes(size: int) -> None:
    """Threads and processes run the same kernels, so that processes need only show that they do."""
    run("processes", size, every_operation_in_many_chunks)


def around_the_thresholds(case: Case) -> None:
    *edges, _ = thresholds_in_use()  # the last is that of streaming, far above
    check_case(case, [edge // 4 + 1 for edge in edges], (torch.float32,), ("ordinary",))
    check_case(case, [edge // 4 for edge in edges[:1]], (torch.float32,), ("arena",))


def every_operation_around_the_thresholds() -> None:
    for case in CASES:
        around_the_thresholds(case)


@pytest.mark.parametrize(("kind", "size"), [("processes", 2), ("threads", 3)])
def test_lengths_around_the_thresholds_that_are_in_use(kind: str, size: int) -> None:
    run(kind, size, every_operation_around_the_thresholds)


def on_device(case: Case, device: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    check_case(case, (0, 1, 33, 40_000), dtypes, ("ordinary",), device)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_operation_on_a_gpu_gives_the_same(case: Case, size: int, kind: str) -> None:
    run(kind, size, on_device, case, "cuda")
