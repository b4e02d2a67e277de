"""The environment of a test of PyTorch's: stores, directories, time limits, example tensors."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from torchestra import ProcessGroup, TCPStore, barrier
from torchestra.compat.debug_level import set_debug_level_from_env
from torchestra.types import Timeout

__all__ = [
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "captured_output",
    "cleanup_temp_dir",
    "create_device",
    "create_tcp_store",
    "get_timeout",
    "init_multigpu_helper",
    "initialize_temp_directories",
    "run_subtests",
    "simple_sparse_reduce_tests",
    "verify_ddp_error_logged",
    "with_dist_debug_levels",
    "with_nccl_blocking_wait",
]

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT_DEFAULT = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "300"))
"""Seconds that a test may take."""

TIMEOUT_OVERRIDE: dict[str, int] = {}
"""The same for tests with another limit, by the last part of their name."""

_directory: tempfile.TemporaryDirectory[str] | None = None


def get_timeout(test_id: str) -> int:
    """Return the seconds that the test with a full name may take."""
    return TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], TIMEOUT_DEFAULT)


def create_device(interface: str | None = None, lazy_init: bool = False) -> Any:
    """Make a device for a group's ``_devices``, where it has no effect."""
    return ProcessGroup.create_device(interface=interface or "", lazy_init=lazy_init)


def create_tcp_store(
    addr: str = "localhost",
    world_size: int = 1,
    is_master: bool = True,
    timeout: Timeout = timedelta(minutes=5),
    wait_for_workers: bool = True,
    jit_class: bool = False,
    use_libuv: bool = True,
) -> TCPStore:
    """Make a TCPStore on a free port for ``world_size`` clients. (``jit_class``, ``use_libuv``: torch's.)"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return TCPStore(addr, port, world_size, is_master, timeout, wait_for_workers)


def initialize_temp_directories(init_method: str | None = None) -> None:
    """Make a directory for the ranks, set TEMP_DIR to it and, by default, INIT_METHOD to a file in it.

    Call this before the ranks are started; :func:`cleanup_temp_dir` removes the directory.
    """
    global _directory
    _directory = tempfile.TemporaryDirectory(prefix="torchestra-test-")
    root = Path(_directory.name)
    for name in ("barrier", "test_dir", "init_dir"):
        (root / name).mkdir()
    os.environ["TEMP_DIR"] = _directory.name
    os.environ["INIT_METHOD"] = init_method or f"file://{root}/init_dir/shared_init_file"


def cleanup_temp_dir() -> None:
    """Remove the directory that :func:`initialize_temp_directories` made."""
    if _directory is not None:
        _directory.cleanup()


@contextlib.contextmanager
def captured_output() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Collect what the block writes to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def init_multigpu_helper(world_size: int, backend: str) -> dict[int, list[int]]:
    """Return the GPUs of each rank: one each; none if there are too few."""
    gpus = range(torch.cuda.device_count())
    each = len(gpus) // world_size if world_size > len(gpus) else 1
    return {rank: list(gpus[rank * each : (rank + 1) * each]) for rank in range(world_size)}


def run_subtests(
    cls_inst: Any,
    subtest_config: Mapping[str, Sequence[Any]],
    test_fn: Callable[..., object],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Run a function with each combination of arguments, each as a subtest followed by a barrier."""
    for values in itertools.product(*subtest_config.values()):
        chosen = dict(zip(subtest_config, values, strict=True))
        with cls_inst.subTest(**chosen):
            test_fn(*test_args, **test_kwargs, **chosen)
        barrier()


def _sparse_example(rank: int, world_size: int, sparse_dims: int, dense_dims: int) -> torch.Tensor:
    """Return ones at the first ``rank + 1`` indices of dimension 0, index 0 of other sparse ones."""
    indices = torch.zeros(sparse_dims, rank + 1, dtype=torch.int64)
    indices[0] = torch.arange(rank + 1)
    shape = [world_size] * sparse_dims + [2] * dense_dims
    return torch.sparse_coo_tensor(indices, torch.ones(rank + 1, *[2] * dense_dims), shape)


def simple_sparse_reduce_tests(
    rank: int, world_size: int, num_inputs: int = 1
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return a rank's sparse inputs and their sums: of 1 to 3 sparse, 0 to 3 dense dimensions."""
    total = num_inputs * world_size
    cases = []
    for sparse_dims, dense_dims in ((1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3)):
        parts = [_sparse_example(number, total, sparse_dims, dense_dims) for number in range(total)]
        mine = parts[num_inputs * rank : num_inputs * (rank + 1)]
        cases.append((mine, [reduce(add, parts) for _ in range(num_inputs)]))
    return cases


def verify_ddp_error_logged(model_DDP: Any, err_substr: str) -> None:
    """Fail unless a DistributedDataParallel's logging data has an error with this text.

    Raises:
        AssertionError: it has none, or another.
    """
    data = model_DDP._get_ddp_logging_data()
    for key in ("iteration", "has_error", "error"):
        if key not in data:
            raise AssertionError(f"Expected {key!r} in ddp_logging_data, which has {sorted(data)}")
    expected = err_substr.partition("\nException raised from ")[0]
    if expected not in data["error"]:
        raise AssertionError(f"Did not find expected {expected} in ddp logging data error: {data['error']}")


def with_dist_debug_levels(levels: Sequence[str]) -> Callable[[F], F]:
    """Run a test at each of some debug levels (TORCH_DISTRIBUTED_DEBUG), with a barrier after each."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            for level in levels:
                with _environment("TORCH_DISTRIBUTED_DEBUG", level):
                    set_debug_level_from_env()
                    result = function(*args, **kwargs)
                    barrier()
            set_debug_level_from_env()
            return result

        return cast("F", wrapper)

    return decorate


def with_nccl_blocking_wait(function: F) -> F:
    """Run a test with TORCH_NCCL_BLOCKING_WAIT set, which has no effect here."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return function(*args, **kwargs)

    return cast("F", wrapper)


@contextlib.contextmanager
def _environment(variable: str, value: str) -> Iterator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
