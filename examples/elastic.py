"""Train on handwritten digits while ranks are killed, and others take their places.

    python -m torchestra run --nproc 4 --elastic 1:4 --max-restarts 3 examples/elastic.py --kills 3
    python -m torchestra run --nproc 4 --max-failures 3 examples/elastic.py --kills 3    # nobody is replaced
    python examples/elastic.py                                                           # one rank

The victims end themselves with SIGKILL in the middle of a step, so nothing of them can say farewell. The
others go on with the step; a replacement fetches their state, and takes part from the next step on. At the
end rank 0 trains once more, alone and without a failure: the weights are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import torch
from digits import accuracy, digits, network
from torch import nn

import torchestra as dist
from torchestra import elastic
from torchestra.rendezvous import launch_environment


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits while ranks are killed.")
    parser.add_argument("--steps", type=int, default=460)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--shards", type=int, default=8, help="into which a batch is divided, on any ranks")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches, and who is killed when")
    parser.add_argument("--kills", type=int, default=0, help="how many ranks kill themselves")
    parser.add_argument(
        "--checkpoints", type=Path, help="a directory to write the state to, and read it from"
    )
    parser.add_argument("--minimum", type=int, default=1, help="with fewer ranks, wait for others to join")
    parser.add_argument("--require-accuracy", type=float, default=0.97, help="fail if the test gives less")
    return parser.parse_args()


def kill_plan(settings: argparse.Namespace) -> dict[int, int]:
    """Which rank is killed, by step: the first half of the training has all kills."""
    dice = random.Random(settings.seed)
    steps = sorted(dice.sample(range(1, max(2 * settings.kills, settings.steps // 2) + 1), settings.kills))
    return {step: dice.randrange(1 << 16) for step in steps}


def kill_this_rank_if_drawn(shard: elastic.Shard, plan: dict[int, int]) -> None:
    """End this rank, without a word, if it is the one drawn for this step; one rank is always left."""
    drawn = plan.pop(shard.step, None)  # once a step: others compute the victim's shards after it
    ranks = dist.get_world_size()
    if drawn is not None and ranks > 1 and drawn % ranks == dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)


def build(settings: argparse.Namespace) -> elastic.State:
    digits()  # read once
    torch.manual_seed(settings.seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    checkpoints = elastic.Checkpoints(settings.checkpoints) if settings.checkpoints else None
    return elastic.State(model, optimizer, checkpoints=checkpoints)


def train(state: elastic.State, settings: argparse.Namespace) -> None:
    images, labels, _, _ = digits()
    model, plan, first = state.modules[0], kill_plan(settings), None
    choices = {"seed": settings.seed, "minimum": settings.minimum}
    for shard in elastic.shards(state, settings.steps, settings.shards, **choices):
        tell(state, shard)
        if first is None:  # a rank that replaces a victim may compute the victim's shards of the same step
            first = plan.pop(shard.step, shard.step)
        kill_this_rank_if_drawn(shard, plan)
        samples = shard.indices(len(labels), settings.batch_size)
        if len(samples):
            loss = nn.functional.cross_entropy(model(images[samples]), labels[samples])
            shard.backward(loss, len(samples))


def tell(state: elastic.State, shard: elastic.Shard) -> None:
    """Print on rank 0 what has happened, and now and then the loss."""
    changes, state.changes = state.changes, []
    if dist.get_rank():
        return
    for change in changes:
        print(change, flush=True)
    if shard.index == 0 and shard.step % 50 == 0 and shard.step:
        print(f"step {shard.step:4}   loss {state.loss:.4f}   {dist.get_world_size()} ranks", flush=True)


def digest(model: nn.Module) -> str:
    summed = hashlib.sha256()
    for parameter in model.parameters():
        summed.update(parameter.detach().numpy().tobytes())
    return summed.hexdigest()


def meet_others() -> None:
    """Join the job that a launcher has started, or be alone."""
    if launch_environment().world_size is None and not os.environ.get("TORCHESTRA_JOIN"):
        be_alone()
    else:
        dist.init_process_group()


def be_alone() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def digest_of_an_unfailed_run(settings: argparse.Namespace) -> str:
    """Train once more, on this rank alone."""
    be_alone()
    settings.kills, settings.minimum, settings.checkpoints = 0, 1, None
    state = build(settings)
    train(state, settings)
    dist.destroy_process_group()
    return digest(state.modules[0])


def main() -> int:
    settings = options()
    torch.set_num_threads(1)  # A shard is too small to be divided further; and all ranks must do alike.
    # Build before meeting: the others wait for this rank from then on, if it replaces one.
    state = build(settings)
    meet_others()
    train(state, settings)
    model = state.modules[0]
    score, first = accuracy(model), dist.get_rank() == 0
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(model))
    dist.destroy_process_group()
    if not first:
        return 0
    print(
        f"trained {state.step} steps; test accuracy {score:.2%}; {len(digests)} ranks at the end", flush=True
    )
    identical = set(digests) == {digest_of_an_unfailed_run(settings)}
    print(f"weights: {'bit-identical to' if identical else 'DIFFERENT from'} those of an unfailed run")
    return 0 if identical and score >= settings.require_accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
