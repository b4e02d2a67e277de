"""The operations of a group on plain tensors: order, time-outs, layouts, synchronous and not.

Arguments have been checked (checks.py) and ranks are the group's own. The program's order is kept so: a
synchronous operation with nothing pending runs on the calling thread; otherwise, and with
``async_op``, operations queue for the group's progress thread. Tensors that are not contiguous are copied
before and back after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from torchestra.engine.callsites import call_site
from torchestra.engine.local import LocalEngine
from torchestra.engine.operations import Kind
from torchestra.engine.progress import ProgressThread
from torchestra.errors import GroupDestroyedError
from torchestra.types import ReduceOp
from torchestra.work import Work

Operation = Callable[[str | None], list[torch.Tensor]]
"""Runs an operation, given the line that called it if that is not on this thread's stack."""

_CLOSE_SECONDS = 5.0


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if its memory holds its elements one after the other, else such a copy of it."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class Communicator:
    """One rank's end of a group."""

    def __init__(self, engine: LocalEngine, name: str, seconds: float) -> None:
        self.engine = engine
        self.rank = engine.rank
        self.size = engine.size
        self.name = name
        self.seconds = seconds
        self._progress = ProgressThread(f"torchestra-{name}-{engine.rank}")
        # Held while an operation runs, so that two threads of one rank do not mix theirs.
        self._lock = threading.Lock()
        self.closed = False

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Replace the tensor by the reduction of all ranks' tensors."""
        if (
            not async_op
            and op.factor is None
            and not self._progress.pending
            and not self.closed
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
        ):
            with self._lock:
                self.engine.all_reduce(tensor, op, self.seconds if seconds is None else seconds)
            return None

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(tensor) if op.factor is None else tensor.detach() * op.factor
            self.engine.all_reduce(buffer, op, self._limit(seconds), site)
            return self._write_back([tensor], [buffer])

        return self._run(operation, f"all_reduce({op.name})", async_op)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceOp, root: int, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Replace the root's tensor by the reduction of all ranks' tensors."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(tensor) if op.factor is None else tensor.detach() * op.factor
            self.engine.reduce(buffer, op, root, self._limit(seconds), site)
            return self._write_back([tensor], [buffer]) if self.rank == root else [tensor]

        return self._run(operation, f"reduce({op.name})", async_op)

    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Replace every rank's tensor by the root's."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(tensor)
            self.engine.broadcast(buffer, root, self._limit(seconds), site)
            return [tensor] if self.rank == root else self._write_back([tensor], [buffer])

        return self._run(operation, "broadcast", async_op)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Put every rank's tensor into one of the outputs."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = [plain(output) for output in outputs]
            self.engine.all_gather(buffers, plain(tensor), self._limit(seconds), site)
            return self._write_back(outputs, buffers)

        return self._run(operation, "all_gather", async_op)

    def all_gather_flat(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Put every rank's tensor into the output, one after the other."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(output)
            self.engine.all_gather_flat(buffer, plain(tensor), self._limit(seconds), site)
            return self._write_back([output], [buffer])

        return self._run(operation, "all_gather_into_tensor", async_op)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Put every rank's tensor into one of the root's outputs."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = None if outputs is None else [plain(output) for output in outputs]
            self.engine.gather(buffers, plain(tensor), root, self._limit(seconds), site)
            return self._write_back(outputs, buffers) if outputs is not None and buffers is not None else []

        return self._run(operation, "gather", async_op)

    def scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor] | None,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Put one of the root's tensors into each rank's output."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(output)
            sources = None if tensors is None else [plain(tensor) for tensor in tensors]
            nothing = [(0, 0)] * self.size
            sends = nothing if sources is None else [(s.data_ptr(), s.nbytes) for s in sources]
            receives = list(nothing)
            receives[root] = (buffer.data_ptr(), buffer.nbytes)
            self.engine.exchange(
                Kind.scatter, output.dtype, sends, receives, self._limit(seconds), site, root=root
            )
            return self._write_back([output], [buffer])

        return self._run(operation, "scatter", async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Reduce the ranks' tensors for this rank into its output."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(output)
            sources = [plain(tensor) for tensor in tensors]
            if op.factor is not None:
                sources = [source * op.factor for source in sources]
            self.engine.reduce_scatter(buffer, sources, op, self._limit(seconds), site)
            return self._write_back([output], [buffer])

        return self._run(operation, f"reduce_scatter({op.name})", async_op)

    def reduce_scatter_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Reduce the ranks' tensors, and put this rank's piece of the result into its output."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = plain(output)
            source = plain(tensor) if op.factor is None else tensor.detach() * op.factor
            self.engine.reduce_scatter_flat(buffer, source, op, self._limit(seconds), site)
            return self._write_back([output], [buffer])

        return self._run(operation, f"reduce_scatter_tensor({op.name})", async_op)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Send each rank one tensor, and receive one from each."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = [plain(output) for output in outputs]
            sources = [plain(tensor) for tensor in tensors]
            sends = [(source.data_ptr(), source.nbytes) for source in sources]
            receives = [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
            dtype = tensors[0].dtype
            self.engine.exchange(Kind.all_to_all, dtype, sends, receives, self._limit(seconds), site)
            return self._write_back(outputs, buffers)

        return self._run(operation, "all_to_all", async_op)

    def all_to_all_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Send each rank a range of rows, and receive one from each; lengths in rows, None for equal ones."""

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer, source = plain(output), plain(tensor)
            if output_splits is None and input_splits is None:
                self.engine.all_to_all_flat(buffer, source, self._limit(seconds), site)
            else:
                sends = self._ranges(source, input_splits)
                receives = self._ranges(buffer, output_splits)
                self.engine.exchange(
                    Kind.all_to_all, tensor.dtype, sends, receives, self._limit(seconds), site
                )
            return self._write_back([output], [buffer])

        return self._run(operation, "all_to_all_single", async_op)

    def barrier(self, async_op: bool = False, seconds: float | None = None) -> Work | None:
        """Return (or be done) when every rank has called and finished what it called before."""

        def operation(site: str | None) -> list[torch.Tensor]:
            self.engine.barrier(self._limit(seconds), site)
            return []

        return self._run(operation, "barrier", async_op)

    def close(self) -> None:
        """Run what is queued, then leave the group."""
        self.closed = True
        self._progress.close(_CLOSE_SECONDS)
        self.engine.close()

    def _limit(self, seconds: float | None) -> float:
        return self.seconds if seconds is None else seconds

    def _ranges(self, tensor: torch.Tensor, splits: list[int] | None) -> list[tuple[int, int]]:
        """(address, bytes) of consecutive ranges of rows."""
        rows = tensor.shape[0] if tensor.dim() else 1
        lengths = [rows // self.size] * self.size if splits is None else splits
        row_bytes = tensor.nbytes // rows if rows else 0
        address, ranges = tensor.data_ptr(), []
        for length in lengths:
            ranges.append((address, length * row_bytes))
            address += length * row_bytes
        return ranges

    @staticmethod
    def _write_back(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, buffer in zip(tensors, buffers, strict=True):
                if buffer.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(buffer)
        return list(tensors)

    def _run(self, operation: Operation, description: str, async_op: bool) -> Work | None:
        if self.closed:
            raise GroupDestroyedError(f"{description}: rank {self.rank} has destroyed group {self.name!r}")
        if not async_op and not self._progress.pending:
            with self._lock:
                operation(None)
            return None
        work = Work(f"{description} of group {self.name!r}")
        site = call_site()

        def task() -> None:
            try:
                with self._lock:
                    result = operation(site)
            except BaseException as error:
                work.fail(error)
            else:
                work.finish(result)

        self._progress.submit(task)
        if async_op:
            return work
        work.wait()
        return None
