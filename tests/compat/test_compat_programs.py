"""Programs that say ``torch.distributed`` run as they are, by ``python -m torchestra.compat``."""

from __future__ import annotations

import ast
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import torchestra
import torchestra.compat as dist
from torchestra.compat import futures
from torchestra.compat.renaming import rename
from torchestra.nn import SyncBatchNorm
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.optim import ZeroRedundancyOptimizer
from torchestra.rpc import profiling
from warm_programs import NestedWarm, run_warm

TRAIN = r'''
"""As people write them for torchrun."""
from __future__ import annotations

import argparse
import os

import torch
import torch.distributed
import torch.distributed as dist
import torch.nn as nn
from torch import distributed, optim
from torch.distributed import ReduceOp, get_rank
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sharing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), bucket_cap_mb=1)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    digest = torch.cat([p.detach().flatten() for p in model.parameters()]).sum()
    most, least = digest.clone(), digest.clone()
    torch.distributed.all_reduce(most, op=ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    assert most == least, "the ranks have different parameters"
    seen = [rank, size, len(sampler), args.epochs, sharing.total(rank + 1), type(model).__module__]
    print(f"seen {seen}\n", end="", flush=True)
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        print(f"refused {error}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

SHARING = """
import torch

def total(number):
    tensor = torch.tensor(number)
    torch.distributed.all_reduce(tensor)
    return tensor.item()
"""

SPAWN = r"""
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, size, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    tensor = torch.tensor(rank + 1)
    dist.all_reduce(tensor)
    assert tensor == 3
    main = sys.modules["__main__"].__name__
    print(f"spawned {rank} {dist.__name__} {main}\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
"""


SHARDED = r"""
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.remote_device import _remote_device
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
model(torch.ones(2, 8)).sum().backward()
assert isinstance(model.weight.grad, DTensor)
assert model.weight.grad.full_tensor().eq(2).all()
state = {"model": model.state_dict()}
dcp.save(state, checkpoint_id=sys.argv[1])
rows = dist.tensor.distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
assert rows.full_tensor().sum() == 28
stage = PipelineStage(torch.nn.Identity(), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2)
out = schedule.step(*([torch.ones(4, 3)] if rank == 0 else []))
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"sharded {rank} {dist.__name__} {tensor.item()} {default_pg_timeout}\n", end="", flush=True)
dist.destroy_process_group()
"""


def run(*command: str, cwd: Path) -> str:
    done = run_warm(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(torchestra.__file__).parents[1])},
        timeout=250,
        text=True,
        capture_output=True,
        kind=NestedWarm,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("launcher", ["torchestra", "torchrun"])
def test_a_training_program_runs_as_it_is(launcher: str, tmp_path: Path) -> None:
    """In every spelling of imports, in modules of its own too; what there is not is an ImportError."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "sharing.py").write_text(SHARING)
    if launcher == "torchestra":
        start = ["-m", "torchestra", "run", "--nproc", "2", "-m", "torchestra.compat"]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        start = [*torchrun, "-m", "torchestra.compat"]
    out = run(*start, "train.py", "--epochs", "2", cwd=tmp_path)
    for rank in (0, 1):
        assert f"seen [{rank}, 2, 32, 2, 3, 'torchestra.nn.parallel.distributed']" in out
    refused = "cannot import name '_symmetric_memory' from 'torch.distributed'"
    assert out.count(f"refused {refused}: torchestra has no counterpart of it") == 2


def test_torchs_own_code_runs_on_groups_of_torchestra(tmp_path: Path) -> None:
    """FSDP2, DTensor, a checkpoint and a pipeline, beside torchestra's own functions."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    start = ["-m", "torchestra", "run", "--nproc", "2", "-m", "torchestra.compat"]
    out = run(*start, "sharded.py", str(tmp_path / "saved"), cwd=tmp_path)
    for rank in (0, 1):
        assert f"sharded {rank} torchestra.compat 2.0 " in out
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2


def test_processes_that_a_program_spawns_run_renamed(tmp_path: Path) -> None:
    """A module in a package, whose processes import its main module anew."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "spawning.py").write_text(SPAWN)
    out = run("-m", "torchestra.compat", "-m", "own.spawning", f"file://{tmp_path}/met", cwd=tmp_path)
    assert sorted(out.splitlines()) == [f"spawned {rank} torchestra.compat __mp_main__" for rank in (0, 1)]


def renamed(program: str) -> dict[str, object]:
    """Return what a program has defined after the rename."""
    namespace: dict[str, object] = {"__name__": "program"}
    exec(compile(rename(ast.parse(textwrap.dedent(program))), "program", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(
    "program",
    [
        "import torch.distributed as found",
        "import torch.distributed; found = torch.distributed",
        "import torch; found = torch.distributed",
        "import torch as t; found = t.distributed",
        "from torch import nn, distributed as found",
        "'its text'\nfrom __future__ import annotations\nimport torch\nfound = (lambda: torch.distributed)()",
    ],
)
def test_every_spelling_is_torchestras(program: str) -> None:
    assert renamed(program)["found"] is dist


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from torch.distributed import *\nfound = all_reduce", dist.all_reduce),
        ("from torch.nn.parallel import DistributedDataParallel as found", DistributedDataParallel),
        ("from torch import nn\nfound = nn.parallel.DistributedDataParallel", DistributedDataParallel),
        ("import torch\nfound = torch.nn.SyncBatchNorm", SyncBatchNorm),
        ("import torch.distributed as d\nfound = d.optim.ZeroRedundancyOptimizer", ZeroRedundancyOptimizer),
        ("from torch._C._distributed_c10d import Store as found", dist.Store),
        ("import torch\nfound = torch.futures.wait_all", futures.wait_all),
        ("from torch.futures import collect_all as found", futures.collect_all),
        ("from torch.autograd.profiler_legacy import profile as found", profiling.profile),
        ("from torch.futures import Future as found", torch.futures.Future),
    ],
)
def test_what_lies_beside_it_is_torchestras(program: str, expected: object) -> None:
    assert renamed(program)["found"] is expected


def test_all_else_stays_torchs() -> None:
    found = renamed("""
        import torch.nn.functional
        from torch.nn.parallel import DataParallel, DistributedDataParallel
        from torch.distributions import Normal
        from torch.distributed.elastic.multiprocessing.errors import record
        sampler, linear = torch.utils.data.RandomSampler, torch.nn.Linear
    """)
    assert found["DataParallel"] is torch.nn.DataParallel
    assert found["Normal"] is torch.distributions.Normal
    assert (found["sampler"], found["linear"]) == (torch.utils.data.RandomSampler, torch.nn.Linear)
    assert getattr(found["record"], "__module__", "").startswith("torch.")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import torch.distributed._local_tensor", "No module named 'torch.distributed._local_tensor'"),
        ("import torch.distributed._symmetric_memory as s", "No module named 'torch.distributed._symm"),
        (
            "from torch.distributed import nonsense, ReduceOp",
            "cannot import name 'nonsense' from 'torch.dist",
        ),
        ("from torch.distributed._symmetric_memory import *", "No module named 'torch.distributed._symm"),
    ],
)
def test_what_there_is_not_is_refused_where_it_is_imported(program: str, message: str) -> None:
    told = f"{message}.*: torchestra has no counterpart of it.*; TORCHESTRA_FOR=gloo runs"
    with pytest.raises(ImportError, match=told):
        renamed(program)
    renamed("try:\n    import torch.distributed._local_tensor\nexcept ImportError:\n    pass")


def test_errors_name_the_programs_own_lines() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        renamed("import torch\nfrom torch import distributed, nn\n\ntorch.distributed.x = 1 / 0")
    assert caught.traceback[-1].lineno == 3  # counted from 0


def test_an_attribute_that_there_is_not_is_told() -> None:
    assert not hasattr(dist, "nonsense")
    with pytest.raises(AttributeError, match=r"torch\.distributed\.fsdp has no counterpart in torchestra"):
        dist.fsdp  # noqa: B018
