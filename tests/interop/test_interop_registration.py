"""Test how the backend comes to be known to torch.distributed, and what it is known for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch_worlds import run

import torchestra
from torchestra.interop import autoload
from torchestra.interop.torch_distributed import TorchestraGroup, register

PROJECT = Path(__file__).parents[2]


def in_fresh_interpreter(program: str, *paths: Path) -> None:
    source = Path(torchestra.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, (source, *paths)))}
    subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", program],
        check=True,
        timeout=120,
        env=environment,
    )


def test_torch_loads_the_backend_by_itself_and_cheaply(tmp_path: Path) -> None:
    """By the entry point in pyproject.toml, as pip would install it."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["torch.backends"].items()
    installed = tmp_path / "torchestra_entry-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torchestra-entry\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {value}\n")
    in_fresh_interpreter(
        """
import sys
import torch
from torch import distributed as dist
assert dist.is_backend_available("torchestra")
heavy = ["llvmlite", "torchestra.engine", "torchestra.process_group", "torchestra.interop.torch_distributed"]
assert not [name for name in heavy if name in sys.modules]
dist.init_process_group("torchestra", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1)
dist.all_reduce(tensor, dist.ReduceOp.AVG)
dist.destroy_process_group()
""",
        tmp_path,
    )


def test_a_failure_to_register_never_keeps_torch_from_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(autoload, "register", fail)
    with pytest.warns(RuntimeWarning, match="could not register"):
        autoload.autoload()
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    autoload.autoload()  # a torch without torch.distributed


def test_registering_takes_nothing_from_other_backends() -> None:
    register()
    register()
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"
    assert dist.is_backend_available("torchestra")
    assert dist.Backend("TORCHESTRA") == "torchestra"
    assert "cpu" in dist.Backend.backend_capability["torchestra"]


def use_both() -> None:
    """A group that serves the CPU by Gloo and another device by torchestra, seen from the CPU."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert isinstance(group, TorchestraGroup)
    before = inner_operations(group)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor == 3
    assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor == 6
    found = [None, None]
    dist.all_gather_object(found, rank)
    assert found == [0, 1]
    outputs = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(outputs, tensor)
    assert outputs == [tensor, tensor]
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    assert inner_operations(group) == before
    dist.barrier()  # of all devices: torchestra's
    assert inner_operations(group) == before + 1


def inner_operations(group: TorchestraGroup) -> int:
    return group.inner.get_sequence_number_for_group()


@pytest.mark.parametrize("backend", ["cuda:torchestra,cpu:gloo", "cpu:gloo,cuda:torchestra"])
def test_devices_may_have_different_backends(backend: str) -> None:
    """In any order: torch gives up the group that it has begun where torchestra's comes later."""
    run(2, use_both, backend=backend)


def use_cpu() -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 2
    group = dist.group.WORLD
    assert group._get_backend(torch.device("cpu")) is group
    if not torch.cuda.is_available():
        assert group._device_types == [torch.device("cpu")]
        # Where torch has NCCL, that says what it lacks.
        with pytest.raises((RuntimeError, ValueError), match=r"nccl|NCCL"):
            group._get_backend(torch.device("cuda"))
    inner = group.inner.get_sequence_number_for_group()
    dist.all_reduce(tensor)
    assert group.inner.get_sequence_number_for_group() == inner + 1


def test_cpu_on_torchestra_beside_nccl() -> None:
    run(2, use_cpu, backend="cpu:torchestra,cuda:nccl")
