"""Running a function on every rank of a world of torch.distributed, whose backend is torchestra's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

import torchestra.interop.torch_distributed  # noqa: F401 - registers the backend
import worlds
from torchestra.interop import autoload
from torchestra.store import Store

SECONDS = 30.0


class Options(NamedTuple):
    """Say how the default group is made."""

    backend: str | None
    timeout: float
    switched: bool
    hosts: int


def run(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = "torchestra",
    timeout: float = SECONDS,
    switched: bool = False,
    hosts: int = 1,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank, in a default group of torch.distributed; the results, by rank.

    Args:
        switched: whether torchestra serves "gloo".
        hosts: how many hosts the ranks pretend to be on, by turns of equal length.
    """
    options = Options(backend, timeout, switched, hosts)
    return worlds.run("processes", size, _in_default_group, options, fn, args, init=False)


def outcomes(
    size: int, fn: Callable[..., Any], *args: Any, backend: str = "torchestra", timeout: float = SECONDS
) -> list[worlds.Outcome]:
    """:func:`run`, but how each rank ended instead of the first exception."""
    options = Options(backend, timeout, switched=False, hosts=1)
    return worlds.outcomes("processes", size, _in_default_group, options, fn, args, init=False)


def pretend_hosts(rank: int, size: int, hosts: int) -> None:
    """Have the ranks of a world be on several hosts, as far as torchestra can tell."""
    if hosts > 1:
        os.environ["TORCHESTRA_HOST_ID"] = f"host{rank * hosts // size}"
        os.environ["TORCHESTRA_SECRET"] = "of these tests"


def _in_default_group(
    _: Store,
    rank: int,
    size: int,
    options: Options,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    pretend_hosts(rank, size, options.hosts)
    if options.switched:
        autoload.turn_on_switch()
    store = distributed.FileStore(os.path.join(os.environ["WORLD_DIRECTORY"], "torch"), size)
    distributed.init_process_group(
        options.backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=options.timeout)
    )
    result = fn(*args)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return result
