"""The training whose ranks chaos_elastic.py kills: three lines of torchestra.elastic, and a log of each step.

Each process writes a line per step into a file of its own: the step, a checksum of all parameters after it,
and time.monotonic(). At the end it writes a digest of the whole state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import torchestra as dist
from torchestra import elastic
from torchestra.engine.failure.liveness import process_start
from torchestra.optim import ZeroRedundancyOptimizer

SHARDS = 8
_SAMPLES = 4  # of a shard
_TOUCHED = 1024  # elements of the padding that a step changes
_SPARE_STEPS = 50  # as many as chaos_elastic.py adds to those that its kills should take
_SLOWER = 20.0  # are the spare steps: so the training does not end first where ranks are replaced slowly


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0, help="the least time of a step")
    parser.add_argument("--optimizer", choices=("adam", "zero"), default="adam")
    parser.add_argument("--replicas", type=int, default=1, help="of a part of zero's state")
    parser.add_argument("--state-mb", type=float, default=0.0, help="of a tensor that is part of the state")
    parser.add_argument("--model-mb", type=float, default=0.0, help="of further parameters, with adam")
    return parser.parse_args()


def network() -> nn.Module:
    """Return a network with dropout, so that random numbers count."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))


class Ballast(nn.Module):
    """Add parameters to a network that cost little to train, and change in each step."""

    def __init__(self, model: nn.Module, megabytes: float) -> None:
        super().__init__()
        self.model = model
        self.further = nn.ParameterList(torch.zeros(1 << 18) for _ in range(int(megabytes)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Let a sample of each further parameter count."""
        outputs: torch.Tensor = self.model(inputs)
        for each in self.further:
            outputs = outputs + each[:: 1 << 12].sum() * inputs.mean()
        return outputs


class Pace:
    """Makes each step last for some time, until there is a file ``hurry``."""

    def __init__(self, folder: Path, seconds: float, steps: int) -> None:
        self._hurry, self._seconds, self._began = folder / "hurry", seconds, time.monotonic()
        self._spare = steps - _SPARE_STEPS

    def keep(self, step: int) -> None:
        """Sleep until this step has lasted long enough."""
        seconds = self._seconds * (_SLOWER if step >= self._spare else 1.0)
        left = self._began + seconds - time.monotonic()
        if left > 0 and not self._hurry.exists():
            time.sleep(left)
        self._began = time.monotonic()


class Log:
    """Write a line for each step: when its update was made, and what all parameters are when it has ended.

    A ZeroRedundancyOptimizer's ranks exchange their parameters after the update. So the line is written when
    the next step begins, or at the end.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._model = model
        self._updated: tuple[int, float] | None = None

    def updated(self, step: int) -> None:
        """Note that the update of a step has been made."""
        self._updated = step, time.monotonic()

    def write(self) -> None:
        """Write the line of the last step, if there is one to be written."""
        if self._updated is None:
            return
        checksum = 0
        for parameter in self._model.parameters():
            checksum = zlib.crc32(parameter.detach().numpy().tobytes(), checksum)
        step, when = self._updated
        os.write(self._file, f"{step} {checksum:08x} {when:.6f}\n".encode())
        self._updated = None


def updating(
    state: elastic.State, optimizer: torch.optim.Optimizer, padding: torch.Tensor, log: Log
) -> Callable[[], None]:
    """Return what makes a step's update."""

    def update() -> None:
        optimizer.step()
        if padding.numel():
            first = state.step * _TOUCHED % padding.numel()
            padding[first : first + _TOUCHED] += 1.0
        log.updated(state.step)

    return update


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return Adam's moments of all parameters; every rank calls this."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(rank)
    state = optimizer.state_dict()["state"]
    return [state[index][key] for index in sorted(state) for key in ("exp_avg", "exp_avg_sq")]


def digest(*tensors: torch.Tensor) -> str:
    """Return a digest of the bytes of tensors."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def main() -> None:
    """Train, as every rank does."""
    settings = options()
    torch.set_num_threads(1)
    model = Ballast(network(), settings.model_mb) if settings.model_mb else network()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # As a state is that a program has made: in memory, and not one page of zeros in place of all.
    padding = torch.zeros(int(settings.state_mb * 1e6 / 4)).fill_(1.0)
    dist.init_process_group()  # last: from now on the others wait for a rank that joins
    if settings.optimizer == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    state = elastic.State(model, optimizer, padding, replicas=settings.replicas)
    name = f"{os.environ['RANK']}-{os.getpid()}.{process_start(os.getpid())}"
    log = Log(settings.folder / f"log-{name}", model)
    pace = Pace(settings.folder, settings.step_ms / 1e3, settings.steps)
    step = -1
    # A large model reaches ranks that join bit by bit, unless there is an update of one's own.
    update = None if settings.model_mb else updating(state, optimizer, padding, log)
    for shard in elastic.shards(state, settings.steps, SHARDS, seed=3, update=update):
        if shard.step != step:
            if settings.model_mb and step >= 0:
                log.updated(step)
            step = shard.step
            log.write()
            pace.keep(step)
        inputs = torch.randn(_SAMPLES, 32, generator=shard.generator)
        shard.backward(nn.functional.mse_loss(model(inputs), inputs[:, :8].sin()), _SAMPLES)
    if settings.model_mb:
        log.updated(step)
    log.write()
    final = digest(*model.parameters(), *moments(optimizer), padding)
    (settings.folder / f"final-{name}").write_text(final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
