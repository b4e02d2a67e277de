"""Running a function on every rank of a world of torch.distributed, whose backend is torchestra's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

import torchestra.interop.torch_distributed  # noqa: F401 - registers the backend
import worlds
from torchestra.store import Store

SECONDS = 30.0


def run(
    size: int, fn: Callable[..., Any], *args: Any, backend: str = "torchestra", timeout: float = SECONDS
) -> list[Any]:
    """Call ``fn(*args)`` on every rank, in a default group of torch.distributed; the results, by rank."""
    return worlds.run("processes", size, _in_default_group, backend, timeout, fn, args, init=False)


def outcomes(
    size: int, fn: Callable[..., Any], *args: Any, backend: str = "torchestra", timeout: float = SECONDS
) -> list[worlds.Outcome]:
    """:func:`run`, but how each rank ended instead of the first exception."""
    return worlds.outcomes("processes", size, _in_default_group, backend, timeout, fn, args, init=False)


def _in_default_group(
    _: Store,
    rank: int,
    size: int,
    backend: str,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    store = distributed.FileStore(os.path.join(os.environ["WORLD_DIRECTORY"], "torch"), size)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    result = fn(*args)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return result
