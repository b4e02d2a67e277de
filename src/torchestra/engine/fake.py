"""The engine of the fake world: one rank of a world whose other ranks do not exist.

For tracing a program, and for planning shapes and memory, as any rank of a world of any size. Every operation
returns at once, whatever its time-out. Arguments are checked as always, but for the devices: meta tensors and
fake tensors are accepted like real ones. The world's size costs nothing.

The tensors hold afterwards what they would if the others mirrored this rank:

=========================  ==========================================================================
all_reduce, reduce, scan   this rank's own values: nobody adds to them
broadcast, recv            what they held before (a receive from any rank names the next one)
all_gather, gather         a copy of this rank's tensor from every rank (gather: on the root only)
reduce_scatter             this rank's piece of its own input
scatter                    on the root its own piece, on other ranks what they held before
all_to_all                 from each rank what is sent to it, truncated or padded with zeros to the
                           expected length
=========================  ==========================================================================

(torch's fake group differs in leaving what is received by reduce_scatter and all_to_all as it was.)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch

from torchestra.engine.interface import Ended, Engine
from torchestra.engine.kernels.reductions import combine_tensors
from torchestra.engine.operations import Collective, Shape
from torchestra.types import ReduceOp

Tensors = Sequence[torch.Tensor]


class FakePlan(NamedTuple):
    """The collective; nothing else matters."""

    row: Collective


class FakeEngine(Engine):
    """One rank's engine in a group in which it is alone; see above for what the operations do."""

    is_fake = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def plan(
        self, row: Collective, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> FakePlan:
        return FakePlan(row)

    @torch.no_grad()
    def collective(
        self, plan: FakePlan, inputs: Tensors, outputs: Tensors, timeout_s: float, site: str | None = None
    ) -> None:
        row = plan.row
        if row.in_place or not (inputs and outputs):
            return
        if row.shape is Shape.OUTPUT_IS_WHOLE:
            _repeat(outputs[0], inputs[0], self.size)
        elif row.shape is Shape.INPUT_IS_WHOLE:
            _fill(outputs[0], inputs[0].reshape(self.size, -1)[self.rank])
        elif len(inputs) == len(outputs):
            for output, tensor in zip(outputs, inputs, strict=True):
                _fill(output, tensor)
        elif len(outputs) == 1:
            _fill(outputs[0], inputs[self.rank])
        else:
            for output in outputs:
                _fill(output, inputs[0])

    def barrier(self, timeout_s: float, site: str | None = None) -> None:
        pass

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        pass

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float) -> int:
        return (self.rank + 1) % self.size if rank is None else rank

    def begin_send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Ended) -> None:
        done(SimpleNamespace(error=None, source=-1))

    def begin_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float, done: Ended
    ) -> None:
        done(SimpleNamespace(error=None, source=self.receive(tensor, rank, tag, timeout_s)))

    def complete(self, transfer: None) -> None:
        pass

    def combine(self, target: torch.Tensor, sources: Tensors, op: ReduceOp) -> None:
        if type(target) is torch.Tensor and target.is_cpu:
            combine_tensors(target, sources, op)

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        pass

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        pass

    def close(self) -> None:
        pass


def _fill(output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put the tensor's elements into the output, truncated or padded with zeros."""
    if output.numel() == tensor.numel():
        output.copy_(tensor.reshape(output.shape))
        return
    length = min(output.numel(), tensor.numel())
    filled = torch.zeros_like(output).reshape(-1)
    filled[:length] = tensor.reshape(-1)[:length]
    output.copy_(filled.reshape(output.shape))


def _repeat(output: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
    """Put the tensor's elements into the output, once for each rank."""
    if output.is_contiguous() and output.numel():
        output.view(size, -1).copy_(tensor.reshape(1, -1))
    else:
        output.copy_(tensor.reshape(1, -1).expand(size, tensor.numel()).reshape(output.shape))
