"""Programs compiled by Inductor run on torch.distributed's groups that torchestra serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # here, so that ranks, which are forked, need not import it
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from interop.torch_worlds import run

P2P_COMPILATION = "enable_p2p_compilation"  # torch since 2.12


def compile_anew(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True)


def multiply_and_sum(tensor: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(tensor @ tensor, "sum", dist.group.WORLD) @ tensor


def load_a_cached_graph(folder: str) -> int:
    """Inductor asks torch.distributed for more time where a graph is in its cache, and others may compile."""
    with (
        inductor_config.patch(fx_graph_cache=True, fx_graph_remote_cache=False),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/{dist.get_rank()}")
        tensor = torch.eye(2) * (dist.get_rank() + 1)
        first = compile_anew(multiply_and_sum)(tensor)
        counters.clear()
        again = compile_anew(multiply_and_sum)(tensor)
    assert torch.equal(first, again)
    assert torch.equal(again, torch.eye(2) * 5 * (dist.get_rank() + 1))
    return int(counters["inductor"]["fxgraph_cache_hit"])


def test_a_graph_from_inductors_cache_runs(tmp_path: Path) -> None:
    assert run(2, load_a_cached_graph, str(tmp_path), switched=True, backend="gloo") == [1, 1]


def exchange(tensor: torch.Tensor) -> torch.Tensor:
    sent, received = tensor @ tensor, torch.empty_like(tensor)
    peer = 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received @ tensor


def compile_messages(folder: str) -> list[list[float]]:
    dynamo_config: Any = torch._dynamo.config
    with dynamo_config.patch(P2P_COMPILATION, True), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/{dist.get_rank()}")
        tensor = torch.eye(2) * (dist.get_rank() + 1)
        return compile_anew(exchange)(tensor).tolist()


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, P2P_COMPILATION), reason="this torch traces no messages"
)
def test_messages_are_traced(tmp_path: Path) -> None:
    both = run(2, compile_messages, str(tmp_path), switched=True, backend="gloo")
    assert both == [[[4, 0], [0, 4]], [[2, 0], [0, 2]]]


def train(model: torch.nn.Module) -> list[float]:
    """Return the losses of some steps; buckets are rebuilt after the first."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped() -> torch.nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    )


def compile_wrapped() -> None:
    """C++ calls the group's methods here, under the compiler's eyes."""
    assert train(torch.compile(wrapped(), backend="aot_eager")) == pytest.approx(train(wrapped()))


def test_a_wrapped_module_is_compiled() -> None:
    run(2, compile_wrapped, switched=True, backend="gloo")
