"""The operations of a group on tensors: argument checks, time-outs, layouts, synchronous and not.

Ranks are the group's own. Tensors that are not contiguous are copied before and back after (contiguity.py);
host_staging.py does that for those of GPUs, unless their operations are delegated (device_routing.py).
point_to_point.py has messages between two ranks, queue.py says when an operation runs, multi_tensor.py has
operations on more than one tensor per rank.

fast_path.py has shorter ways through the commonest cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.communicator.device_routing import any_device
from torchestra.communicator.host_staging import on_cpu
from torchestra.communicator.point_to_point import Messaging
from torchestra.communicator.work import Work
from torchestra.engine.local import Plan
from torchestra.engine.operations import Kind
from torchestra.errors import InvalidArgumentError
from torchestra.tensors import checks, sparse
from torchestra.tensors.contiguity import made_plain, write_back
from torchestra.tensors.override import overridable
from torchestra.types import ReduceOp


class Communicator(Messaging):
    """One rank's end of a group. Every method is to be called by all ranks, in the same order."""

    @overridable
    @any_device
    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Replace the tensor by the reduction of all ranks' tensors."""
        name = "all_reduce"
        if getattr(tensor, "layout", None) is torch.sparse_coo:
            return self.all_reduce_sparse([tensor], op, async_op, seconds)
        self._check_reduction(tensor, "tensor", op, name)
        plan = self.plan(Kind.all_reduce, tensor.dtype, op)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = self._scaled(tensor, op)
            self.engine.all_reduce(buffer, plan, self.limit(seconds), site)
            return write_back([tensor], [buffer])

        return self.run(operation, f"{name}({op.name})", async_op, reads=[tensor])

    @any_device
    def all_reduce_list(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """:meth:`all_reduce` of each of some tensors of one dtype, as one operation; nothing is packed.

        The ranks' lists must have as many elements in all; how these are cut into tensors is not compared.
        """
        name = "all_reduce"
        for index, tensor in enumerate(tensors):
            self._check_reduction(tensor, f"tensors[{index}]", op, name)
        plan = self.plan(Kind.all_reduce, tensors[0].dtype, op)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = [self._scaled(tensor, op) for tensor in tensors]
            self.engine.all_reduce_iovec(buffers, plan, self.limit(seconds), site)
            return write_back(tensors, buffers)

        return self.run(operation, f"{name}({op.name}, {len(tensors)} tensors)", async_op, reads=tensors)

    def all_reduce_sparse(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Replace each of some sparse COO tensors by the sum of all of them on all ranks (only SUM)."""
        name = "all_reduce"
        checked = sparse.check(on_cpu(tensors), checks.check_op(op, name), name)
        self._refuse_if_closed(name)

        def operation(site: str | None) -> list[torch.Tensor]:
            sparse.all_reduce(self.engine, checked, self.limit(seconds), site)
            with torch.no_grad():
                for tensor, twin in zip(tensors, checked, strict=True):
                    if tensor is not twin:
                        tensor.copy_(twin)  # not its detach(), which would get entries of its own
            return list(tensors)

        return self.run(operation, f"{name}({op.name}, sparse)", async_op, sparse.OPERATIONS, tensors)

    @overridable
    @any_device
    def reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Replace the root's tensor by the reduction of all ranks' tensors."""
        name = "reduce"
        self._check_reduction(tensor, "tensor", op, name)
        plan = self.plan(Kind.reduce, tensor.dtype, op, root)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = self._scaled(tensor, op)
            self.engine.all_reduce(buffer, plan, self.limit(seconds), site)
            return write_back([tensor], [buffer]) if self.rank == root else [tensor]

        return self.run(operation, f"{name}({op.name})", async_op, reads=[tensor])

    @overridable
    @any_device
    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Replace every rank's tensor by the root's."""
        checks.check_tensor(tensor, "tensor", "broadcast", written=True)
        plan = self.plan(Kind.broadcast, tensor.dtype, root=root)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = made_plain(tensor)
            self.engine.broadcast(buffer, plan, self.limit(seconds), site)
            return [tensor] if self.rank == root else write_back([tensor], [buffer])

        return self.run(operation, "broadcast", async_op, reads=[tensor])

    @overridable
    @any_device
    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Put every rank's tensor into one of the outputs; sizes may differ between ranks."""
        name = "all_gather"
        given = outputs
        outputs, tensor = checks.in_reals(outputs, tensor)
        targets = checks.check_list(outputs, "tensor_list", self.size, name, written=True)
        checks.check_tensor(tensor, "tensor", name)
        checks.check_same_dtype(targets, tensor.dtype, "tensor_list", name)
        checks.check_own_numel(targets, self.rank, tensor.numel(), "tensor_list", name)
        plan = self.plan(Kind.all_gather, tensor.dtype)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = [made_plain(target) for target in targets]
            self.engine.all_gather(buffers, made_plain(tensor), plan, self.limit(seconds), site)
            write_back(targets, buffers)
            return list(given)

        return self.run(operation, name, async_op, reads=[tensor])

    @overridable
    @any_device
    def all_gather_into_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        """Put every rank's tensor into the output, one after the other."""
        name = "all_gather_into_tensor"
        given = output
        output, tensor = checks.in_reals(output, tensor)
        checks.check_tensor(output, "output_tensor", name, written=True)
        checks.check_tensor(tensor, "input_tensor", name)
        checks.check_dtype(output, tensor.dtype, "output_tensor", name)
        if output.numel() != tensor.numel() * self.size:
            raise InvalidArgumentError(
                f"{name}: output_tensor has {output.numel()} elements, expected the input's {tensor.numel()}"
                f" times the group's {self.size} ranks"
            )
        plan = self.plan(Kind.all_gather, tensor.dtype)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = made_plain(output)
            self.engine.all_gather_flat(buffer, made_plain(tensor), plan, self.limit(seconds), site)
            write_back([output], [buffer])
            return [given]

        return self.run(operation, name, async_op, reads=[tensor])

    @overridable
    @any_device
    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Put every rank's tensor into one of the root's outputs."""
        name = "gather"
        given = outputs
        outputs, tensor = checks.in_reals(outputs, tensor)
        checks.check_tensor(tensor, "tensor", name)
        targets = checks.check_rooted_list(
            outputs, "gather_list", self.rank == root, "destination", tensor, self.size, name, written=True
        )
        plan = self.plan(Kind.gather, tensor.dtype, root=root)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = None if targets is None else [made_plain(target) for target in targets]
            self.engine.gather(buffers, made_plain(tensor), plan, self.limit(seconds), site)
            if given is None or targets is None or buffers is None:
                return []
            write_back(targets, buffers)
            return list(given)

        return self.run(operation, name, async_op, reads=[tensor])

    @overridable
    @any_device
    def scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor] | None,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Put one of the root's tensors into each rank's output."""
        name = "scatter"
        given = output
        tensors, output = checks.in_reals(tensors, output)
        checks.check_tensor(output, "tensor", name, written=True)
        sources = checks.check_rooted_list(
            tensors, "scatter_list", self.rank == root, "source", output, self.size, name
        )
        plan = self.plan(Kind.scatter, output.dtype, root=root)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = made_plain(output)
            plain = [made_plain(source) for source in sources or ()]
            sends = [(source.data_ptr(), source.nbytes) for source in plain] or [(0, 0)] * self.size
            receives = [(0, 0)] * self.size
            receives[root] = (buffer.data_ptr(), buffer.nbytes)
            self.engine.exchange(plan, sends, receives, self.limit(seconds), site)
            write_back([output], [buffer])
            return [given]

        return self.run(operation, name, async_op, reads=sources or [output])

    @overridable
    @any_device
    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Reduce the ranks' tensors for this rank into its output; sizes may differ between ranks."""
        name = "reduce_scatter"
        self._check_reduction(output, "output", op, name)
        sources = checks.check_list(tensors, "input_list", self.size, name)
        checks.check_same_dtype(sources, output.dtype, "input_list", name)
        checks.check_own_numel(sources, self.rank, output.numel(), "input_list", name)
        plan = self.plan(Kind.reduce_scatter, output.dtype, op)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = made_plain(output)
            plain = [self._scaled(source, op) for source in sources]
            self.engine.reduce_scatter(buffer, plain, plan, self.limit(seconds), site)
            return write_back([output], [buffer])

        return self.run(operation, f"{name}({op.name})", async_op, reads=sources)

    @overridable
    @any_device
    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Reduce the ranks' tensors, and put this rank's piece of the result into its output."""
        name = "reduce_scatter_tensor"
        self._check_reduction(output, "output", op, name)
        checks.check_tensor(tensor, "input", name)
        checks.check_dtype(tensor, output.dtype, "input", name)
        if tensor.numel() != output.numel() * self.size:
            raise InvalidArgumentError(
                f"{name}: input has {tensor.numel()} elements, expected the output's {output.numel()}"
                f" times the group's {self.size} ranks"
            )
        plan = self.plan(Kind.reduce_scatter, output.dtype, op)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer = made_plain(output)
            self.engine.reduce_scatter_flat(buffer, self._scaled(tensor, op), plan, self.limit(seconds), site)
            return write_back([output], [buffer])

        return self.run(operation, f"{name}({op.name})", async_op, reads=[tensor])

    @overridable
    @any_device
    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Send each rank one tensor, and receive one from each."""
        name = "all_to_all"
        given = outputs
        outputs, _ = checks.in_reals(outputs, None)
        tensors, _ = checks.in_reals(tensors, None)
        targets = checks.check_list(outputs, "output_tensor_list", self.size, name, written=True)
        sources = checks.check_list(tensors, "input_tensor_list", self.size, name)
        dtype = sources[0].dtype
        checks.check_same_dtype(sources, dtype, "input_tensor_list", name)
        checks.check_same_dtype(targets, dtype, "output_tensor_list", name)
        plan = self.plan(Kind.all_to_all, dtype)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffers = [made_plain(target) for target in targets]
            plain = [made_plain(source) for source in sources]
            sends = [(source.data_ptr(), source.nbytes) for source in plain]
            receives = [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
            self.engine.exchange(plan, sends, receives, self.limit(seconds), site)
            write_back(targets, buffers)
            return list(given)

        return self.run(operation, name, async_op, reads=sources)

    @overridable
    @any_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        """Send each rank a range of rows, and receive one from each; lengths in rows, None for equal ones."""
        name = "all_to_all_single"
        given = output
        output, tensor = checks.in_reals(output, tensor)
        checks.check_tensor(output, "output", name, written=True)
        checks.check_tensor(tensor, "input", name)
        checks.check_dtype(output, tensor.dtype, "output", name)
        sent = checks.check_splits(input_splits, "input_split_sizes", tensor, self.size, name)
        expected = checks.check_splits(output_splits, "output_split_sizes", output, self.size, name)
        plan = self.plan(Kind.all_to_all, tensor.dtype)

        def operation(site: str | None) -> list[torch.Tensor]:
            buffer, source = made_plain(output), made_plain(tensor)
            sends, receives = self._ranges(source, sent), self._ranges(buffer, expected)
            self.engine.exchange(plan, sends, receives, self.limit(seconds), site)
            write_back([output], [buffer])
            return [given]

        return self.run(operation, name, async_op, reads=[tensor])

    def barrier(self, async_op: bool = False, seconds: float | None = None) -> Work | None:
        """Return (or be done) when every rank has called and finished what it called before."""

        def operation(site: str | None) -> list[torch.Tensor]:
            self.engine.barrier(self.limit(seconds), site)
            return []

        return self.run(operation, "barrier", async_op)

    def settle(self, seconds: float) -> None:
        """Wait until what is queued has ended, at most so long, and have messages see an abort now."""
        if self.delegation is not None:
            self.delegation.settle(seconds)
        self._progress.drain(seconds)
        self.engine.mailbox.look()

    def close(self) -> None:
        if self.delegation is not None:
            self.delegation.close()
        super().close()

    # -- shared by the operations

    def check_tensor(
        self, tensor: object, parameter: str, name: str, *, written: bool = False
    ) -> torch.Tensor:
        """Refuse what this group cannot move; see :func:`checks.check_tensor`."""
        return checks.check_tensor(tensor, parameter, name, written=written)

    def _check_reduction(self, tensor: torch.Tensor, parameter: str, op: ReduceOp, name: str) -> None:
        checks.check_op(op, name)
        checks.check_tensor(tensor, parameter, name, written=True)
        checks.check_reducible(tensor, op, name)

    def plan(
        self, kind: Kind, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> Plan:
        """What the engine needs to know of an operation; GroupDestroyedError if the group is closed."""
        self._refuse_if_closed(kind.name)
        return self.engine.plan(kind, dtype, op, root)

    def _scaled(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if op.factor is None:
            return made_plain(tensor)
        scaled = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
        self.engine.scale(scaled, op.factor)
        return scaled

    def _ranges(self, tensor: torch.Tensor, splits: list[int]) -> list[tuple[int, int]]:
        """(address, bytes) of consecutive ranges of rows."""
        rows = sum(splits)
        row_bytes = tensor.nbytes // rows if rows else 0
        address, ranges = tensor.data_ptr(), []
        for length in splits:
            ranges.append((address, length * row_bytes))
            address += length * row_bytes
        return ranges
