"""The example of a divided, compiled network runs, and its comparison with the undivided one can fail."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchestra as dist
from warm_programs import run_warm
from worlds import kind_that_compiles, run

SCRIPT = Path(__file__).parents[2] / "examples" / "compiled_tensor_parallel.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("compiled_tensor_parallel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for what the module's functions refer to
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def trained(example: ModuleType, backend: str) -> tuple[float, float, float]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    chosen = argparse.Namespace(width=8, hidden=24, blocks=2, rows=12, steps=4, lr=0.5, backend=backend)
    result = example.train(chosen, mesh)
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize(("size", "backend"), [(2, "aot_eager"), (3, "none")])
def test_the_divided_network_learns_what_the_undivided_does(
    example: ModuleType, size: int, backend: str
) -> None:
    if backend != "none" and kind_that_compiles() != "threads":
        pytest.skip("this torch does not compile in two threads at once")
    torch.compiler.reset()
    for first, last, differs in run("threads", size, trained, example, backend):
        assert last < first
        assert differs < 1e-5


def noticed(example: ModuleType) -> float:
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.nn.Sequential(example.Block(4, 8))
    for parameter in whole.parameters():
        torch.nn.init.ones_(parameter)
    divided = torch.nn.Sequential(example.DividedBlock(whole[0], mesh))
    assert example.difference(whole, divided, mesh) == 0.0
    if dist.get_rank() == 1:
        divided[0].down.data[0, 3] += 0.25
    result = example.difference(whole, divided, mesh)
    assert isinstance(result, float)
    return result


def test_a_difference_on_one_rank_is_noticed_on_all(example: ModuleType) -> None:
    assert run("threads", 2, noticed, example) == [0.25, 0.25]


def test_the_script_says_that_the_networks_agree() -> None:
    command = [sys.executable, "-m", "torchestra", "run", "--nproc", "2", str(SCRIPT), "--backend", "none"]
    ended = run_warm(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    assert "weights differ from the undivided network's by" in ended.stdout
