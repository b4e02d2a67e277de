"""One-sided access to the tensors of other ranks: windows on them, in the memory that the ranks share.

A rank's tensor is moved to shared memory when it is registered (sharing.py), and every rank learns where it
lies. Writing into it is then a copy by the rank that writes, of which its owner hears nothing. What tells the
owner is a signal, a message with a tag of the window's own: what a rank has put before it has sent a signal,
the rank that has received the signal sees.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from torchestra.arguments.annotations import check_integer, checked
from torchestra.collectives.functions import barrier, irecv, isend
from torchestra.collectives.group_arguments import member_of
from torchestra.collectives.objects import all_gather_object
from torchestra.collectives.sharing import share_
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError, named
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, default_group

# Tags of signals: from here on, one for each window of a group. Programs have no use for such numbers.
_FIRST_TAG = 1 << 40
_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


class _Registered(NamedTuple):
    """Where a rank's tensor lies in its part of the shared memory, or why it does not."""

    offset: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    problem: str = ""


def supports_windows(group: ProcessGroup) -> bool:
    """Return whether this rank can address the shared memory of all ranks: whether they are on its host."""
    return not _out_of_reach(group)


def _out_of_reach(group: ProcessGroup) -> list[int]:
    """Return the ranks whose shared memory this rank cannot address."""
    engine = group.communicator.engine
    return [rank for rank in range(group.size()) if engine.heap_of(rank) is None]


class Window:
    """A window on one tensor of each rank, which the others can write and read. All ranks must make it.

    Args:
        tensor: is registered, if given; then on all ranks.
        group: whose ranks have the window; they must be on one host.

    Raises:
        InvalidArgumentError: this rank is not in the group, or the ranks are on several hosts; or as of
            :meth:`tensor_register`.
    """

    @checked
    def __init__(self, tensor: torch.Tensor | None = None, group: AnyGroup | None = None) -> None:
        member = default_group() if group is None else member_of(group, "Window")
        if member is None:
            raise InvalidArgumentError(f"Window: this rank is {group!r}")
        if elsewhere := _out_of_reach(member):
            raise InvalidArgumentError(
                f"Window: all ranks of group {member.group_name!r} must share memory, and rank"
                f" {member.rank()} shares none with {named(elsewhere)}, on other hosts; make a group of"
                " one host's ranks (new_group), or send"
            )
        self._group: ProcessGroup = member
        self._tag = _FIRST_TAG + _next_number(member)
        self._tensors: list[torch.Tensor] = []
        if tensor is not None:
            self.tensor_register(tensor)

    @checked
    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Let the other ranks write and read this tensor; all ranks must call this.

        The tensor is moved to shared memory, as by :func:`torchestra.share_`; it stays the same object.

        Args:
            tensor: a contiguous one of the CPU. Lengths and dtypes of the ranks may differ.
            owning: accepted as by torch; the window always keeps the tensor's memory.

        Raises:
            InvalidArgumentError: on every rank, if the tensor of one cannot be moved, or one has a tensor
                registered already.
        """
        group, rank = self._group, self._group.rank()
        told: list[_Registered] = [_Registered()] * group.size()
        all_gather_object(told, self._place(tensor), group)
        for number, each in enumerate(told):
            if each.problem:
                raise InvalidArgumentError(f"tensor_register: rank {number}: {each.problem}")
        engine = group.communicator.engine
        self._tensors = [
            tensor.detach()
            if number == rank
            else _view(engine.shared(number, each.offset, _length(each)), each)
            for number, each in enumerate(told)
        ]

    def _place(self, tensor: torch.Tensor) -> _Registered:
        """Move a tensor of this rank; return where it is."""
        if self._tensors:
            return _Registered(problem="a tensor is registered already; call tensor_deregister() first")
        if not tensor.is_contiguous():
            return _Registered(problem="the tensor must be contiguous; give its .contiguous()")
        engine = self._group.communicator.engine
        try:
            share_(tensor, self._group)
            if tensor.numel():
                offset = tensor.data_ptr() - (engine.heap_of(self._group.rank()) or 0)
                engine.shared(self._group.rank(), offset, tensor.nbytes)
            else:
                offset = 0
        except InvalidArgumentError as error:
            return _Registered(problem=str(error))
        return _Registered(offset, tuple(tensor.shape), tensor.dtype)

    def tensor_deregister(self) -> None:
        """End the others' access, once all ranks have called this; the tensor stays as it is."""
        barrier(self._group)
        self._tensors = []

    @checked
    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int = 0, async_op: bool = False
    ) -> Work | None:
        """Write into the tensor of a rank of the group, which takes no part in it.

        The elements are there when this returns, but the other rank must not rely on it before a signal of
        this one, or a collective, has told it.

        Args:
            tensor: what to write; any strides, and the dtype of the target.
            dst_rank: the group rank whose tensor is written; this one is allowed.
            target_offset_nelems: at which element of it to begin.
            async_op: return a work, which is done.

        Raises:
            InvalidArgumentError: no tensor is registered, the dtypes differ, or the elements do not fit.
        """
        target = self._tensor_of(dst_rank, "put").view(-1)
        start, stop = target_offset_nelems, target_offset_nelems + tensor.numel()
        if tensor.dtype != target.dtype:
            raise InvalidArgumentError(
                f"put: `tensor` is {tensor.dtype}, and what rank {dst_rank} has registered {target.dtype}"
            )
        if start < 0 or stop > target.numel():
            raise InvalidArgumentError(
                f"put: elements {start} to {stop} are not all in the {target.numel()} that rank {dst_rank}"
                " has registered"
            )
        target[start:stop].copy_(tensor.detach().reshape(-1))
        return Work.finished("put", []) if async_op else None

    @checked
    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Return the tensor of a rank of the group itself: what is written into it, the rank sees."""
        return self._tensor_of(rank, "map_remote_tensor")

    @checked
    def signal(self, peer_rank: int, async_op: bool = False) -> Work | None:
        """Tell a rank of the group that what was put before is there; it need not wait for it yet."""
        work = isend(torch.ones(1, dtype=torch.uint8), group=self._group, tag=self._tag, group_dst=peer_rank)
        return _waited(work, async_op)

    @checked
    def wait_signal(self, peer_rank: int, async_op: bool = False) -> Work | None:
        """Wait for the next signal of a rank of the group."""
        work = irecv(torch.empty(1, dtype=torch.uint8), group=self._group, tag=self._tag, group_src=peer_rank)
        return _waited(work, async_op)

    def _tensor_of(self, rank: int, name: str) -> torch.Tensor:
        if not self._tensors:
            raise InvalidArgumentError(
                f"{name}: no tensor is registered; call tensor_register() on all ranks"
            )
        if not 0 <= check_integer(rank, "rank", name) < len(self._tensors):
            raise InvalidArgumentError(f"{name}: {rank} is no rank of a group of {len(self._tensors)}")
        return self._tensors[rank]


def _waited(work: Work | None, async_op: bool) -> Work | None:
    if work is None or async_op:
        return work
    work.wait()
    return None


def _length(registered: _Registered) -> int:
    return torch.Size(registered.shape).numel() * registered.dtype.itemsize


def _view(memory: torch.Tensor, registered: _Registered) -> torch.Tensor:
    return memory.view(registered.dtype).view(registered.shape)


def _next_number(group: ProcessGroup) -> int:
    """Count the windows of a group, alike on all ranks."""
    number = _made[group] = _made.get(group, 0) + 1
    return number
