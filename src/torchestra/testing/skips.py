"""Reasons to skip a distributed test: as decorators, and as exit codes with which a rank reports them.

A rank that is a process cannot raise ``SkipTest`` in the process that runs the test; it exits with one of
:data:`TEST_SKIPS`' codes, and the test is skipped with the reason that belongs to it. The codes and names are
those of PyTorch's own test helpers, so that tests written for those mean the same here.
"""

from __future__ import annotations

import functools
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_SMALL_WORLD = 8


class TestSkip(NamedTuple):
    """An exit code, and the reason that it stands for."""

    exit_code: int
    message: str


TEST_SKIPS: dict[str, TestSkip] = {
    "backend_unavailable": TestSkip(72, "Skipped because distributed backend is not available."),
    "small_worldsize": TestSkip(73, "Skipped due to small world size."),
    "no_cuda": TestSkip(74, "CUDA is not available."),
    "multi-gpu-1": TestSkip(75, "Need at least 1 CUDA device"),
    "nccl": TestSkip(76, "c10d not compiled with NCCL support"),
    "multi-gpu-2": TestSkip(77, "Need at least 2 CUDA devices"),
    "no_peer_access": TestSkip(79, "Test skipped because no GPU peer access"),
    **{
        f"multi-gpu-{number}": TestSkip(77 + number, f"Need at least {number} CUDA devices")
        for number in range(3, 9)
    },
    "generic": TestSkip(86, "Test skipped on a rank; its log tells the reason"),
    "odd_worldsize": TestSkip(87, "Skipped due to odd world size."),
    "importerror": TestSkip(88, "Test skipped due to missing import"),
    "no_accelerator": TestSkip(89, "accelerator is not available."),
}
"""The reasons to skip a test, by name: the exit code of a rank, and the message of the skipped test."""


def skip_reason(exit_code: object) -> str | None:
    """Return the reason that an exit code stands for, or None if it stands for none."""
    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == exit_code), None)


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = False) -> Callable[[F], F]:
    """Skip the test where there are fewer than ``x`` GPUs.

    Args:
        x: how many GPUs it needs.
        allow_cpu: whether to run it on a host without any GPU.
    """
    return only_if(lambda: _gpus() >= x or (allow_cpu and _gpus() == 0), f"multi-gpu-{x}")


def skip_if_no_gpu(function: F) -> F:
    """Skip the test unless every rank has its own GPU (by the environment's WORLD_SIZE)."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _gpus() == 0:
            sys.exit(TEST_SKIPS["no_cuda"].exit_code)
        world_size = _environment_size()
        if _gpus() < world_size:
            sys.exit(TEST_SKIPS[f"multi-gpu-{world_size}"].exit_code)
        return function(*args, **kwargs)

    return cast("F", wrapper)


def skip_if_small_worldsize(function: F) -> F:
    """Skip the test in a world (by the environment's WORLD_SIZE) of fewer than 8 ranks."""
    return only_if(lambda: _environment_size() >= _SMALL_WORLD, "small_worldsize")(function)


def skip_if_odd_worldsize(function: F) -> F:
    """Skip the test in a world (by the environment's WORLD_SIZE) of an odd number of ranks."""
    return only_if(lambda: _environment_size() % 2 == 0, "odd_worldsize")(function)


def requires_world_size(n: int) -> Callable[[F], F]:
    """Run the test on ``n`` ranks instead of the case's ``world_size``; skip it if there are fewer GPUs."""

    def decorate(function: F) -> F:
        setattr(function, "_required_world_size", n)  # noqa: B010
        reason = f"requires {n} GPUs, found {_gpus()}"
        return unittest.skipUnless(_gpus() >= n, reason)(function)

    return decorate


def requires_gloo() -> Callable[[F], F]:
    """Run a test written for Gloo on torchestra's own engine."""
    return only_if(lambda: True, "backend_unavailable")


def requires_nccl() -> Callable[[F], F]:
    """Skip the test: there is no NCCL here."""
    return unittest.skip("c10d was not compiled with the NCCL backend")


def requires_ucc() -> Callable[[F], F]:
    """Skip the test: there is no UCC here."""
    return unittest.skip("c10d was not compiled with the UCC backend")


def requires_mpi() -> Callable[[F], F]:
    """Skip the test: there is no MPI backend here."""
    return unittest.skip("c10d was not compiled with the MPI backend")


def _environment_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def only_if(condition: Callable[[], bool], otherwise: str) -> Callable[[F], F]:
    """Run a test where the condition holds; else end its rank with the exit code of a TEST_SKIPS entry."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not condition():
                sys.exit(TEST_SKIPS[otherwise].exit_code)
            return function(*args, **kwargs)

        return cast("F", wrapper)

    return decorate
