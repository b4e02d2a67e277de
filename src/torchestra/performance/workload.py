"""Workloads: what a job does, of which the time is to be predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchestra.engine.operations import COLLECTIVES, DTYPE_BYTES, Collective, Shape
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp

_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_MAX_BYTES = 1 << 36


@dataclass(frozen=True)
class Operation:
    """A collective that all ranks call.

    Attributes:
        name: of the public function.
        nbytes: what each rank puts in, as in ``torchestra bench``; 0 for a barrier.
        dtype: of the tensors, ``"float32"``.
        op: how it reduces, if it does.
        root: if it has one.
        tensors: of an all_reduce, how many tensors the bytes are in, as of a bucket of gradients.
    """

    name: str
    nbytes: int
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0
    tensors: int = 1

    def __post_init__(self) -> None:
        if self.name not in COLLECTIVES:
            raise InvalidArgumentError(
                f"there is no collective {self.name!r}; there are {', '.join(COLLECTIVES)}"
            )
        if not 0 <= self.nbytes <= _MAX_BYTES:
            raise InvalidArgumentError(
                f"{self.name}: bytes must be from 0 to {_MAX_BYTES}, got {self.nbytes}"
            )
        if self.dtype not in DTYPE_BYTES or not hasattr(torch, self.dtype):
            raise InvalidArgumentError(f"{self.name}: there is no dtype {self.dtype!r}")
        ReduceOp(self.op)

    @property
    def row(self) -> Collective:
        """Its row of the table of operations."""
        return COLLECTIVES[self.name]

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Read ``all_reduce:25MB`` or ``all_reduce:25MB:bfloat16``; ``barrier`` has no size.

        Raises:
            InvalidArgumentError: it is something else.
        """
        name, *rest = text.strip().split(":")
        if name in COLLECTIVES and COLLECTIVES[name].input is None and not rest:
            return cls(name, 0)
        if not 1 <= len(rest) <= 2:
            raise InvalidArgumentError(f"an operation is NAME:SIZE or NAME:SIZE:DTYPE, got {text!r}")
        return cls(name, parse_bytes(rest[0]), rest[1] if len(rest) > 1 else "float32")

    def __str__(self) -> str:
        return self.name if self.row.input is None else f"{self.name}:{shown_bytes(self.nbytes)}"


@dataclass(frozen=True)
class Pause:
    """The program's own work between two operations.

    Attributes:
        seconds: by rank, taken again from the first if there are more ranks.
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or not all(math.isfinite(each) and each >= 0 for each in self.seconds):
            raise InvalidArgumentError(f"a pause must have seconds >= 0, got {self.seconds!r:.100}")


@dataclass(frozen=True)
class Step:
    """A training step under DistributedDataParallel.

    Attributes:
        forward_s, backward_s, optimizer_s: the program's work.
        bucket_bytes: of gradients, in the order in which they are reduced.
        ready_s: when each bucket is ready, since backward began.
        dtype: of the gradients.
        overlaps: reductions run while backward goes on.
        bucket_cost_s: of the processor, for each bucket.
        repeats: how many such steps.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    bucket_bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    dtype: str = "float32"
    overlaps: bool = True
    bucket_cost_s: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "optimizer_s", "bucket_cost_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidArgumentError(f"Step.{name} must be >= 0 and finite, got {value}")
        if len(self.ready_s) != len(self.bucket_bytes) or list(self.ready_s) != sorted(self.ready_s):
            raise InvalidArgumentError(
                f"Step.ready_s must rise and have a time for each of {len(self.bucket_bytes)} buckets, got"
                f" {self.ready_s!r:.100}"
            )
        if any(each <= 0 for each in self.bucket_bytes):
            raise InvalidArgumentError(f"Step.bucket_bytes must be above 0, got {self.bucket_bytes!r:.100}")


Workload = Sequence[Operation | Pause] | Step


def parse_bytes(text: str) -> int:
    """Read ``4096``, ``64KB``, ``25MB`` or ``1GB`` (powers of 1024).

    Raises:
        InvalidArgumentError: it is something else.
    """
    upper = text.strip().upper()
    digits = upper.rstrip("KMGB")
    unit = upper[len(digits) :]
    if unit in ("K", "M", "G"):
        unit += "B"
    try:
        number = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise InvalidArgumentError(f"a size is a number of bytes, or of KB, MB or GB, got {text!r}")
    return int(number)


def shown_bytes(nbytes: int) -> str:
    """Return a size for people: ``25MB``."""
    for unit in ("GB", "MB", "KB"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.4g}{unit}"
    return f"{nbytes}B"


def tensors_of(operation: Operation, rank: int, ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a rank's inputs and outputs of an operation. They have addresses, and memory when it is touched.

    Sizes are those of ``torchestra bench``: a whole number of elements for each rank.
    """
    row = operation.row
    if row.input is None or row.output is None:
        return [], []
    dtype: torch.dtype = getattr(torch, operation.dtype)
    count = max(1, operation.nbytes // dtype.itemsize // ranks) * ranks
    piece = count // ranks if row.input.is_list else count
    whole = {Shape.OUTPUT_IS_WHOLE: piece * ranks, Shape.INPUT_IS_WHOLE: piece // ranks}
    out = whole.get(row.shape, piece)
    made = {}
    for parameter, elements in {row.input: piece, row.output: out}.items():
        is_empty = parameter.on_root and rank != operation.root
        number = 0 if is_empty else ranks if parameter.is_list else 1
        made[parameter] = list(torch.empty(number * elements, dtype=dtype).split(elements)) if number else []
    if row.in_place and operation.tensors > 1:
        (tensor,) = made[row.input]
        made[row.input] = list(tensor.tensor_split(min(operation.tensors, tensor.numel())))
    return made[row.input], made[row.output]
