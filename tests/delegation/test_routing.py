"""Test which operations go to the delegation.

Without a GPU, float64 tensors play the part of those of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_in import StandIn

import torchestra as dist
from torchestra.communicator import device_routing, multi_tensor
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device_routing import routed
from torchestra.engine.operations import ALL_GATHER
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp
from worlds import run, store_barrier


def is_of_device(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float64


def on_device(*shape: int, value: float = 0.0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what ``any_device`` makes of a communicator's method, with our device."""
    return routed(method, method, is_of_device)(dist.group.WORLD.communicator, *args, **kwargs)


def route() -> None:
    stand_in, size = StandIn(dist.group.WORLD), dist.get_world_size()
    plain, own = torch.ones(2), on_device(2, value=1.0)
    call(Communicator.all_reduce, plain, ReduceOp.SUM)
    assert stand_in.calls == []
    call(Communicator.all_reduce, own, ReduceOp.SUM)
    assert stand_in.calls == ["allreduce"]
    assert plain.tolist() == own.tolist() == [size] * 2
    call(multi_tensor.all_reduce_coalesced, [own, on_device(1)], ReduceOp.SUM, async_op=True).wait()
    assert stand_in.calls[1:] == ["allreduce_coalesced"]
    # What the device's backend has not is done as ever, on all ranks.
    integers = torch.ones(2, dtype=torch.int16)
    any_tensor = routed(Communicator.all_reduce, Communicator.all_reduce, lambda each: True)
    any_tensor(dist.group.WORLD.communicator, integers, ReduceOp.SUM)
    assert integers.tolist() == [size] * 2
    assert len(stand_in.calls) == 2
    with pytest.raises(InvalidArgumentError, match="a tensor is on meta, but rank"):
        call(Communicator.collective, ALL_GATHER, [torch.empty(2, device="meta")] * size, own)
    dist.barrier()


def route_messages() -> None:
    stand_in, rank = StandIn(dist.group.WORLD), dist.get_rank()
    communicator = dist.group.WORLD.communicator
    communicator.entries.close()  # whose tensors are of the CPU, and these play the part of others
    for tag in (0, 5):
        tensor = on_device(3, value=rank + 1.0)
        if rank == 0:
            communicator.send(tensor, 1, tag)
        else:
            assert communicator.recv(tensor, 0, tag) == 0
            assert tensor.tolist() == [1.0] * 3
        assert stand_in.communicator.queue.sequence_number() == 1, f"tag {tag}: the second is not delegated"
    with pytest.raises(InvalidArgumentError, match="cannot be received from any rank"):
        communicator.recv(on_device(1), None)
    store_barrier()


@pytest.mark.parametrize("body", [route, route_messages])
def test_what_all_ranks_have_in_common_decides(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[], None]
) -> None:
    monkeypatch.setattr(device_routing, "is_on_gpu", is_of_device)
    run("threads", 2, body)
