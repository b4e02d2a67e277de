"""The operations that move tensors, as methods in torch's C++ form (see forms.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchestra.arguments.options import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)
from torchestra.communicator import multi_tensor
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.process_group import tensor_lists as lists
from torchestra.process_group.forms import TensorLists, Tensors, options_from
from torchestra.tensors import checks
from torchestra.types import Timeout


class MovingMethods:
    """What only moves tensors; ``communicator`` is what it runs on, asked for once by each method."""

    communicator: Communicator

    def broadcast(
        self,
        tensors: Tensors | None = None,
        opts: BroadcastOptions | int | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
        tensor: Tensors | None = None,
    ) -> Work:
        """Replace every rank's tensor by the root's.

        Of a list, whose tensors have one dtype and shape, the root's tensor number ``rootTensor`` becomes the
        value of all tensors on all ranks.
        """
        name = "broadcast"
        options = options_from(BroadcastOptions, opts, name, timeout, rootRank=root)
        chosen = lists.as_list(*lists.either(tensors, tensor, "tensors", "tensor"), name)
        communicator = self.communicator
        rank = lists.check_root(options.rootRank, communicator.size, name)
        number = lists.check_root_tensor(options.rootTensor, chosen, name)
        lists.check_dense(chosen, name)
        lists.check_alike(chosen, chosen[number], name)
        work = multi_tensor.broadcast_together(
            communicator, chosen, rank, number, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, chosen)

    def allgather(
        self,
        output_tensors: TensorLists,
        input_tensors: Tensors | None = None,
        opts: AllgatherOptions | Timeout | None = None,
        *,
        input_tensor: Tensors | None = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Put every rank's tensor into one of the outputs: ``allgather([[out0, out1]], [tensor])``.

        Of n input tensors on each rank, alike in dtype and shape, each of n lists of outputs receives
        all: those of rank 0 in their order, then those of rank 1, and so on. The short form is
        ``allgather([out0, out1], tensor)``. The result of the Work is the list of outputs, of several
        inputs the list of lists.
        """
        name = "allgather"
        options = options_from(AllgatherOptions, opts, name, timeout)
        tensors = lists.as_list(
            *lists.either(input_tensors, input_tensor, "input_tensors", "input_tensor"), name
        )
        outputs = lists.as_lists(output_tensors, "output_tensors", name)
        communicator = self.communicator
        lists.check_gather_lists(outputs, tensors, communicator.size, name)
        work = multi_tensor.all_gather_together(
            communicator, outputs, tensors, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, outputs[0] if len(outputs) == 1 else outputs)

    def allgather_coalesced(
        self,
        output_lists: TensorLists,
        input_list: Tensors,
        opts: AllgatherOptions | Timeout | None = None,
    ) -> Work:
        """Put input i of rank p into ``output_lists[p][i]`` on every rank; inputs may differ in dtype."""
        name = "allgather_coalesced"
        options = options_from(AllgatherOptions, opts, name)
        tensors = lists.as_list(lists.not_a_tensor(input_list, "input_list", name), "input_list", name)
        outputs = lists.as_lists(output_lists, "output_lists", name)
        communicator = self.communicator
        lists.check_coalesced_lists(outputs, tensors, communicator.size, name)
        work = multi_tensor.all_gather_coalesced(
            communicator, outputs, tensors, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, outputs)

    def allgather_into_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        opts: AllgatherOptions | Timeout | None = None,
    ) -> Work:
        """Put every rank's tensor, one after the other, into the output."""
        name = "allgather_into_tensor"
        options = options_from(AllgatherOptions, opts, name)
        communicator = self.communicator
        checks.check_is_tensor(output, "output", name)
        checks.check_is_tensor(input, "input", name)
        lists.check_pieces(output, input, communicator.size, name)
        work = communicator.all_gather_into_tensor(output, input, options.asyncOp, options.seconds(name))
        return work or Work.finished(name, [output])

    def allgather_into_tensor_coalesced(
        self,
        output_lists: Tensors,
        input_list: Tensors,
        opts: AllgatherOptions | Timeout | None = None,
    ) -> Work:
        """:meth:`allgather_into_tensor` of each pair of the two lists, as one operation."""
        name = "allgather_into_tensor_coalesced"
        options = options_from(AllgatherOptions, opts, name)
        outputs, tensors = (
            lists.as_list(output_lists, "output_lists", name),
            lists.as_list(input_list, "input_list", name),
        )
        lists.check_pairs(outputs, tensors, name)
        communicator = self.communicator
        for output, tensor in zip(outputs, tensors, strict=True):
            lists.check_pieces(output, tensor, communicator.size, name)
        work = multi_tensor.all_gather_into_tensor_coalesced(
            communicator, outputs, tensors, options.asyncOp, options.seconds(name)
        )
        return work or Work.finished(name, outputs)

    def gather(
        self,
        output_tensors: TensorLists,
        input_tensors: Tensors | None = None,
        opts: GatherOptions | int | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
        input_tensor: Tensors | None = None,
    ) -> Work:
        """Put every rank's tensor into one of the root's outputs: ``gather([[out0, out1]], [tensor], opts)``.

        On the other ranks ``output_tensors`` is empty. The short form: ``gather([out0, out1], t, root)``.
        The result of the Work is the list of outputs, and empty elsewhere.
        """
        name = "gather"
        options = options_from(GatherOptions, opts, name, timeout, rootRank=root)
        tensors = lists.as_list(
            *lists.either(input_tensors, input_tensor, "input_tensors", "input_tensor"), name
        )
        outputs = lists.as_lists(output_tensors, "output_tensors", name)
        communicator = self.communicator
        rank = lists.check_root(options.rootRank, communicator.size, name)
        lists.check_single(tensors, "input tensor list", name)
        lists.check_dense(tensors, name)
        is_root = communicator.rank == rank
        targets = lists.check_rooted(outputs, tensors[0], is_root, communicator.size, "output", name)
        work = communicator.gather(targets, tensors[0], rank, options.asyncOp, options.seconds(name))
        return work or Work.finished(name, targets or [])

    def scatter(
        self,
        output_tensors: Tensors | None = None,
        input_tensors: TensorLists = (),
        opts: ScatterOptions | int | Timeout | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
        output_tensor: Tensors | None = None,
    ) -> Work:
        """Put one of the root's tensors into each rank's: ``scatter([output], [[in0, in1]], opts)``.

        On the other ranks ``input_tensors`` is empty. The short form: ``scatter(output, [in0, in1], root)``.
        """
        name = "scatter"
        options = options_from(ScatterOptions, opts, name, timeout, rootRank=root)
        outputs = lists.as_list(
            *lists.either(output_tensors, output_tensor, "output_tensors", "output_tensor"), name
        )
        inputs = lists.as_lists(input_tensors, "input_tensors", name)
        communicator = self.communicator
        rank = lists.check_root(options.rootRank, communicator.size, name)
        lists.check_single(outputs, "output tensor list", name)
        lists.check_dense(outputs, name)
        is_root = communicator.rank == rank
        sources = lists.check_rooted(inputs, outputs[0], is_root, communicator.size, "input", name)
        work = communicator.scatter(outputs[0], sources, rank, options.asyncOp, options.seconds(name))
        return work or Work.finished(name, outputs)

    def alltoall(
        self,
        output_tensors: Tensors | None = None,
        input_tensors: Tensors | None = None,
        opts: AllToAllOptions | Timeout | None = None,
        *,
        output_tensor: Tensors | None = None,
        input_tensor: Tensors | None = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Send each rank one tensor of the second list, and receive one from each into the first."""
        name = "alltoall"
        options = options_from(AllToAllOptions, opts, name, timeout)
        outputs = lists.as_list(
            *lists.either(output_tensors, output_tensor, "output_tensors", "output_tensor"), name
        )
        inputs = lists.as_list(
            *lists.either(input_tensors, input_tensor, "input_tensors", "input_tensor"), name
        )
        communicator = self.communicator
        lists.check_exchange(outputs, inputs, communicator.size, name)
        work = communicator.all_to_all(outputs, inputs, options.asyncOp, options.seconds(name))
        return work or Work.finished(name, outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Sequence[int] | None = (),
        input_split_sizes: Sequence[int] | None = (),
        opts: AllToAllOptions | Timeout | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Send each rank a range of the input's rows, and receive a range of the output's from each.

        Split sizes count rows for each rank; empty ones stand for equal ranges.
        """
        name = "alltoall_base"
        options = options_from(AllToAllOptions, opts, name, timeout)
        checks.check_is_tensor(output, "output", name)
        checks.check_is_tensor(input, "input", name)
        lists.check_dense([output, input], name)
        lists.check_same_type(output, input, name)
        work = self.communicator.all_to_all_single(
            output,
            input,
            lists.splits_or_none(output_split_sizes),
            lists.splits_or_none(input_split_sizes),
            options.asyncOp,
            options.seconds(name),
        )
        return work or Work.finished(name, [output])
