"""Train on handwritten digits with four ranks, one of which is killed in the middle: the others go on.

    python -m torchestra run --nproc 4 --max-failures 1 examples/survive.py
    python -m torchestra run --nproc 4 --max-failures 2 examples/survive.py --kill 0@100 --kill 3@200

The victim ends itself with SIGKILL, so nothing of it can say farewell. The survivors' next reduction of
gradients fails with an error that names it. They shrink the group, take over the state of the lowest rank
that is left (its last whole step), share every batch among fewer from then on, and end with the accuracy
that four ranks reach and with the same weights on each, bit for bit. No process is started again, and no
checkpoint is read.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import sys
import time

import torch
from digits import accuracy, digits, network, shares, weights_are_identical
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel

SAMPLES = 1438  # to train with


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, and lose ranks on the way.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the batches, and who is killed when"
    )
    parser.add_argument(
        "--kill",
        action="append",
        type=victim,
        metavar="RANK@STEP",
        help="who ends itself, and in which step; may be given several times; default: drawn by the seed",
    )
    parser.add_argument("--require-accuracy", type=float, default=0.97, help="fail if the test gives less")
    return parser.parse_args()


def victim(text: str) -> tuple[int, int]:
    rank, _, step = text.partition("@")
    return int(rank), int(step)


class Training:
    """Hold what all ranks share: the model, the optimizer, and the number of steps done."""

    def __init__(self, settings: argparse.Namespace) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.images, self.labels, _, _ = digits()
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.lr)
        self.step = 0
        self.steps_per_epoch = -(-len(self.labels) // settings.batch_size)
        self.number = dist.get_rank()  # which rank this process was at the beginning

    def run(self) -> None:
        """Train to the end, or until a rank is lost."""
        while self.step < self.settings.epochs * self.steps_per_epoch:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            batches = list(shares(len(self.labels), self.settings.batch_size, self.settings.seed + epoch))
            for share, batch_size in batches[done:]:
                if (self.number, self.step) in self.settings.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                # As in digits.py: the gradient of the mean over the batch, whoever has how much of it.
                outputs = self.model(self.images[share])
                loss = nn.functional.cross_entropy(outputs, self.labels[share], reduction="sum")
                self.optimizer.zero_grad()
                (loss * dist.get_world_size() / batch_size).backward()
                self.optimizer.step()
                self.step += 1
            if dist.get_rank() == 0:
                print(f"epoch {epoch + 1:3}/{self.settings.epochs}   {dist.get_world_size()} ranks")

    def go_on(self) -> None:
        """After the world has been shrunk: take over what rank 0 has.

        Ranks may be a step apart, as some had all their gradients when the rank was lost and others not.
        """
        self.model.rebuild()
        kept = io.BytesIO()
        torch.save((self.model.module.state_dict(), self.optimizer.state_dict(), self.step), kept)
        length = torch.tensor([len(kept.getvalue())])
        dist.broadcast(length, src=0)
        raw = torch.zeros(int(length), dtype=torch.uint8)
        if dist.get_rank() == 0:
            raw = torch.frombuffer(bytearray(kept.getvalue()), dtype=torch.uint8)
        dist.broadcast(raw, src=0)
        weights, moments, self.step = torch.load(io.BytesIO(raw.numpy().tobytes()))
        self.model.module.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)


def recover(training: Training, lost: str) -> None:
    """Go on with whoever is left, and say how long that took."""
    began = time.perf_counter()
    world = dist.group.WORLD.shrink()
    shrunk = time.perf_counter()
    training.go_on()
    seconds = time.perf_counter() - began, shrunk - began
    if world.rank() == 0:
        whole, shrinking = (f"{each * 1e3:.0f} ms" for each in seconds)
        print(lost)
        print(
            f"ranks {list(world.previous_ranks)} go on as {list(range(world.size()))} from step"
            f" {training.step}: recovered in {whole}, of which {shrinking} to shrink the group"
        )


def train(training: Training) -> tuple[float, bool]:
    """Train to the end, with whoever is left; the accuracy, and whether all ranks have the same weights."""
    lost = ""
    while True:
        try:
            if lost:
                recover(training, lost)
                lost = ""
            training.run()
            return accuracy(training.model), weights_are_identical(training.model)
        except dist.GroupAbortedError as error:
            lost = str(error).splitlines()[0]


def main() -> int:
    settings = options()
    torch.set_num_threads(1)  # A rank's share of a batch is too small to be worth dividing further.
    dist.init_process_group()
    if settings.kill is None:
        dice, steps = random.Random(settings.seed), settings.epochs * -(-SAMPLES // settings.batch_size)
        settings.kill = [(dice.randrange(dist.get_world_size()), dice.randrange(steps // 4, steps // 2))]
    training = Training(settings)

    score, identical = train(training)
    if dist.get_rank() == 0:
        same = "bit-identical" if identical else "DIFFERENT"
        print(
            f"{training.step} steps, {dist.get_world_size()} ranks left, accuracy {score:.2%}, weights {same}"
        )
    dist.destroy_process_group()

    if not identical:
        print("survive: the ranks ended with different weights", file=sys.stderr)
        return 1
    if score < settings.require_accuracy:
        print(f"survive: accuracy {score:.2%} is below {settings.require_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
