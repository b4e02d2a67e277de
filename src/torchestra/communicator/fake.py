"""The fake world: one rank of a world whose other ranks do not exist.

For tracing a program, and for planning shapes and memory, as any rank of a world of any size. Every operation
returns at once, whatever its time-out. Arguments are checked as always, but for the devices: meta tensors and
fake tensors are as welcome as real ones. The world's size costs nothing.

What the tensors hold afterwards is what they would if the others mirrored this rank:

=========================  ==========================================================================
all_reduce, reduce         this rank's own values: nobody adds to them
broadcast, recv            what they held before
all_gather, gather         a copy of this rank's tensor from every rank (gather: on the root only)
reduce_scatter             this rank's piece of its own input
scatter                    on the root its own piece, elsewhere what was there before
all_to_all                 from each rank what is sent to it, cut off or continued by zeros to the length
                           that is expected
=========================  ==========================================================================

(torch's fake group differs in leaving what is received by reduce_scatter and all_to_all as it was.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.queue import Operation
from torchestra.communicator.work import Work
from torchestra.engine.local import LocalEngine
from torchestra.errors import InvalidArgumentError
from torchestra.tensors import checks, sparse
from torchestra.types import ReduceOp

__all__ = ["FakeCommunicator"]


class _NoEngine:
    """What else is asked of an engine, of one that moves nothing."""

    moves = staticmethod(LocalEngine.moves)
    reduces = staticmethod(LocalEngine.reduces)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def combine(target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
        if type(target) is torch.Tensor and target.is_cpu:
            LocalEngine.combine(target, sources, op)

    @staticmethod
    def sequence_number() -> int:
        return 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        pass


_check = checks.check_is_tensor


def _check_list(tensors: object, parameter: str, size: int, name: str) -> list[torch.Tensor]:
    found = checks.check_tensor_list(tensors, parameter, name)
    if len(found) != size:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` must have one tensor for each of the group's {size} ranks, got"
            f" {len(found)}"
        )
    return found


def _fill(output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Put the tensor's elements into the output, cut off or continued by zeros."""
    with torch.no_grad():
        if output.numel() == tensor.numel():
            output.copy_(tensor.reshape(output.shape))
            return
        length = min(output.numel(), tensor.numel())
        filled = torch.zeros_like(output).reshape(-1)
        filled[:length] = tensor.reshape(-1)[:length]
        output.copy_(filled.reshape(output.shape))


class FakeCommunicator(Communicator):
    """One rank's end of a group in which it is alone; see above for what the operations do."""

    def __init__(self, rank: int, size: int, name: str, seconds: float) -> None:
        super().__init__(cast(LocalEngine, _NoEngine(rank, size)), name, seconds)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        checks.check_op(op, "all_reduce")
        if getattr(tensor, "layout", None) is torch.sparse_coo:
            return self.all_reduce_sparse([tensor], op, async_op, seconds)
        checks.check_reducible(_check(tensor, "tensor", "all_reduce"), op, "all_reduce")
        return self._done("all_reduce", [tensor], async_op)

    def all_reduce_list(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        for index, tensor in enumerate(tensors):
            checks.check_reducible(_check(tensor, f"tensors[{index}]", "all_reduce"), op, "all_reduce")
        return self._done("all_reduce", tensors, async_op)

    def all_reduce_sparse(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        return self._done("all_reduce", sparse.check(tensors, op, "all_reduce"), async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        checks.check_op(op, "reduce")
        checks.check_reducible(_check(tensor, "tensor", "reduce"), op, "reduce")
        return self._done("reduce", [tensor], async_op)

    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        return self._done("broadcast", [_check(tensor, "tensor", "broadcast")], async_op)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        name = "all_gather"
        targets = _check_list(outputs, "tensor_list", self.size, name)
        _check(tensor, "tensor", name)
        checks.check_same_dtype(targets, tensor.dtype, "tensor_list", name)
        checks.check_own_numel(targets, self.rank, tensor.numel(), "tensor_list", name)

        def fill() -> None:
            for target in targets:
                _fill(target, tensor)

        return self._done(name, targets, async_op, fill)

    def all_gather_into_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        name = "all_gather_into_tensor"
        _check(output, "output_tensor", name)
        _check(tensor, "input_tensor", name)
        checks.check_dtype(output, tensor.dtype, "output_tensor", name)
        if output.numel() != tensor.numel() * self.size:
            raise InvalidArgumentError(
                f"{name}: output_tensor has {output.numel()} elements, expected the input's {tensor.numel()}"
                f" times the group's {self.size} ranks"
            )

        @torch.no_grad()
        def fill() -> None:
            if output.is_contiguous() and output.numel():
                output.view(self.size, -1).copy_(tensor.reshape(1, -1))
            else:
                copies = tensor.reshape(1, -1).expand(self.size, tensor.numel())
                output.copy_(copies.reshape(output.shape))

        return self._done(name, [output], async_op, fill)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        targets = self._rooted(outputs, "gather_list", root, "destination", tensor, "gather")

        def fill() -> None:
            for target in targets:
                _fill(target, tensor)

        return self._done("gather", targets, async_op, fill)

    def scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor] | None,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        sources = self._rooted(tensors, "scatter_list", root, "source", output, "scatter")

        def fill() -> None:
            if sources:
                _fill(output, sources[self.rank])

        return self._done("scatter", [output], async_op, fill)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        name = "reduce_scatter"
        checks.check_op(op, name)
        checks.check_reducible(_check(output, "output", name), op, name)
        sources = _check_list(tensors, "input_list", self.size, name)
        checks.check_same_dtype(sources, output.dtype, "input_list", name)
        checks.check_own_numel(sources, self.rank, output.numel(), "input_list", name)
        return self._done(name, [output], async_op, lambda: _fill(output, sources[self.rank]))

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        name = "reduce_scatter_tensor"
        checks.check_op(op, name)
        checks.check_reducible(_check(output, "output", name), op, name)
        checks.check_dtype(_check(tensor, "input", name), output.dtype, "input", name)
        if tensor.numel() != output.numel() * self.size:
            raise InvalidArgumentError(
                f"{name}: input has {tensor.numel()} elements, expected the output's {output.numel()} times"
                f" the group's {self.size} ranks"
            )
        return self._done(
            name, [output], async_op, lambda: _fill(output, tensor.reshape(self.size, -1)[self.rank])
        )

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        name = "all_to_all"
        targets = _check_list(outputs, "output_tensor_list", self.size, name)
        sources = _check_list(tensors, "input_tensor_list", self.size, name)
        checks.check_same_dtype(sources, sources[0].dtype, "input_tensor_list", name)
        checks.check_same_dtype(targets, sources[0].dtype, "output_tensor_list", name)

        def fill() -> None:
            for target, source in zip(targets, sources, strict=True):
                _fill(target, source)

        return self._done(name, targets, async_op, fill)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        name = "all_to_all_single"
        _check(output, "output", name)
        _check(tensor, "input", name)
        checks.check_dtype(output, tensor.dtype, "output", name)
        sent = checks.check_splits(input_splits, "input_split_sizes", tensor, self.size, name)
        expected = checks.check_splits(output_splits, "output_split_sizes", output, self.size, name)

        def fill() -> None:
            if sent == expected and output.shape == tensor.shape:
                _fill(output, tensor)
                return
            for target, source in zip(output.split(expected), tensor.split(sent), strict=True):
                _fill(target, source)

        return self._done(name, [output], async_op, fill)

    def barrier(self, async_op: bool = False, seconds: float | None = None) -> Work | None:
        return self._done("barrier", [], async_op)

    def send(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> None:
        self._done("send", [_check(tensor, "tensor", "send")], False)

    def recv(self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None) -> int:
        self._done("recv", [_check(tensor, "tensor", "recv")], False)
        return self.rank if rank is None else rank

    def isend(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> Work:
        work = self._done("isend", [_check(tensor, "tensor", "isend")], True)
        assert work is not None
        return work

    def irecv(
        self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None
    ) -> Work:
        self._refuse_if_closed("irecv")
        work = Work(f"irecv of group {self.name!r}")
        work.finish([_check(tensor, "tensor", "irecv")], self.rank if rank is None else rank)
        return work

    def _rooted(
        self, tensors: Any, parameter: str, root: int, role: str, like: torch.Tensor, name: str
    ) -> list[torch.Tensor]:
        """The root's list, checked; on the others, which must have none, an empty one."""
        _check(like, "tensor", name)
        if self.rank != root:
            if tensors:
                raise InvalidArgumentError(
                    f"{name}: `{parameter}` must not be specified on ranks other than the {role}"
                )
            return []
        if tensors is None:
            raise InvalidArgumentError(f"{name}: `{parameter}` must be specified on the {role} rank")
        checked = _check_list(tensors, parameter, self.size, name)
        checks.check_same_dtype(checked, like.dtype, parameter, name)
        return checked

    def _done(
        self,
        name: str,
        result: Sequence[torch.Tensor],
        async_op: bool,
        fill: Callable[[], None] = lambda: None,
    ) -> Work | None:
        """Run an operation that consists of ``fill``, at once."""

        def operation(_: str | None) -> list[torch.Tensor]:
            fill()
            return list(result)

        return self.run(operation, name, async_op)

    def _run_or_queue(
        self, operation: Operation, description: str, async_op: bool, operations: int
    ) -> Work | None:
        if not async_op:
            return super()._run_or_queue(operation, description, async_op, operations)
        return Work.finished(f"{description} of group {self.name!r}", operation(None))

    def leave(self, description: str, error: BaseException) -> str:
        return f"rank {self.rank} left {description} with {type(error).__name__}"  # there is nobody to tell

    def check_tensor(
        self, tensor: object, parameter: str, name: str, *, written: bool = False
    ) -> torch.Tensor:
        return _check(tensor, parameter, name)
