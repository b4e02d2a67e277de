"""Several operations as one: coalesced collectives, blocks of them, and batches of messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.overrides import has_torch_function

from torchestra.arguments.annotations import checked
from torchestra.arguments.options import AllgatherOptions, AllreduceCoalescedOptions
from torchestra.collectives.functions import irecv, isend
from torchestra.collectives.group_arguments import member_of
from torchestra.collectives.traced import is_message_traced, traced_member
from torchestra.communicator.device_routing import serving_message
from torchestra.communicator.queue import describe_coalesced
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError, shown
from torchestra.process_group import NonMember
from torchestra.system.untraced import untraced
from torchestra.tensors import checks
from torchestra.tensors.override import as_tuple, overridden
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup, default_group

__all__ = [
    "CoalescingManager",
    "P2POp",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "batch_isend_irecv",
    "coalescing_manager",
]


@checked
def all_reduce_coalesced(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> torch.futures.Future[Any] | None:
    """Replace each tensor on every rank by the reduction of all ranks' tensors at its place in the list.

    To be called by all ranks, with tensors of one dtype and of the same shapes in the same order. Complex
    tensors go with real ones of their parts' dtype.

    Returns:
        With ``async_op`` a future of the list of tensors; else, and on a rank that is not in the group, None.

    Raises:
        InvalidArgumentError: the list is empty, or dtypes differ in it; and as the functions of
            collectives.py.
    """
    if has_torch_function(relevant := as_tuple(tensors)):
        return overridden(all_reduce_coalesced, relevant, locals())
    name = "all_reduce_coalesced"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return None
    given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    chosen = checks.check_tensor_list(given, "tensors", name)
    for index, tensor in enumerate(chosen):
        if tensor.is_complex():
            checks.check_reducible(tensor, checks.check_op(op, name), "all_reduce")
            chosen[index] = torch.view_as_real(tensor)
    checks.check_same_dtype(chosen, chosen[0].dtype if chosen else torch.float32, "tensors", name)
    options = AllreduceCoalescedOptions(reduceOp=op, asyncOp=async_op)
    work = member.allreduce_coalesced(chosen, options)
    return work.get_future() if async_op else None


@checked
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: AnyGroup | None = None,
    async_op: bool = False,
) -> torch.futures.Future[Any] | None:
    """Put input i of rank p into ``output_tensor_lists[p][i]`` on every rank.

    To be called by all ranks, with inputs of one dtype and of the same shapes in the same order.

    Returns:
        With ``async_op`` a future of the lists of outputs; else, and on a rank outside of the group, None.

    Raises:
        InvalidArgumentError: there are not as many lists as ranks, or one does not match the inputs; and as
            the functions of collectives.py.
    """
    if has_torch_function(relevant := as_tuple(input_tensor_list)):
        return overridden(all_gather_coalesced, relevant, locals())
    name = "all_gather_coalesced"
    member = default_group() if group is None else member_of(group, name)
    if member is None:
        return None
    inputs = checks.check_tensor_list(input_tensor_list, "input_tensor_list", name)
    lists = [
        checks.check_tensor_list(row, "output_tensor_lists", name)
        for row in checks.check_is_list(output_tensor_lists, "output_tensor_lists", name)
    ]
    if inputs:
        checks.check_same_dtype(inputs, inputs[0].dtype, "input_tensor_list", name)
    for row in lists:
        if row:
            checks.check_same_dtype(row, row[0].dtype, "output_tensor_lists", name)
    work = member.allgather_coalesced(lists, inputs, AllgatherOptions(asyncOp=async_op))
    return work.get_future() if async_op else None


class CoalescingManager:
    """Collect the works of a block; :func:`coalescing_manager` gives it to the block.

    Attributes:
        works: the Works to wait for; filled at the end of the block if its operations are asynchronous.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None) -> None:
        """Add another Work to those that :meth:`wait` waits for."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait until all works are done; raise the error of the first that has failed."""
        for work in self.works:
            work.wait()


@checked
@contextlib.contextmanager
def coalescing_manager(
    group: AnyGroup | None = None, device: torch.device | str | None = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Run the collectives that the block calls on a group as one operation, at its end.

    To be used by all ranks alike. In the block the collectives check their arguments and return at once; a
    Work that one returns (``async_op=True``) is done with the others. They may be of any kinds. Messages, and
    calls from other threads, are not held back.

    If the block ends with an exception, no collected operation is run. The other ranks may wait for them, so
    the group is aborted if any were collected.

    If the ranks' calls do not match in one of the operations, every rank raises CollectiveMismatchError after
    the others have been run.

    Args:
        group: default: the default group.
        device: has no meaning here.
        async_ops: whether the end of the block only begins the operation; ``wait()`` of the manager that the
            block is given waits for it.
    """
    member = default_group() if group is None else member_of(group, "coalescing_manager")
    manager = CoalescingManager()
    if member is None:
        yield manager
        return
    communicator = member.communicator
    parts = [communicator]
    if communicator.delegation is not None:
        parts.append(communicator.delegation.communicator())
    with contextlib.ExitStack() as stack:
        collected = [stack.enter_context(part.queue.coalescing()) for part in parts]
        try:
            yield manager
        except BaseException as error:
            # For any error: one that these operations did not cause may be this rank's alone.
            if steps := [step for steps in collected for step in steps]:
                communicator.queue.leave(describe_coalesced(steps), error)
            raise
    for part, steps in zip(parts, collected, strict=True):
        if steps:
            manager.append(part.queue.run_coalesced(steps, describe_coalesced(steps), async_ops))


class P2POp:
    """A message to send or receive, for :func:`batch_isend_irecv`.

    Args:
        op: ``torchestra.isend`` or ``torchestra.irecv``.
        tensor: the tensor to send, or to receive into.
        peer: the other rank's global number, or instead
        group_peer: its number in the group.
        group: default: the default group.
        tag: of the message.

    Raises:
        InvalidArgumentError: ``op`` is another function, or the peer is not given or does not exist.
    """

    @checked
    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: AnyGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise InvalidArgumentError(
                "P2POp: Invalid ``op``. Expected ``op`` to be torchestra.isend or torchestra.irecv, got"
                f" {shown(op)}"
            )
        self.op = op
        self.tensor = checks.check_is_tensor(tensor, "tensor", "P2POp")
        self.group: AnyGroup = default_group() if group is None else group
        self.tag = checks.check_tag(tag, "P2POp")
        if (peer is None) == (group_peer is None):
            raise InvalidArgumentError("P2POp: give `peer` or `group_peer`, and not both")
        if isinstance(self.group, NonMember):
            self.peer = self.group_peer = -1
        elif peer is not None:
            self.peer, self.group_peer = peer, self.group.to_group_rank(peer, "peer", "P2POp")
        else:
            self.group_peer = checks.check_rank(group_peer, self.group.size(), "group_peer", "P2POp")
            self.peer = self.group.to_global_rank(self.group_peer)

    def serving(self) -> Any:
        """Return the communicator of the tensor's device, if it serves this message; else None."""
        if isinstance(self.group, NonMember):
            return None
        return serving_message(self.group.communicator, self.tensor, self.tag)

    def begin(self) -> Work | None:
        """Begin to send or receive; on a rank that is not in the group, warn and return None."""
        if isinstance(self.group, NonMember):
            return self.op(self.tensor, group=self.group)
        rank = {"group_dst" if self.op is isend else "group_src": self.group_peer}
        return self.op(self.tensor, group=self.group, tag=self.tag, **rank)

    def __repr__(self) -> str:
        return (
            f"P2POp({self.op.__name__}, group_peer={self.group_peer}, {tuple(self.tensor.shape)},"
            f" {self.tensor.dtype}, tag={self.tag}, {self.group!r})"
        )


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin to send and receive some messages; the order of sends and receives among them does not matter.

    To be called by the ranks that the messages concern. Between two ranks, messages of one direction and tag
    are matched in their order.

    Returns:
        A Work for each; none on a rank that is not in the group.

    Raises:
        InvalidArgumentError: something in the list is not a P2POp, or they are for different groups.
    """
    if not isinstance(p2p_op_list, (list, tuple)) or not all(isinstance(op, P2POp) for op in p2p_op_list):
        raise InvalidArgumentError(
            "batch_isend_irecv: Invalid ``p2p_op_list``. Each op is expected to be of type"
            " torchestra.P2POp, in a list; got"
            f" {shown(p2p_op_list)}"
        )
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise InvalidArgumentError("batch_isend_irecv: All ops need to use the same group.")
    works: dict[int, Work | None] = {}
    together = {index: op for index, op in enumerate(p2p_op_list) if op.serving() is not None}
    if together:
        batch = [(op.op is isend, op.tensor, op.group_peer) for op in together.values()]
        begun = next(iter(together.values())).serving().messages.batch(batch)
        works.update(zip(together, begun, strict=True))
    for index, op in enumerate(p2p_op_list):
        if index not in together:
            works[index] = op.begin()
    return [work for _, work in sorted(works.items()) if work is not None]


def _set_up_traced(
    self: P2POp,
    op: Callable[..., Work | None],
    tensor: torch.Tensor,
    peer: int | None = None,
    group: AnyGroup | None = None,
    tag: int = 0,
    group_peer: int | None = None,
) -> None:
    """Stand for P2POp(), where torch.compile traces messages."""
    if is_message_traced(group, peer, group_peer):
        member = traced_member(group)
        self.op, self.tensor, self.group, self.tag = op, tensor, member, tag
        self.group_peer = member.to_group_rank(cast(int, peer)) if group_peer is None else group_peer
        self.peer = member.to_global_rank(self.group_peer)


def _begin_traced(p2p_op_list: Sequence[P2POp]) -> list[Work | None]:
    """Stand for batch_isend_irecv(), where torch.compile traces messages."""
    works = []
    for op in p2p_op_list:
        if op.op is isend:
            works.append(isend(op.tensor, None, op.group, op.tag, op.group_peer))
        else:
            works.append(irecv(op.tensor, None, op.group, op.tag, op.group_peer))
    return works


for _name in __all__:
    untraced(globals()[_name])
untraced(P2POp.__init__, inlined=_set_up_traced)
untraced(batch_isend_irecv, inlined=_begin_traced)
