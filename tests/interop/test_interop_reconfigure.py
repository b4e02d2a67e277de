"""A group of torch.distributed is made without peers and reconfigured, as torch's functions do since 2.14.

Where torch has these functions they are called. Torch 2.13 has none: there the options of the backend ask for
such a group, and its methods are called directly.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

import torchestra
import torchestra.interop.torch_distributed
from torchestra.interop import autoload
from torchestra.store import Store
from worlds import run

TORCH_HAS_IT = hasattr(distributed, "_reconfigure")


def init(backend: str, rank: int, size: int) -> None:
    asks: Any = {"pg_options": SimpleNamespace(enable_reconfigure=True)}
    if TORCH_HAS_IT:
        asks = {"enable_reconfigure": True}
    store = distributed.HashStore()
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, **asks)


def handle() -> str:
    if TORCH_HAS_IT:
        assert distributed._supports_reconfigure()
        return distributed._get_reconfigure_handle()
    group: Any = distributed.group.WORLD
    return str(group.get_reconfigure_handle())


def reconfigured(uuid: int, handles: list[str]) -> Any:
    limit, hints = timedelta(seconds=20), {"k": "v"}
    if TORCH_HAS_IT:
        return distributed._reconfigure(uuid, handles, timeout=limit, hints=hints)
    group: Any = distributed.group.WORLD
    return group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=limit, hints=hints))


def total() -> float:
    tensor = torch.full((2,), 1.0 + distributed.get_rank())
    distributed.all_reduce(tensor)
    return float(tensor[0])


def reconfigure(store: Store, rank: int, size: int, backend: str) -> list[Any]:
    if backend == "gloo":
        autoload.turn_on_switch()
    init(backend, rank, size)
    group: Any = distributed.group.WORLD
    assert isinstance(group, torchestra.interop.torch_distributed.TorchestraGroup)
    assert group.supports_reconfigure
    with pytest.raises(RuntimeError, match="has no peers"):
        total()
    store.set(f"handle/{rank}", handle())
    store.wait([f"handle/{each}" for each in range(3)])
    handles = [store.get(f"handle/{each}").decode() for each in range(3)]
    assert reconfigured(1, handles[::-1]).wait()
    seen: list[Any] = [(distributed.get_rank(), distributed.get_world_size(), total())]
    with pytest.raises(RuntimeError, match="already used"):
        reconfigured(1, handles)
    distributed.barrier()
    if rank != 1:
        if hasattr(distributed, "shrink_group"):
            distributed.shrink_group([1])  # a group that was shrunk can be reconfigured in its turn
            assert distributed.get_world_size() == 2
            assert total() == 3.0
        reconfigured(2, [handles[0], handles[2]])
        seen.append((distributed.get_rank(), distributed.get_world_size(), total()))
    distributed.destroy_process_group()
    return seen


@pytest.mark.parametrize("backend", ["torchestra", "gloo"])
def test_a_group_of_torch_is_reconfigured(backend: str) -> None:
    assert run("processes", 3, reconfigure, backend, init=False) == [
        [(2, 3, 6.0), (0, 2, 3.0)],
        [(1, 3, 6.0)],
        [(0, 3, 6.0), (1, 2, 3.0)],
    ]
