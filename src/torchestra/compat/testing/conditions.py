"""More reasons to skip a test than :mod:`torchestra.testing` has, all of them about NCCL and platforms."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from torchestra.testing.skips import only_if

__all__ = [
    "DistTestCases",
    "at_least_x_gpu",
    "import_transformers_or_skip",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "requires_nccl_version",
    "skip_if_rocm_multiprocess",
    "skip_if_win32",
]

F = TypeVar("F", bound=Callable[..., Any])


class DistTestCases:
    """For each capability, the backends that a test may require it of."""

    skip_collective: ClassVar[dict[str, set[str]]] = {
        "allgather_coalesced": {"nccl", "mpi", "ucc"},
        "reduce": set(),
        "sendrecv anysource": {"nccl", "ucc"},
        "cpu barrier": {"nccl", "ucc"},
    }
    backend_feature: ClassVar[dict[str, set[str]]] = {
        "gpu": {"nccl", "gloo", "ucc"},
        "cuda": {"nccl", "gloo", "ucc"},
        "ddp": {"nccl", "gloo", "ucc"},
        "subgroup": {"nccl", "gloo", "ucc"},
        "plugin": set(),
    }


def at_least_x_gpu(x: int) -> bool:
    """Return whether there are at least ``x`` GPUs."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= x


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Callable[[F], F]:
    """Skip the test if it is for NCCL and there are fewer than ``n`` GPUs."""
    return only_if(lambda: backend != "nccl" or at_least_x_gpu(n), f"multi-gpu-{n}")


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Callable[[F], F]:
    """Call :func:`require_n_gpus_for_nccl_backend` with its arguments swapped."""
    return require_n_gpus_for_nccl_backend(x, backend)


def import_transformers_or_skip() -> Callable[[F], F]:
    """Skip the test where the package ``transformers`` is not installed."""
    return only_if(lambda: importlib.util.find_spec("transformers") is not None, "importerror")


def requires_nccl_version(version: Any, msg: str) -> Callable[[F], F]:
    """Skip a test that needs a version of NCCL if there is a GPU: torchestra has no NCCL."""
    if not torch.cuda.is_available():
        return lambda function: function
    return unittest.skip(f"Requires NCCL version greater than or equal to: {version}: {msg}")


def skip_if_rocm_multiprocess(function: F) -> F:
    """Skip the test on ROCm."""
    return unittest.skipIf(torch.version.hip is not None, "Test skipped for ROCm")(function)


def skip_if_win32() -> Callable[[F], F]:
    """Skip the test on Windows."""
    return unittest.skipIf(
        sys.platform == "win32", "This unit test case is not supported on Windows platform"
    )
