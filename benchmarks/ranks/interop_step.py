"""A rank of the interop benchmark: torch.distributed on torchestra's engine, and on Gloo, by turns.

Both backends are groups of one world of torch.distributed, so that whatever disturbs the machine disturbs
them alike. Measured are all_reduce, and steps (forward and backward) of PyTorch's own DDP, FSDP2 and tensor
parallel. Times are those of the slowest rank, and of many the median. Every way of training starts
from the same weights and samples, and its losses are compared between the backends. Rank 0 writes what was
found, microseconds by what and by backend, into the directory that TORCHESTRA_BENCH_DIRECTORY names.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchestra.interop.torch_distributed  # noqa: F401 - registers the backend

Step = Callable[[], Any]
Wrap = Callable[[nn.Module, Any], nn.Module]

_BYTES = {"4 B": 4, "4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20}
_STEPS_COMPARED = 3
_TOLERANCE = 1e-4


class _Block(nn.Module):
    """A layer of a transformer whose projections tensor parallel can split."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.before(hidden)
        query, key, value = (
            part(normal).unflatten(-1, (-1, self.width // self.heads)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        grown: torch.Tensor = self.down(nn.functional.gelu(self.up(self.between(hidden))))
        return hidden + grown


def _mlp() -> nn.Module:
    widths = (1024, 2048, 2048, 1024)
    layers = [[nn.Linear(inputs, outputs), nn.ReLU()] for inputs, outputs in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers))


def _transformer() -> nn.Module:
    return nn.Sequential(*(_Block(128, 4) for _ in range(2)))


def _alone(model: nn.Module, group: Any) -> nn.Module:
    return model


def _ddp(model: nn.Module, group: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def _ddp_that_sends_nothing(model: nn.Module, group: Any) -> nn.Module:
    """DDP's own cost, which no backend can save: it copies gradients into its buckets and back."""
    wrapped: Any = _ddp(model, group)
    # Torch refuses annotations that are strings, so what it is given has none.
    wrapped.register_comm_hook(None, lambda _, bucket: _sent(bucket.buffer()))
    return cast("nn.Module", wrapped)


def _sent(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _fsdp(model: nn.Module, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Module, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.children():
        parallelize_module(block, mesh, plan)
    return model


_TRAININGS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Wrap]] = {
    "MLP 1024-2048-2048-1024, batch 16, by DDP": (_mlp, (16, 1024), _ddp),
    "transformer by DDP": (_transformer, (8, 64, 128), _ddp),
    "transformer by FSDP2": (_transformer, (8, 64, 128), _fsdp),
    "transformer by tensor parallel": (_transformer, (8, 64, 128), _tensor_parallel),
}


def _training(
    make: Callable[[], nn.Module], samples: tuple[int, ...], wrap: Wrap, group: Any
) -> tuple[Step, Step]:
    """Return a step without and with an update of the weights."""
    torch.manual_seed(0)
    model = wrap(make(), group)
    same = wrap is _tensor_parallel  # whose ranks share one batch
    torch.manual_seed(1 if same else 1 + distributed.get_rank())
    inputs, targets = torch.randn(samples), torch.randn(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    def update() -> torch.Tensor:
        loss = step()
        optimizer.step()
        return loss

    return step, update


def _turn(step: Step, count: int) -> float:
    """Return the seconds of a call, the median of so many of the slowest rank."""
    distributed.barrier()
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(taken, dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return slowest.median().item()


def _times(steps: int, step: Step) -> None:
    for _ in range(steps):
        step()


def _measure(ways: Mapping[str, Step], seconds: float, turns: int, together: int = 1) -> dict[str, float]:
    """Return the microseconds by way; ``together`` calls are timed as one, where a call is short."""
    calls = {way: partial(_times, together, step) for way, step in ways.items()}
    counts = {}
    for way, call in calls.items():
        _turn(call, 1)
        counts[way] = max(2, min(1000, int(seconds / _turn(call, 1))))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, call in calls.items():
            taken[way].append(_turn(call, counts[way]))
    return {way: sorted(times)[len(times) // 2] / together * 1e6 for way, times in taken.items()}


def main(seconds: float, turns: int) -> None:
    """Measure everything, each backend in so many turns of so many seconds."""
    directory = Path(os.environ["TORCHESTRA_BENCH_DIRECTORY"])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "torchestra",
        init_method=f"file://{directory / 'meeting'}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    groups = {"torchestra": distributed.group.WORLD, "gloo": distributed.new_group(backend="gloo")}
    times: dict[str, dict[str, float]] = {}
    failures = []
    for size, nbytes in _BYTES.items():
        tensor = torch.zeros(nbytes // 4)
        calls = {way: partial(distributed.all_reduce, tensor, group=group) for way, group in groups.items()}
        times[f"all_reduce {size}"] = _measure(calls, seconds, turns, together=10)
    for name, (make, samples, wrap) in _TRAININGS.items():
        made = {way: _training(make, samples, wrap, group) for way, group in groups.items()}
        losses = {
            way: torch.stack([update() for _ in range(_STEPS_COMPARED)]) for way, (_, update) in made.items()
        }
        difference = ((losses["torchestra"] - losses["gloo"]) / losses["gloo"]).abs().max()
        distributed.all_reduce(difference, distributed.ReduceOp.MAX)
        if not difference <= _TOLERANCE:
            failures.append(f"{name}: losses differ by {difference:.1e} of their value")
            continue
        made["one rank's model alone"] = _training(make, samples, _alone, None)
        if wrap is _ddp:
            group = groups["torchestra"]
            made["DDP that sends nothing"] = _training(make, samples, _ddp_that_sends_nothing, group)
        found = _measure({way: step for way, (step, _) in made.items()}, seconds, turns)
        least = [f"{way}: {found.pop(way) / 1000:.1f} ms" for way in list(found) if way not in groups]
        times[f"a step of the {name} ({', '.join(least)})"] = found
    if distributed.get_rank() == 0:
        (directory / "found.json").write_text(json.dumps({"times": times, "failures": failures}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(float(sys.argv[2])))
