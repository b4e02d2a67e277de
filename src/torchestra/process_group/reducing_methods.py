"""The reductions of a group, and its barrier, as methods in torch's C++ form (see forms.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchestra.arguments import options as all_options
from torchestra.arguments.options import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torchestra.communicator import multi_tensor
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.operations import EXSCAN, SCAN, Collective
from torchestra.process_group import tensor_lists as lists
from torchestra.process_group.forms import TensorLists, Tensors, options_from
from torchestra.tensors import checks
from torchestra.types import ReduceOp, Timeout


class ReducingMethods:
    """What ends in a reduction; ``communicator`` is what it runs on, asked for once by each method."""

    communicator: Communicator

    def allreduce(
        self,
        tensors: Tensors | None = None,
        opts: AllreduceOptions | ReduceOp | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        op: ReduceOp | None = None,
        tensor: Tensors | None = None,
    ) -> Work:
        """Replace the tensor on every rank by the reduction of all ranks' tensors.

        Of a list, whose tensors have one dtype and shape, all tensors of all ranks are reduced together, and
        each becomes the result. The result of the Work is the list.
        """
        name = "allreduce"
        options = options_from(AllreduceOptions, opts, name, timeout, reduceOp=op)
        chosen = lists.as_list(*lists.either(tensors, tensor, "tensors", "tensor"), name)
        lists.check_some(chosen, name)
        lists.check_alike(chosen, chosen[0], name)
        communicator = self.communicator
        work = multi_tensor.all_reduce_together(
            communicator, chosen, options.reduceOp, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, chosen)

    def allreduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        opts: AllreduceCoalescedOptions | ReduceOp | Timeout | None = None,
    ) -> Work:
        """:meth:`allreduce` of each tensor of the list on its own, as one operation; they have one dtype."""
        name = "allreduce_coalesced"
        options = options_from(AllreduceCoalescedOptions, opts, name)
        chosen = lists.as_list(lists.not_a_tensor(tensors, "tensors", name), "tensors", name)
        lists.check_some(chosen, name)
        lists.check_same_dtypes(chosen, name)
        work = multi_tensor.all_reduce_coalesced(
            self.communicator, chosen, options.reduceOp, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, chosen)

    def reduce(
        self,
        tensors: Tensors | None = None,
        opts: ReduceOptions | int | Timeout | None = None,
        op: ReduceOp | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
        tensor: Tensors | None = None,
    ) -> Work:
        """Replace the root's tensor by the reduction of all ranks' tensors; a list must have one tensor."""
        name = "reduce"
        options = options_from(ReduceOptions, opts, name, timeout, rootRank=root, reduceOp=op)
        chosen = lists.as_list(*lists.either(tensors, tensor, "tensors", "tensor"), name)
        communicator = self.communicator
        rank = lists.check_root(options.rootRank, communicator.size, name)
        lists.check_root_tensor(options.rootTensor, chosen, name)
        lists.check_single(chosen, "tensor list", name)
        lists.check_dense(chosen, name)
        work = communicator.reduce(chosen[0], options.reduceOp, rank, options.asyncOp, options.seconds(name))
        return work or Work.finished(name, chosen)

    def reduce_scatter(
        self,
        output_tensors: Tensors | None = None,
        input_tensors: TensorLists = (),
        opts: ReduceScatterOptions | ReduceOp | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        op: ReduceOp | None = None,
        input_tensor: Tensors | None = None,
    ) -> Work:
        """Put the reduction of all ranks' tensors for this rank into its output.

        ``reduce_scatter([output], [[for0, for1]], opts)``, or ``reduce_scatter(output, [for0, for1], op)``.
        """
        name = "reduce_scatter"
        options = options_from(ReduceScatterOptions, opts, name, timeout, reduceOp=op)
        outputs = lists.as_list(output_tensors, "output_tensors", name)
        inputs = lists.as_lists(
            *lists.either(input_tensors, input_tensor, "input_tensors", "input_tensor"), name
        )
        communicator = self.communicator
        lists.check_reduce_scatter_lists(outputs, inputs, communicator.size, name)
        work = communicator.reduce_scatter(
            outputs[0], inputs[0], options.reduceOp, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, outputs)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: ReduceScatterOptions | ReduceOp | Timeout | None = None,
    ) -> Work:
        """Reduce the ranks' inputs, and put this rank's piece of the result into its output."""
        name = "reduce_scatter_tensor"
        options = options_from(ReduceScatterOptions, opts, name)
        communicator = self.communicator
        checks.check_is_tensor(output, "output", name)
        checks.check_is_tensor(input, "input", name)
        lists.check_pieces(input, output, communicator.size, name)
        work = communicator.reduce_scatter_tensor(
            output, input, options.reduceOp, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, [output])

    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: Tensors,
        input_tensors: Tensors,
        opts: ReduceScatterOptions | ReduceOp | Timeout | None = None,
    ) -> Work:
        """:meth:`reduce_scatter_tensor` of each pair of the two lists, as one operation."""
        name = "reduce_scatter_tensor_coalesced"
        options = options_from(ReduceScatterOptions, opts, name)
        outputs, tensors = (
            lists.as_list(output_tensors, "output_tensors", name),
            lists.as_list(input_tensors, "input_tensors", name),
        )
        lists.check_pairs(outputs, tensors, name)
        communicator = self.communicator
        for output, tensor in zip(outputs, tensors, strict=True):
            lists.check_pieces(tensor, output, communicator.size, name)
        work = multi_tensor.reduce_scatter_tensor_coalesced(
            communicator, outputs, tensors, options.reduceOp, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, outputs)

    def scan(
        self,
        tensors: Tensors,
        opts: AllreduceOptions | ReduceOp | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        op: ReduceOp | None = None,
    ) -> Work:
        """Replace each rank's tensor by the reduction of those of the ranks up to it."""
        return in_place(self.communicator, SCAN, tensors, opts, timeout, op)

    def exscan(
        self,
        tensors: Tensors,
        opts: AllreduceOptions | ReduceOp | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        op: ReduceOp | None = None,
    ) -> Work:
        """Replace each rank's tensor by the reduction of those of the ranks before it; rank 0's stays."""
        return in_place(self.communicator, EXSCAN, tensors, opts, timeout, op)

    def barrier(
        self, opts: BarrierOptions | Timeout | None = None, *, timeout: Timeout | None = None
    ) -> Work:
        """Be done when every rank has called this, and all that the group's ranks called before is done."""
        options = options_from(BarrierOptions, opts, "barrier", timeout)
        work = self.communicator.barrier(options.asyncOp, options.seconds("barrier"))
        return work or Work.finished("barrier", [])


def in_place(
    communicator: Communicator,
    row: Collective,
    tensors: Tensors,
    opts: Any = None,
    timeout: Timeout | None = None,
    op: ReduceOp | None = None,
) -> Work:
    """Run a collective that replaces one tensor of each rank, as its method in torch's C++ form."""
    name, values = row.method, {"reduceOp": op} if row.reduces else {}
    taken = options_from(getattr(all_options, row.options), opts, name, timeout, **values)
    chosen = lists.as_list(tensors, "tensors", name)
    lists.check_single(chosen, "tensor list", name)
    lists.check_dense(chosen, name)
    work = communicator.collective(
        row,
        chosen[0],
        chosen[0],
        getattr(taken, "reduceOp", None),
        async_op=taken.asyncOp,
        timeout_s=taken.seconds(name),
    )
    return work or Work.finished(name, chosen)
