"""An embedding table on a server, a dense network under DistributedDataParallel on the trainers.

    python -m torchestra run --nproc 3 examples/parameter_server.py     # two trainers and a server

The data are scikit-learn's handwritten digits, read as texts: each image is a bag of 64 words, one for every
pixel and how bright it is, in five steps, out of 320 words in all. The server keeps a vector for each word. A
trainer asks it for the means of its bags' vectors; the dense network makes digits of them. One backward pass
reaches both: gradients of the dense network are averaged over the trainers by DistributedDataParallel, sparse
gradients of the table go to the server, and one optimizer steps both where they are.

Two things are checked: that the trainers end with the same dense network, bit for bit, and that the digits
kept for the test are recognised.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn

import torchestra as dist
from torchestra import autograd, rpc
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.optim import DistributedOptimizer
from torchestra.rendezvous import launch_environment

SERVER = "server"
PIXELS, STEPS, CLASSES = 64, 5, 10
WIDTH = 32


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with an embedding table on a parameter server.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each trainer")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--require-accuracy", type=float, default=0.92, help="fail if the test gives less")
    return parser.parse_args()


class Table:
    """The embedding table, on the server."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch wants to be told whether to check
        self.vectors = nn.EmbeddingBag(PIXELS * STEPS, WIDTH, mode="mean", sparse=True)

    def look_up(self, bags: torch.Tensor) -> torch.Tensor:
        return self.vectors(bags)

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.vectors.parameters()]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def bags() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images as the numbers of their words, and labels: to train with, and to test with."""
    data = load_digits()
    brightness = torch.tensor(data.data, dtype=torch.int64) // 4  # it is from 0 to 16
    words = brightness + STEPS * torch.arange(PIXELS)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return words[train], labels[train], words[test], labels[test]


class Trainer:
    """One of the trainers.

    Args:
        table: a reference to the table on the server.
        group: of the trainers.
    """

    def __init__(self, table: rpc.RRef, group: dist.ProcessGroup, settings: argparse.Namespace) -> None:
        self.table = table
        self.group = group
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.model = DistributedDataParallel(dense(), process_group=group)
        parameters = [rpc.RRef(parameter) for parameter in self.model.parameters()]
        parameters += table.rpc_sync().parameters()
        self.optimizer = DistributedOptimizer(torch.optim.Adagrad, parameters, lr=settings.lr)

    def train(self, console: Console) -> None:
        words, labels, _, _ = bags()
        rank, trainers = self.group.rank(), self.group.size()
        for epoch in range(1, self.settings.epochs + 1):
            started, summed, steps = time.perf_counter(), 0.0, 0
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
            everybodys = self.settings.batch_size * trainers
            for batch in order[: len(order) // everybodys * everybodys].split(everybodys):
                mine = batch[rank::trainers]
                with autograd.context() as context:
                    found = self.table.rpc_sync().look_up(words[mine])
                    loss = nn.functional.cross_entropy(self.model(found), labels[mine])
                    autograd.backward(context, [loss])
                    self.optimizer.step(context)
                summed, steps = summed + loss.item(), steps + 1
            speed = steps * everybodys / (time.perf_counter() - started)
            console.print(
                f"epoch {epoch:3}/{self.settings.epochs}   loss {summed / steps:.4f}   {speed:,.0f} samples/s"
            )

    @torch.no_grad()
    def accuracy(self) -> float:
        _, _, words, labels = bags()
        guessed = self.model.module(self.table.rpc_sync().look_up(words)).argmax(dim=1)
        return (guessed == labels).sum().item() / len(labels)

    def is_same_everywhere(self) -> bool:
        """Return whether all trainers have the same dense network, bit for bit."""
        mine = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        everybodys = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(everybodys, mine, group=self.group)
        return all(torch.equal(each, mine) for each in everybodys)


_table: list[rpc.RRef] = []


def keep_table(table: rpc.RRef) -> None:
    """On a trainer: hear of the table from the first one."""
    _table.append(table)


def main() -> int:
    settings = options()
    torch.set_num_threads(1)
    launch = launch_environment()
    if launch.rank is None or launch.world_size is None or launch.world_size < 2:
        print("parameter_server: start with torchestra run --nproc 2 or more", file=sys.stderr)
        return 2
    trainers, rank = launch.world_size - 1, launch.rank
    dist.init_process_group()
    group = dist.new_group(list(range(trainers)))
    rpc.init_rpc(SERVER if rank == trainers else f"trainer{rank}")
    failure = ""
    if rank == 0:
        table = rpc.remote(SERVER, Table, (settings.seed,))
        for other in range(trainers):
            rpc.rpc_sync(f"trainer{other}", keep_table, (table,))
    dist.barrier()
    if rank < trainers:
        console = Console(quiet=rank != 0)
        trainer = Trainer(_table.pop(), group, settings)
        trainer.train(console)
        same, accuracy = trainer.is_same_everywhere(), trainer.accuracy()
        how = "bit-identical" if same else "DIFFERENT"
        console.print(f"{trainers} trainers: test accuracy {accuracy:.2%}, dense networks {how}")
        if not same:
            failure = "the trainers ended with different networks"
        elif accuracy < settings.require_accuracy:
            failure = f"accuracy {accuracy:.2%} is below {settings.require_accuracy:.2%}"
        del trainer
    rpc.shutdown()
    dist.destroy_process_group()
    if failure:
        print(f"parameter_server: {failure}", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
