"""The collectives as functions, with torch.distributed's names, arguments and defaults.

Each is to be called by every rank of the group, in the same order. ``group`` is the default group unless
given; a rank that is not in it gets a warning and None. ``async_op=True`` returns a :class:`Work` at once,
else None is returned when the operation is done. Roots and peers are *global* ranks, or numbers within the
group where the argument's name begins with ``group_``. Tensors are dense CPU tensors, contiguous or not.

Raised by all of them: InvalidArgumentError (nothing was sent, the group stays usable),
CollectiveMismatchError (the ranks called different things; nothing was sent), RankFailedError,
GroupAbortedError and CollectiveTimeoutError (the group can no longer be used), GroupDestroyedError,
NotInitializedError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.overrides import has_torch_function, has_torch_function_unary

from torchestra.arguments.annotations import checked
from torchestra.collectives.group_arguments import member_of, root_of, sender_of
from torchestra.collectives.traced import trace_in_place_of
from torchestra.communicator.work import Work
from torchestra.engine.operations import GATHER, SCATTER
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.tensors import checks
from torchestra.tensors.override import as_tuple, overridden
from torchestra.types import ReduceOp, Timeout, timeout_seconds
from torchestra.world.init import AnyGroup, default_group
from torchestra.world.registry import process_world

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scan",
    "scatter",
    "send",
]


_NO_TAG = 0


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Replace the tensor on every rank by the reduction of all ranks' tensors, bit for bit the same."""
    if has_torch_function_unary(tensor):
        return overridden(all_reduce, (tensor,), locals())
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "all_reduce")
    if member is None:
        return None
    return member.communicator.all_reduce(tensor, op, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Replace the tensor of rank ``dst`` by the reduction of all ranks' tensors; the others do not change."""
    if has_torch_function_unary(tensor):
        return overridden(reduce, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "reduce")
    if member is None:
        return None
    root = root_of(member, dst, group_dst, "dst", "reduce")
    return member.communicator.reduce(tensor, op, root, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Replace the tensor on every rank by that of rank ``src``."""
    if has_torch_function_unary(tensor):
        return overridden(broadcast, (tensor,), locals())
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "broadcast")
    if member is None:
        return None
    # As in send.
    if group_src is None and src.__class__ is int and 0 <= src < member.same_numbers:
        root = src
    else:
        root = root_of(member, src, group_src, "src", "broadcast")
    return member.communicator.broadcast(tensor, root, async_op)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put the tensor of rank p into ``tensor_list[p]`` on every rank. Sizes may differ between ranks."""
    if has_torch_function_unary(tensor):
        return overridden(all_gather, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "all_gather")
    if member is None:
        return None
    return member.communicator.all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put the tensors of all ranks, one after the other, into ``output_tensor`` on every rank.

    The output has as many elements as all inputs together: concatenated in dimension 0, or stacked.
    """
    if has_torch_function_unary(input_tensor):
        return overridden(all_gather_into_tensor, (input_tensor,), locals())
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "all_gather_into_tensor")
    if member is None:
        return None
    return member.communicator.all_gather_into_tensor(output_tensor, input_tensor, async_op)


all_gather_single = all_gather_into_tensor  # torch's newer name


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: AnyGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Put the tensor of rank p into ``gather_list[p]`` on rank ``dst`` (default: rank 0 of the group)."""
    if has_torch_function_unary(tensor):
        return overridden(gather, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "gather")
    if member is None:
        return None
    root = root_of(member, dst, group_dst, "dst", "gather", GATHER.default_root)
    return member.communicator.gather(gather_list, tensor, root, async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: AnyGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Put ``scatter_list[p]`` of rank ``src`` (default: rank 0 of the group) into the tensor of rank p."""
    if has_torch_function_unary(tensor):
        return overridden(scatter, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "scatter")
    if member is None:
        return None
    root = root_of(member, src, group_src, "src", "scatter", SCATTER.default_root)
    return member.communicator.scatter(tensor, scatter_list, root, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put the reduction of all ranks' ``input_list[p]`` into the output of rank p."""
    if has_torch_function_unary(output):
        return overridden(reduce_scatter, (output,), locals())
    member = default_group() if group is None else member_of(group, "reduce_scatter")
    if member is None:
        return None
    return member.communicator.reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch.distributed's name
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the inputs of all ranks and put piece p of the result into the output of rank p."""
    if has_torch_function_unary(input):
        return overridden(reduce_scatter_tensor, (input,), locals())
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "reduce_scatter_tensor")
    if member is None:
        return None
    return member.communicator.reduce_scatter_tensor(output, input, op, async_op)


reduce_scatter_single = reduce_scatter_tensor  # torch's newer name


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send ``input_tensor_list[p]`` to rank p, and receive its tensor into ``output_tensor_list[p]``."""
    if has_torch_function(inputs := as_tuple(input_tensor_list)):
        return overridden(all_to_all, inputs, locals())
    member = default_group() if group is None else member_of(group, "all_to_all")
    if member is None:
        return None
    return member.communicator.all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch.distributed's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send consecutive ranges of the input's rows to the ranks, and receive theirs into the output's rows.

    Split sizes count rows (dimension 0) per rank; None stands for equal ranges.
    """
    if has_torch_function_unary(input):
        return overridden(all_to_all_single, (input,), locals())
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "all_to_all_single")
    if member is None:
        return None
    return member.communicator.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op
    )


def scan(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Replace the tensor of each rank by the reduction of the tensors of ranks up to it, its own included.

    Ranks are ordered by their numbers within the group. This is MPI's inclusive scan; AVG divides by the
    number of ranks in the reduction. Tensors of GPUs go through the host.
    """
    if has_torch_function_unary(tensor):
        return overridden(scan, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "scan")
    if member is None:
        return None
    return member.communicator.scan(tensor, op, async_op)


def exscan(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Replace the tensor of each rank by the reduction of the tensors of the ranks before it.

    The tensor of rank 0 of the group does not change (in MPI's exclusive scan it is undefined). Otherwise as
    :func:`scan`.
    """
    if has_torch_function_unary(tensor):
        return overridden(exscan, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "exscan")
    if member is None:
        return None
    return member.communicator.exscan(tensor, op, async_op)


def barrier(
    group: AnyGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout | None = None,
) -> Work | None:
    """Return when all ranks of the group have called. ``device_ids`` has no meaning on the CPU."""
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "barrier")
    if member is None:
        return None
    if device_ids is not None:
        checks.check_integers(device_ids, "device_ids", "barrier")
    timeout_s = None if timeout is None else timeout_seconds(timeout, "barrier")
    return member.communicator.barrier(async_op, timeout_s)


@checked
def monitored_barrier(
    group: AnyGroup | None = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks; if some do not come in time, rank 0 of the group names them.

    Rank 0 waits for the others, and they wait for its reply. Only rank 0 applies the ``timeout``, by default
    the group's. Other operations of the group do not delay it.

    Args:
        wait_all_ranks: name all ranks that did not come, and not just the first.

    Raises:
        CollectiveTimeoutError: on rank 0: ranks did not come in time; ``missing`` names them.
        RankFailedError: a rank has died.
        GroupAbortedError: on another rank: rank 0 has given up. The group can no longer be used then.
    """
    member = default_group() if group is None else member_of(group, "monitored_barrier")
    if member is not None:
        member.monitored_barrier(timeout, wait_all_ranks)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send the tensor to rank ``dst``, which must receive one of the same dtype and number of elements.

    To be called by the sender only. Returns when the tensor may be changed; the message may not have been
    received yet. Messages with the same tag between two ranks arrive in the order in which they were sent.
    A time-out before anything was sent leaves the group usable.
    """
    if has_torch_function_unary(tensor):
        overridden(send, (tensor,), locals())
        return
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "send")
    if member is None:
        return
    # Asked inline: a call takes longer than the message.
    if group_dst is None and dst.__class__ is int and 0 <= dst < member.same_numbers:
        peer = dst
    else:
        peer = root_of(member, dst, group_dst, "dst", "send")
    member.communicator.send(tensor, peer, tag if tag is _NO_TAG else checks.check_tag(tag, "send"))


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive a tensor from rank ``src`` (default: from any) and return the global rank that sent it.

    To be called by the receiver only; a rank that is not in the group gets -1. A message of another dtype or
    size is discarded with a DistBackendError that describes it. A time-out before anything was received
    leaves the group usable.
    """
    if has_torch_function_unary(tensor):
        return overridden(recv, (tensor,), locals())
    member = process_world.default if group is None and current_thread_rank() is None else None
    if member is None:
        member = default_group() if group is None else member_of(group, "recv")
    if member is None:
        return -1
    # As in send.
    known = group_src is None and src.__class__ is int and 0 <= src < member.same_numbers
    source = src if known else sender_of(member, src, group_src, "recv")
    if tag is not _NO_TAG:
        tag = checks.check_tag(tag, "recv")
    found = member.communicator.recv(tensor, source, tag)
    return src if known else member.to_global_rank(found)  # type: ignore[return-value]


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Begin to :func:`send`; the tensor must not be changed until the work is done."""
    if has_torch_function_unary(tensor):
        return overridden(isend, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "isend")
    if member is None:
        return None
    root = root_of(member, dst, group_dst, "dst", "isend")
    return member.communicator.isend(tensor, root, checks.check_tag(tag, "isend"))


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Begin to :func:`recv`; the tensor must not be touched until the work is done."""
    if has_torch_function_unary(tensor):
        return overridden(irecv, (tensor,), locals())
    member = default_group() if group is None else member_of(group, "irecv")
    if member is None:
        return None
    source = sender_of(member, src, group_src, "irecv")
    return member.communicator.irecv(tensor, source, checks.check_tag(tag, "irecv"))


for _name in __all__:
    trace_in_place_of(globals()[_name])
