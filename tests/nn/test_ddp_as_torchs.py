"""Code that was written for torch's DistributedDataParallel takes ours for one, and finds what it calls."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run


def pass_as_torchs() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = DistributedDataParallel(module)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert not isinstance(module, torch.nn.parallel.DistributedDataParallel)
    assert get_model_state_dict(model).keys() == module.state_dict().keys()  # without "module."

    assert model.will_sync_module_buffers()
    with model.no_sync():
        assert not model.will_sync_module_buffers()
        model.require_forward_param_sync = True
        assert model.will_sync_module_buffers()
    without = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert without.require_forward_param_sync
    assert not without.will_sync_module_buffers()


def call_the_reducer_by_torchs_names() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=False)
    reducer = model.reducer
    model(torch.ones(3, 2)).sum().backward()
    reducer._check_reducer_finalized()
    assert reducer._rebuild_buckets()
    assert not reducer._rebuild_buckets()
    assert reducer._ddp_graph_static()
    assert len(reducer._get_local_used_map()) == 2
    done: torch.futures.Future[int] = torch.futures.Future()
    done.set_result(1)
    reducer._install_post_backward_futures([done])
    model(torch.ones(3, 2)).sum().backward()
    reducer._reset_state()
    reducer._update_process_group(dist.new_group())
    model.zero_grad()
    model(torch.full((3, 2), dist.get_rank() + 1.0)).sum().backward()
    assert model.module.weight.grad is not None
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 4.5))
    reducer._remove_autograd_hooks()
    model.zero_grad()
    model(torch.full((3, 2), dist.get_rank() + 1.0)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 3.0 * (dist.get_rank() + 1)))


def test_it_is_an_instance_of_torchs() -> None:
    run("threads", 2, pass_as_torchs)


def test_the_reducer_has_torchs_names() -> None:
    run("threads", 2, call_the_reducer_by_torchs_names)
