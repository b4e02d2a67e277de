"""Measure a training step of a user's model: when its gradients are ready, and how long the rest takes.

The buckets are those that DistributedDataParallel makes of the model. The times of the parts are those of the
bare model, with a hook on each parameter: nothing is sent, and no rank waits for another while it computes.
Where ranks take turns on a core they are of the processor, so that turns of others are not in them. Whole
steps under DistributedDataParallel are timed in between.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from torchestra.launcher.api import launch
from torchestra.launcher.cores import usable_cores
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.nn.parallel.comm_hooks import GradBucket
from torchestra.performance.calibration import StepCalibration, StepTimes
from torchestra.performance.sampling import summarise

_WARM_UP = 3  # steps; DistributedDataParallel makes its buckets anew after the first
_BLOCK = 4  # steps of a kind that follow each other, the first of which does not count
_MIN_BLOCKS, _MAX_BLOCKS = 3, 60

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
        whole: steps of the model in DistributedDataParallel, each the mean of some that follow each other.
    """

    bucket_bytes: tuple[int, ...]
    dtype: str
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    ready: list[list[float]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


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
    times, widest = [], 0.0
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
                whole_s=every.value("whole"),
            )
        )
        widest = max(widest, every.spread)
    step = StepCalibration(where, found[0].bucket_bytes, found[0].dtype, tuple(times))
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
        parts = _parts(make(), where)
        model = DistributedDataParallel(parts[0])
        whole = partial(_whole_step, model, parts)

        def whole_block() -> None:
            samples.whole.append(_mean_step(whole))

        blocks = [bare.run_block, whole_block]
        for _ in range(_agreed_count(seconds, blocks)):
            for block in blocks:
                block()
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


def _whole_step(model: torch.nn.Module, parts: Step) -> None:
    """Take a step together with the other ranks."""
    _, loss, optimizer = parts
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def _mean_step(step: Callable[[], None]) -> float:
    """Take a block of steps together with the other ranks; return the seconds of one."""
    dist.barrier()
    step()  # on caches that others have used
    start = time.perf_counter()
    for _ in range(_BLOCK - 1):
        step()
    return (time.perf_counter() - start) / (_BLOCK - 1)


def _agreed_count(seconds: float, blocks: Sequence[Callable[[], None]]) -> int:
    """Return how many times all blocks take about ``seconds``, the same on every rank."""
    taken = []
    for _ in range(_WARM_UP):
        start = time.perf_counter()
        for block in blocks:
            block()
        taken.append(time.perf_counter() - start)
    count = torch.tensor([seconds / statistics.median(taken)])
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return max(_MIN_BLOCKS, min(_MAX_BLOCKS, int(count)))


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
        takes_turns = dist.get_world_size() > usable_cores()
        self._now = time.thread_time if takes_turns else time.perf_counter
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._noter(name))

    def _noter(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._moments[name] = self._now()

        return note

    def run_block(self) -> None:
        """Take some steps together with the other ranks, and note the times of all but the first."""
        self._run()
        for _ in range(_BLOCK - 1):
            forward_s, backward_s, optimizer_s, ready_s = self._run()
            self._samples.forward.append(forward_s)
            self._samples.backward.append(backward_s)
            self._samples.optimizer.append(optimizer_s)
            self._samples.ready.append(ready_s)

    def _run(self) -> tuple[float, float, float, list[float]]:
        """Take a step; return the seconds of its parts, and when each bucket was ready."""
        dist.barrier()
        start = self._now()
        self._optimizer.zero_grad()
        zeroed = self._now()
        loss = self._loss(self._model)
        begun = self._now()
        loss.backward()
        ended = self._now()
        self._optimizer.step()
        stepped = self._now()
        ready = [max(self._moments.get(name, begun) for name in names) - begun for names in self._members]
        return begun - zeroed, ended - begun, stepped - ended + zeroed - start, ready
