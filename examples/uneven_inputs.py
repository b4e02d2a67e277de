"""Train on shares of very different sizes, without cutting any of them down to the smallest.

    python -m torchestra run --nproc 4 examples/uneven_inputs.py      # or torchrun --nproc-per-node 4 ...

Rank r holds r + 1 parts of scikit-learn's handwritten digits, so the last rank has several times as many
batches as the first. In a plain loop the first rank would leave the others waiting for its gradients. In a
join context it goes on to take part in their steps, with nothing to contribute, until all have run out. So
does its part of the optimizer, which divides its state between the ranks.

The result is checked twice: after the first epoch against the same training in one process without any
ranks, and at the end by the digits that were kept for the test.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import torchestra as dist
from torchestra.algorithms.join import Join
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.optim import ZeroRedundancyOptimizer
from torchestra.rendezvous import launch_environment

PIXELS, CLASSES = 64, 10
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on shares of very different sizes.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--require-accuracy", type=float, default=0.95, help="fail if the test gives less")
    return parser.parse_args()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and others to test with."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[test], labels[test]


def shares(samples: int, ranks: int) -> list[torch.Tensor]:
    """The samples that each rank holds: twice as many for rank 1 as for rank 0, and so on."""
    parts = ranks * (ranks + 1) // 2
    bounds = [samples * rank * (rank + 1) // 2 // parts for rank in range(ranks + 1)]
    return [torch.arange(begin, end) for begin, end in itertools.pairwise(bounds)]


def batches(rank: int, ranks: int, epoch: int, batch_size: int) -> Batches:
    """A rank's batches of an epoch, in an order that is the rank's own."""
    images, labels, _, _ = digits()
    mine = shares(len(labels), ranks)[rank]
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    for chosen in mine[torch.randperm(len(mine), generator=generator)].split(batch_size):
        yield images[chosen], labels[chosen]


def train_epoch(
    model: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer, epoch: int, batch_size: int
) -> tuple[float, int]:
    """The sum of this rank's losses, and its steps."""
    total, steps = 0.0, 0
    # Gradients are averaged over the ranks that still have a batch.
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for images, labels in batches(dist.get_rank(), dist.get_world_size(), epoch, batch_size):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            steps += 1
    return total, steps


def train_epoch_alone(model: nn.Module, ranks: int, settings: argparse.Namespace) -> None:
    """Check what the first epoch should do: the same steps, in one process."""
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    everybodys = [list(batches(rank, ranks, 0, settings.batch_size)) for rank in range(ranks)]
    for step in range(max(map(len, everybodys))):
        optimizer.zero_grad()
        active = [mine[step] for mine in everybodys if step < len(mine)]
        for images, labels in active:
            (nn.functional.cross_entropy(model(images), labels) / len(active)).backward()
        optimizer.step()


def difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def gathered(*numbers: float) -> list[list[float]]:
    """The numbers of every rank, by rank."""
    everybodys = torch.empty(dist.get_world_size(), len(numbers), dtype=torch.float64)
    dist.all_gather_into_tensor(everybodys, torch.tensor(numbers, dtype=torch.float64))
    found: list[list[float]] = everybodys.tolist()
    return found


def ranks_agree(model: nn.Module) -> bool:
    """Return whether all ranks have rank 0's parameters, bit for bit."""
    same = True
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, src=0)
        same = same and torch.equal(first, parameter)
    return all(agrees for (agrees,) in gathered(same))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    _, _, images, labels = digits()
    return (model(images).argmax(dim=1) == labels).double().mean().item()


def main() -> int:
    settings = options()
    torch.set_num_threads(1)
    if launch_environment().world_size is None:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)
    alone = network()
    model = DistributedDataParallel(copy.deepcopy(alone))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=settings.lr)

    sizes = [len(share) for share in shares(len(digits()[1]), ranks)]
    console.print(f"samples by rank: {', '.join(map(str, sizes))}")
    began = time.perf_counter()
    off = 0.0
    for epoch in range(settings.epochs):
        told = gathered(*train_epoch(model, optimizer, epoch, settings.batch_size))
        mean = sum(total for total, _ in told) / sum(steps for _, steps in told)
        steps = ", ".join(f"{int(steps)}" for _, steps in told)
        console.print(f"epoch {epoch + 1:3}/{settings.epochs}   loss {mean:.4f}   steps by rank: {steps}")
        if epoch == 0:
            train_epoch_alone(alone, ranks, settings)
            off = difference(model.module, alone)
    seconds = time.perf_counter() - began
    score, agree = accuracy(model.module), ranks_agree(model)

    table = Table(show_header=False)
    table.add_row("ranks", str(ranks))
    table.add_row("training", f"{seconds:.1f} s")
    table.add_row("test accuracy", f"{score:.2%}")
    table.add_row("weights after one epoch", f"those of one process, to {off:.0e}")
    table.add_row("weights on all ranks", "bit-identical" if agree else "DIFFERENT")
    console.print(table)
    dist.destroy_process_group()

    if off > 1e-3:
        print(f"uneven_inputs: weights differ by {off} from those of one process", file=sys.stderr)
        return 1
    if not agree:
        print("uneven_inputs: the ranks ended with different weights", file=sys.stderr)
        return 1
    if score < settings.require_accuracy:
        print(
            f"uneven_inputs: accuracy {score:.2%} is below {settings.require_accuracy:.2%}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
