"""Measure a training step of a user's model: when its gradients are ready, and how long the rest takes.

The buckets are those that DistributedDataParallel makes of the model. The times are those of the bare model,
with a hook on each parameter: nothing is sent, and no rank waits for another while it computes.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from torchestra.launcher.api import launch
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.nn.parallel.comm_hooks import GradBucket
from torchestra.performance.calibration import StepCalibration, StepTimes
from torchestra.performance.sampling import summarise

__all__ = ["StepSamples", "load_step", "measure_step", "time_step"]

_WARM_UP = 3  # steps; DistributedDataParallel makes its buckets anew after the first
_MIN_STEPS, _MAX_STEPS = 5, 200

Loss = Callable[[torch.nn.Module], torch.Tensor]
Step = tuple[torch.nn.Module, Loss, torch.optim.Optimizer]


@dataclass
class StepSamples:
    """The times of one rank's steps, in seconds.

    Attributes:
        bucket_bytes: of gradients, in the order of their reduction.
        dtype: of the gradients.
        forward, backward, optimizer: by step.
        ready: by step, when each bucket was ready, since backward began.
        wrapped: of one rank alone, whole steps of the model in DistributedDataParallel.
    """

    bucket_bytes: tuple[int, ...]
    dtype: str
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    ready: list[list[float]] = field(default_factory=list)
    wrapped: list[float] = field(default_factory=list)


def load_step(where: str) -> Callable[[], Any]:
    """Return the function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names.

    Raises:
        InvalidArgumentError: there is no such file, module or function.
    """
    source, colon, name = where.rpartition(":")
    if not colon:
        raise InvalidArgumentError(f"a step is FILE.py:FUNCTION or MODULE:FUNCTION, got {where!r}")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        function: Callable[[], Any] = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise InvalidArgumentError(f"cannot load the step {where!r}: {error}") from error
    return function


def measure_step(
    where: str, ranks: Sequence[int], seconds: float, quantile: float, progress: Callable[[str], None]
) -> tuple[StepCalibration, dict[str, float]]:
    """Return the calibration of a training step, and the spread of its numbers by field.

    Args:
        where: names a function without arguments, as :func:`load_step` takes it, which returns a model, a
            function that computes a loss of it, and optionally its optimizer (default: SGD)::

                def step():
                    model, batch = torch.nn.Linear(64, 8), torch.randn(16, 64)
                    return model, lambda model: model(batch).square().mean()

        ranks: numbers of ranks that compute at once on this host; 1 is always measured.
        seconds: about how long each is measured for.
        quantile: of the samples, which counts; 0.5 is the median.

    Raises:
        InvalidArgumentError: the function cannot be loaded, or returns something else.
        DistError: a rank failed.
    """
    load_step(where)  # before any rank is started
    times, bucket_cost_s, widest = [], 0.0, 0.0
    for number in sorted({1, *ranks}):
        progress(f"training steps of {where}, {number} ranks at once")
        found = launch(time_step, number, where, seconds)
        every = _Pooled(found, quantile)
        times.append(
            StepTimes(
                ranks=number,
                forward_s=every.value("forward"),
                backward_s=every.value("backward"),
                optimizer_s=every.value("optimizer"),
                ready_s=every.ready(),
            )
        )
        widest = max(widest, every.spread)
        if number == 1:
            bare_s = sum(every.value(part) for part in ("forward", "backward", "optimizer"))
            bucket_cost_s = max(0.0, every.value("wrapped") - bare_s) / len(found[0].bucket_bytes)
    step = StepCalibration(where, found[0].bucket_bytes, found[0].dtype, tuple(times), bucket_cost_s)
    return step, {"step.times": widest}


class _Pooled:
    """The samples of all ranks taken together."""

    def __init__(self, found: Sequence[StepSamples], quantile: float) -> None:
        self._found, self._quantile = found, quantile
        self.spread = 0.0

    def value(self, name: str) -> float:
        """Return the quantile of one of the parts."""
        measured = summarise([each for one in self._found for each in getattr(one, name)], self._quantile)
        self.spread = max(self.spread, measured.spread)
        return measured.value

    def ready(self) -> tuple[float, ...]:
        """Return when each bucket is ready."""
        steps = [step for one in self._found for step in one.ready]
        latest, moments = 0.0, []
        for moment in zip(*steps, strict=True):
            latest = max(latest, summarise(moment, self._quantile).value)
            moments.append(latest)
        return tuple(moments)


def time_step(where: str, seconds: float) -> StepSamples:
    """On any number of ranks of a new group, take steps, all ranks at once; return this rank's times.

    Args:
        where: see :func:`measure_step`.
        seconds: about how long.
    """
    dist.init_process_group()
    try:
        make = load_step(where)
        samples, members = _buckets(_parts(make(), where))
        bare = _BareStep(_parts(make(), where), members, samples)
        steps = [bare.run]
        if dist.get_world_size() == 1:
            parts = _parts(make(), where)
            model = DistributedDataParallel(parts[0])
            steps.append(lambda: samples.wrapped.append(_whole_step(model, parts)))
        for _ in range(_agreed_count(seconds, steps)):
            for step in steps:
                step()
        return samples
    finally:
        dist.destroy_process_group()


def _buckets(parts: Step) -> tuple[StepSamples, list[list[str]]]:
    """Return the buckets that DistributedDataParallel makes of a model, and the names of their parameters."""
    buckets: list[GradBucket] = []
    model = DistributedDataParallel(parts[0])
    model.register_comm_hook(buckets, _note_bucket)
    for _ in range(_WARM_UP):
        buckets.clear()
        _whole_step(model, parts)
    names: dict[torch.Tensor, str] = {each: name for name, each in parts[0].named_parameters()}
    dtype = str(buckets[0].buffer().dtype).removeprefix("torch.")
    samples = StepSamples(tuple(bucket.buffer().nbytes for bucket in buckets), dtype)
    return samples, [[names[parameter] for parameter in bucket.parameters()] for bucket in buckets]


def _parts(made: Any, where: str) -> Step:
    """Return a model, its loss and its optimizer, from what the user's function returned."""
    parts = made if isinstance(made, tuple) else (made,)
    is_right = len(parts) in (2, 3) and isinstance(parts[0], torch.nn.Module) and callable(parts[1])
    if not is_right or (len(parts) == 3 and not isinstance(parts[2], torch.optim.Optimizer)):
        raise InvalidArgumentError(
            f"{where} must return a model, a function that computes a loss of it, and optionally its"
            f" optimizer, got {made!r:.100}"
        )
    model, loss = parts[:2]
    return model, loss, parts[2] if len(parts) == 3 else torch.optim.SGD(model.parameters(), lr=1e-6)


def _note_bucket(buckets: list[GradBucket], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce nothing, as a communication hook."""
    buckets.append(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _whole_step(model: torch.nn.Module, parts: Step) -> float:
    """Take a step together with the other ranks; return its seconds."""
    _, loss, optimizer = parts
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()
    return time.perf_counter() - start


def _agreed_count(seconds: float, steps: Sequence[Callable[[], None]]) -> int:
    """Return how many times all steps take about ``seconds``, the same on every rank."""
    taken = []
    for _ in range(_WARM_UP):
        start = time.perf_counter()
        for step in steps:
            step()
        taken.append(time.perf_counter() - start)
    count = torch.tensor([seconds / statistics.median(taken)])
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return max(_MIN_STEPS, min(_MAX_STEPS, int(count)))


class _BareStep:
    """Steps of a model that no wrapper has.

    Args:
        members: by bucket, the names of its parameters.
        samples: where the times go.
    """

    def __init__(self, parts: Step, members: Iterable[Iterable[str]], samples: StepSamples) -> None:
        self._model, self._loss, self._optimizer = parts
        self._samples = samples
        self._members = [list(names) for names in members]
        self._moments: dict[str, float] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._noter(name))

    def _noter(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._moments[name] = time.perf_counter()

        return note

    def run(self) -> None:
        """Take a step together with the other ranks, and note its times."""
        dist.barrier()
        start = time.perf_counter()
        self._optimizer.zero_grad()
        zeroed = time.perf_counter()
        loss = self._loss(self._model)
        begun = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        self._optimizer.step()
        samples = self._samples
        samples.forward.append(begun - zeroed)
        samples.backward.append(ended - begun)
        samples.optimizer.append(time.perf_counter() - ended + zeroed - start)
        samples.ready.append(
            [max(self._moments.get(name, begun) for name in names) - begun for names in self._members]
        )
