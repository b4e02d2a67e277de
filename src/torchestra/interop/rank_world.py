"""The default group of a test's or a notebook's ranks: torchestra's, or torch.distributed's on its engine."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torchestra
from torchestra.interop.world_names import TORCH, TORCH_WORLDS
from torchestra.store import FileStore
from torchestra.world.init import default_group, destroy_process_group, init_process_group, is_initialized


def load_world(world: str) -> None:
    """Import the modules that ranks of a world need, so that processes forked from this one have them."""
    for name in torchestra.__all__:
        getattr(torchestra, name)
    if world in TORCH_WORLDS:
        importlib.import_module("torchestra.interop.torch_distributed.worlds")
        importlib.import_module("torchestra.interop.torch_distributed.group")
        # DistributedDataParallel, FSDP and functional collectives import this on first use.
        importlib.import_module("torch._dynamo")


def prepare_process(world: str) -> None:
    """Prepare a process for ranks of a world, before any of them joins it."""
    if world in TORCH_WORLDS:
        from torchestra.interop.torch_distributed import worlds

        worlds.serve_gloo(by_us=world == TORCH)


def join_as_process(world: str, rank: int, size: int, timeout_s: float, directory: str) -> None:
    """Join the default group on a rank that is a process.

    Args:
        timeout_s: how long operations may wait, in seconds.
        directory: where the ranks meet, a new one for each world.
    """
    path = os.path.join(directory, "store")
    if world in TORCH_WORLDS:
        from torchestra.interop.torch_distributed import worlds

        worlds.join_world(rank, size, timeout_s, path)
        return
    init_process_group(store=FileStore(path, size), rank=rank, world_size=size, timeout=timeout_s)


@contextlib.contextmanager
def thread_worlds(world: str) -> Iterator[Any]:
    """Prepare this process for ranks that are threads; yield the ``store`` for :func:`join_as_thread`."""
    if world in TORCH_WORLDS:
        from torchestra.interop.torch_distributed import worlds

        with worlds.worlds_of_threads():
            yield worlds.shared_store()
    else:
        yield None


def join_as_thread(world: str, rank: int, size: int, timeout_s: float, store: Any) -> None:
    """Join the default group on a rank that is a thread."""
    if world in TORCH_WORLDS:
        from torchestra.interop.torch_distributed import worlds

        worlds.join_world(rank, size, timeout_s, store)
        return
    init_process_group(timeout=timeout_s)


def leave(world: str) -> None:
    """Destroy the groups that the rank still has."""
    if world in TORCH_WORLDS:
        from torchestra.interop.torch_distributed import worlds

        worlds.leave_world()
    if is_initialized():
        destroy_process_group()


def sequence_number(world: str) -> int | None:
    """Return how many operations of the default group this rank has called; None without a group."""
    if world in TORCH_WORLDS:
        from torchestra.interop.torch_distributed import worlds

        return worlds.sequence_number()
    return default_group().get_sequence_number_for_group() if is_initialized() else None
