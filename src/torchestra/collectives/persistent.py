"""Persistent operations, as in MPI-4: set up once, and started repeatedly on the same tensors.

``plan = dist.all_reduce_init(tensor)`` checks its arguments as :func:`torchestra.all_reduce` does, and sends
nothing. ``plan.start()`` begins the operation, ``plan.wait()`` waits for its end, and ``plan()`` does both. A
start counts as a call of the ordinary operation in the group's order. So all ranks must start in the same
order, and a rank may also call the ordinary operation instead.

Arguments are those of the ordinary functions, without ``async_op``. The tensors must keep their memory: a
start refuses a tensor whose storage was resized or replaced. Tensors that are not contiguous are copied on
every start. On a rank that is not in the group the functions warn, and return an operation that does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchestra.arguments.annotations import checked, refuse_type
from torchestra.collectives.group_arguments import member_of, root_of, sender_of
from torchestra.communicator.native_persistent import persistent_collective, persistent_message
from torchestra.communicator.persistent import PersistentOperation
from torchestra.engine.operations import (
    ALL_GATHER,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_TO_ALL_SINGLE,
    BROADCAST,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    Collective,
)
from torchestra.errors import InvalidArgumentError
from torchestra.process_group.group import ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.tensors import checks
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup, default_group

__all__ = [
    "PersistentOperation",
    "all_gather_init",
    "all_gather_into_tensor_init",
    "all_reduce_init",
    "all_to_all_single_init",
    "broadcast_init",
    "recv_init",
    "reduce_scatter_init",
    "reduce_scatter_tensor_init",
    "send_init",
    "start_all",
]

_TEXTS = (str, bytes, bytearray, memoryview)


def _collective(
    row: Collective,
    output: Any,
    input: Any,  # noqa: A002 - the row's word
    group: AnyGroup | None,
    op: ReduceOp | None = None,
    root: tuple[int | None, int | None] = (None, None),
    splits: tuple[Any, Any] = (None, None),
) -> PersistentOperation:
    """Set up any collective; the root is a global rank, or a number in the group."""
    name = f"{row.name}_init"
    member = default_group() if group is None else member_of(group, name, 5)
    if member is None:
        return PersistentOperation(row.name)
    chosen = root_of(member, *root, row.root, name, row.default_root) if row.root else None
    plan = persistent_collective(member.communicator.met(), row, output, input, op, chosen, splits)
    plan.group = member
    return plan


@checked
def all_reduce_init(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: AnyGroup | None = None
) -> PersistentOperation:
    """Set up :func:`torchestra.all_reduce`."""
    return _collective(ALL_REDUCE, tensor, tensor, group, op)


@checked
def broadcast_init(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    group_src: int | None = None,
) -> PersistentOperation:
    """Set up :func:`torchestra.broadcast`."""
    return _collective(BROADCAST, tensor, tensor, group, root=(src, group_src))


@checked
def all_gather_init(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: AnyGroup | None = None
) -> PersistentOperation:
    """Set up :func:`torchestra.all_gather`."""
    return _collective(ALL_GATHER, tensor_list, tensor, group)


@checked
def all_gather_into_tensor_init(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: AnyGroup | None = None
) -> PersistentOperation:
    """Set up :func:`torchestra.all_gather_into_tensor`."""
    return _collective(ALL_GATHER_INTO_TENSOR, output_tensor, input_tensor, group)


@checked
def reduce_scatter_init(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
) -> PersistentOperation:
    """Set up :func:`torchestra.reduce_scatter`."""
    return _collective(REDUCE_SCATTER, output, input_list, group, op)


@checked
def reduce_scatter_tensor_init(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch.distributed's name
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
) -> PersistentOperation:
    """Set up :func:`torchestra.reduce_scatter_tensor`."""
    return _collective(REDUCE_SCATTER_TENSOR, output, input, group, op)


@checked
def all_to_all_single_init(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch.distributed's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup | None = None,
) -> PersistentOperation:
    """Set up :func:`torchestra.all_to_all_single`."""
    splits = (output_split_sizes, input_split_sizes)
    return _collective(ALL_TO_ALL_SINGLE, output, input, group, splits=splits)


@checked
def send_init(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> PersistentOperation:
    """Set up :func:`torchestra.send`; to be called by the sender only."""
    member = default_group() if group is None else member_of(group, "send_init")
    if member is None:
        return PersistentOperation("send")
    return _message(member, "send", tensor, root_of(member, dst, group_dst, "dst", "send_init"), tag)


@checked
def recv_init(
    tensor: torch.Tensor,
    src: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> PersistentOperation:
    """Set up :func:`torchestra.recv`; to be called by the receiver only. ``source_rank()`` is the sender."""
    member = default_group() if group is None else member_of(group, "recv_init")
    if member is None:
        return PersistentOperation("recv")
    return _message(member, "recv", tensor, sender_of(member, src, group_src, "recv_init"), tag)


def _message(
    member: ProcessGroup, name: str, tensor: torch.Tensor, peer: int | None, tag: int
) -> PersistentOperation:
    communicator = member.communicator.met()
    plan = persistent_message(communicator, name, tensor, peer, checks.check_tag(tag, f"{name}_init"))
    plan.group = member
    return plan


def start_all(plans: Sequence[PersistentOperation]) -> None:
    """Start persistent operations, or none of them: sends first, and else in the order of the list.

    Each must be waited for. Collectives of a group run in this order, which must be the same on all ranks.

    Raises:
        InvalidArgumentError: the list holds another object, or an operation twice. Nothing was started.
        NotReadyError: one of them is active. Nothing was started.
        DistError: as from :meth:`PersistentOperation.start`; those before it in that order were started.
    """
    # Not @checked, which would take ten times as long as all the rest.
    # Texts are sequences too, and an empty one holds nothing that is wrong.
    is_list = isinstance(plans, Sequence) and not isinstance(plans, _TEXTS)
    if not is_list or not all(isinstance(plan, PersistentOperation) for plan in plans):
        refuse_type("start_all", "plans", "a list of PersistentOperations", plans)
    if len(plans) == 1:
        plans[0].start()
        return
    if len(set(map(id, plans))) < len(plans):
        raise InvalidArgumentError("start_all: `plans` has an operation twice; make two to have it run twice")
    for plan in plans:
        plan.check()
    # Most sends are over at once while no receive is under way, and then the peers' receives are, too.
    for plan in sorted(plans, key=_begins_late):
        plan.start()


def _begins_late(plan: PersistentOperation) -> bool:
    return plan.name != "send"


for _name in __all__:
    untraced(globals()[_name])
