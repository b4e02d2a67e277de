"""A rank on which the reduction of gradients fails: the others do not wait for it, nor take what is next."""

from __future__ import annotations

import pytest
import torch

import torchestra as dist
from torchestra.errors import GradientReductionError, GroupAbortedError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run, store_barrier


def fail_in_backward() -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    store_barrier()
    loss = model(torch.ones(1, 4)).sum()
    if dist.get_rank() == 0:

        def fail(*_: object) -> None:
            raise MemoryError("no memory for a bucket")

        model.reducer._bucket_reducer.start = fail
        with pytest.raises(MemoryError):
            loss.backward()
        with pytest.raises(GradientReductionError, match="failed on rank 0"):
            model(torch.ones(1, 4))
    else:
        with pytest.raises(
            GroupAbortedError, match="rank 0 left the reduction of gradients with MemoryError"
        ):
            loss.backward()
    with pytest.raises(GroupAbortedError):
        dist.all_reduce(torch.ones(40))


def test_a_bucket_that_cannot_be_sent_aborts_the_group() -> None:
    run("threads", 2, fail_in_backward)
