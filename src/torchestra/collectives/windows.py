"""One-sided access to the tensors of other ranks: windows on them, in the memory that the ranks share.

A rank's tensor is moved to shared memory when it is registered (sharing.py), and every rank learns where it
lies. Writing into it is then a copy by the rank that writes, of which its owner hears nothing.
Into the tensor of a rank on another host, the transport's thread there writes what comes, and acknowledges it
(engine/multihost/exposed_memory.py). What tells the owner is a signal, a message with a tag of the window's
own: what a rank has put before it has sent a signal, the rank that has received the signal sees.
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
from torchestra.communicator import point_to_point
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError
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
    """Return whether this rank can write into memory of all ranks, on its host and on others."""
    engine = group.communicator.engine
    return engine.serves_puts or all(engine.heap_of(rank) is not None for rank in range(group.size()))


class Window:
    """A window on one tensor of each rank, which the others can write and read. All ranks must make it.

    Args:
        tensor: is registered, if given; then on all ranks.
        group: whose ranks have the window, on one host or several.

    Raises:
        InvalidArgumentError: this rank is not in the group, or the group has no memory of the CPU that others
            can write into; or as of :meth:`tensor_register`.
    """

    @checked
    def __init__(self, tensor: torch.Tensor | None = None, group: AnyGroup | None = None) -> None:
        member = default_group() if group is None else member_of(group, "Window")
        if member is None:
            raise InvalidArgumentError(f"Window: this rank is {group!r}")
        if not supports_windows(member):
            raise InvalidArgumentError(
                f"Window: the ranks of group {member.group_name!r} have no memory that others can write into;"
                " make a group of processes or threads for tensors of the CPU (new_group), or send"
            )
        self._group: ProcessGroup = member
        self._tag = _FIRST_TAG + _next_number(member)
        self._told: list[_Registered] = []
        self._here: dict[int, torch.Tensor] = {}
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
        placed, engine, own = self._place(tensor), group.communicator.engine, tensor.detach()
        if not placed.problem:  # before the others know, who may put as soon as they do
            engine.expose(self._tag, own)
        all_gather_object(told, placed, group)
        for number, each in enumerate(told):
            if each.problem:
                if not self._told:
                    engine.expose(self._tag, None)
                raise InvalidArgumentError(f"tensor_register: rank {number}: {each.problem}")
        self._told = told
        self._here = {
            number: own if number == rank else _view(engine.shared(number, each.offset, _length(each)), each)
            for number, each in enumerate(told)
            if engine.heap_of(number) is not None
        }

    def _place(self, tensor: torch.Tensor) -> _Registered:
        """Move a tensor of this rank; return where it is."""
        if self._told:
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
        self._group.communicator.engine.expose(self._tag, None)
        self._told, self._here = [], {}

    @checked
    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int = 0, async_op: bool = False
    ) -> Work | None:
        """Write into the tensor of a rank of the group, whose program takes no part in it.

        The elements are there when this returns, or the work is done, but the other rank must not rely on it
        before a signal of this one, or a collective, has told it. A signal that is sent after this was called
        comes after it, also where the work is not done yet.

        Args:
            tensor: what to write; any strides, and the dtype of the target. It may be changed afterwards.
            dst_rank: the group rank whose tensor is written; this one is allowed.
            target_offset_nelems: at which element of it to begin.
            async_op: return a work. It is done at once if the other rank is on this host.

        Raises:
            InvalidArgumentError: no tensor is registered, the dtypes differ, or the elements do not fit.
                Nothing is sent.
            RankFailedError: the rank, on another host, has died. Raised by the work's ``wait()`` as well.
        """
        target = self._registered(dst_rank, "put")
        start, stop = target_offset_nelems, target_offset_nelems + tensor.numel()
        room = torch.Size(target.shape).numel()
        if tensor.dtype != target.dtype:
            raise InvalidArgumentError(
                f"put: `tensor` is {tensor.dtype}, and what rank {dst_rank} has registered {target.dtype}"
            )
        if start < 0 or stop > room:
            raise InvalidArgumentError(
                f"put: elements {start} to {stop} are not all in the {room} that rank {dst_rank}"
                " has registered"
            )
        elements = tensor.detach().reshape(-1)
        if (here := self._here.get(dst_rank)) is not None:
            here.view(-1)[start:stop].copy_(elements)
        elif start < stop:
            own = torch.empty(stop - start, dtype=target.dtype).copy_(elements)
            offset, communicator = start * target.dtype.itemsize, self._group.communicator
            return _waited(point_to_point.put(communicator, own, dst_rank, self._tag, offset), async_op)
        return Work.finished("put", []) if async_op else None

    @checked
    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Return the tensor of a rank of the group itself: what is written into it, the rank sees.

        Raises:
            InvalidArgumentError: no tensor is registered, or the rank is on another host.
        """
        self._registered(rank, "map_remote_tensor")
        if rank not in self._here:
            raise InvalidArgumentError(
                f"map_remote_tensor: rank {self._group.rank()} cannot address memory of rank {rank}, which is"
                " on another host; write with put(), and have that rank put what you want to read"
            )
        return self._here[rank]

    def check_peer(self, rank: int, name: str) -> None:
        """Raise InvalidArgumentError if a rank has no registered tensor; ``name``: of the function."""
        self._registered(rank, name)

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

    def _registered(self, rank: int, name: str) -> _Registered:
        if not self._told:
            raise InvalidArgumentError(
                f"{name}: no tensor is registered; call tensor_register() on all ranks"
            )
        if not 0 <= check_integer(rank, "rank", name) < len(self._told):
            raise InvalidArgumentError(f"{name}: {rank} is no rank of a group of {len(self._told)}")
        return self._told[rank]


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
