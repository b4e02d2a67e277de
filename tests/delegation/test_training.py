"""DistributedDataParallel on a group whose operations are delegated."""

from __future__ import annotations

import pytest
import torch
from stand_in import delegating
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run, store_barrier


def train() -> list[float]:
    """Bit-identical on all ranks, and the gradients of all samples together."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    reference = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    samples = torch.randn(dist.get_world_size(), 8, 4, generator=generator)
    with delegating() as stand_in:
        wrapped = DistributedDataParallel(model)  # with the parameters of rank 0
        reference.load_state_dict(model.state_dict())
        wrapped(samples[dist.get_rank()]).square().mean().backward()
        reference(samples.flatten(0, 1)).square().mean().backward()
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(found.grad, expected.grad, atol=1e-6)
        store_barrier()  # Gloo's operations may end late on a rank, after the others have left the group
        assert {"broadcast"} <= set(stand_in.calls)
        assert {"allreduce", "allreduce_coalesced"} & set(stand_in.calls)
        return torch.cat([each.grad.flatten() for each in model.parameters()]).tolist()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_gradients_are_those_of_one_process(kind: str) -> None:
    first, second = run(kind, 2, train)
    assert first == second
