"""Groups of registered backends: what runs their operations is somebody else's class.

Such a class derives from :class:`ProcessGroup` and has torch's C++ methods (``allreduce(tensors, opts)`` and
so on). The functions of the package reach it as they reach every group, by its communicator, which hands each
operation on to the method that is meant. An operation for which the class has no method is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch

from torchestra import process_group
from torchestra.arguments.options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    OperationOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.local import LocalEngine
from torchestra.errors import DistBackendError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.process_group.group import GroupMaker
from torchestra.store import FakeStore, PrefixStore, Store
from torchestra.types import ReduceOp, Timeout

__all__ = ["Creator", "DistributedBackendOptions", "ProcessGroup", "maker_of"]

Creator = Callable[..., Any]
"""Makes a backend's group: of a store, a rank, a size and a timedelta, or of options (see below)."""


class _EveryGroup(type):
    def __instancecheck__(cls, instance: object) -> bool:
        """Every group is a ProcessGroup, of whatever backend; of classes derived from it, as ever."""
        return isinstance(instance, process_group.ProcessGroup) and (
            cls is ProcessGroup or type.__instancecheck__(cls, instance)
        )


class ProcessGroup(process_group.ProcessGroup, metaclass=_EveryGroup):
    """What registered backends derive their groups from: ``ProcessGroup([store,] rank, size)``.

    It runs nothing by itself. Its number, name, store and ranks are known when it was made by
    :func:`~torchestra.compat.init_process_group` or :func:`~torchestra.compat.new_group`.
    """

    def __init__(self, *arguments: Any) -> None:
        store = arguments[0] if arguments and isinstance(arguments[0], Store) else FakeStore()
        place = arguments[1:3] if arguments and isinstance(arguments[0], Store) else arguments[:2]
        if len(place) != 2:
            raise InvalidArgumentTypeError(f"ProcessGroup takes ([store,] rank, size), got {arguments!r}")
        rank, size = place
        super().__init__(store, rank, size, communicator=_HandingOn(self, rank, size))
        self.backend = self.getBackendName()
        self._registered = False

    def getBackendName(self) -> str:
        """The backend's name."""
        return type(self).__name__

    def name(self) -> str:
        """The same."""
        return self.getBackendName()

    def abort(self) -> None:
        """End what is under way by force; for the backend to say how."""

    def shutdown(self) -> None:
        """Called when the group is destroyed; for the backend to say what is to be done."""

    def shrink(
        self, exclude: Sequence[int] = (), timeout: Timeout | None = None
    ) -> process_group.ProcessGroup:
        """For the backend to say how, if it can.

        Raises:
            InvalidArgumentTypeError: it does not.
        """
        raise InvalidArgumentTypeError(
            f"shrink: Process group backend for {self.group_name!r} does not support shrinking operations:"
            f" {type(self).__name__}, of backend {self.getBackendName()!r}, has no method shrink"
        )

    def shrink_when_idle(
        self, exclude: Sequence[int], timeout: Timeout | None = None
    ) -> process_group.ProcessGroup:
        """:meth:`shrink`: when its operations end, only the backend knows."""
        return self.shrink(exclude, timeout)

    def become(self, *arguments: Any) -> None:
        super().become(*arguments)
        self._registered = True

    def to_group_rank(
        self, global_rank: int, parameter: str = "global_rank", name: str = "to_group_rank"
    ) -> int:
        if not self._registered:
            raise InvalidArgumentError(
                f"Group {self!r} is not registered, please create group with torchestra.compat.new_group()"
            )
        return super().to_group_rank(global_rank, parameter, name)


@dataclass
class DistributedBackendOptions:
    """What a creator gets that was registered with ``extended_api=True``."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def maker_of(backend: str, creator: Creator, extended: bool, options: Any) -> GroupMaker:
    """How the world makes groups of a registered backend.

    Args:
        backend: its name.
        creator: as registered.
        extended: whether that takes :class:`DistributedBackendOptions`, and ``options``.
    """

    def make(
        store: Store, ranks: Sequence[int], rank: int, name: str, seconds: float
    ) -> process_group.ProcessGroup:
        own = PrefixStore(f"{backend}/{name}", store)
        timeout = timedelta(seconds=seconds)
        if extended:
            given = DistributedBackendOptions(own, rank, len(ranks), timeout, name, list(ranks))
            made = creator(given, options)
        else:
            made = creator(own, rank, len(ranks), timeout)
        if not isinstance(made, process_group.ProcessGroup):
            raise DistBackendError(
                f"the creator of backend {backend!r} must return an object of a class derived from"
                f" torchestra.compat.ProcessGroup, it returned {made!r}"
            )
        made.become(store, ranks, name, backend, seconds)
        made.maker = make
        return made

    return make


class _NoEngine:
    """What is asked of an engine by those who hold a communicator, of one that is not ours."""

    moves = staticmethod(LocalEngine.moves)
    reduces = staticmethod(LocalEngine.reduces)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @staticmethod
    def sequence_number() -> int:
        return 0

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        pass


class _HandingOn(Communicator):
    """Hands every operation on to the group's method in torch's C++ form; waits for it unless told not to."""

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        super().__init__(
            cast(LocalEngine, _NoEngine(rank, size)), f"{type(group).__name__} {id(group):x}", 0.0
        )
        self._group = group

    def close(self) -> None:
        super().close()
        self._group.shutdown()

    def abort(self, why: str, failed: tuple[int, ...] = ()) -> None:
        self._group.abort()

    def _begin(self, names: str, *arguments: Any) -> Any:
        """Call the first of some methods that the class has by itself."""
        self._refuse_if_closed(names.partition(" ")[0])
        kind = type(self._group)
        for name in names.split():
            if getattr(kind, name, None) is not getattr(process_group.ProcessGroup, name, None):
                return getattr(self._group, name)(*arguments)
        raise DistBackendError(
            f"Backend {self._group.getBackendName()} does not implement {names.split(maxsplit=1)[0]}:"
            f" {kind.__name__} has no such method"
        )

    def _call(
        self, names: str, async_op: bool, seconds: float | None, options: OperationOptions, *arguments: Any
    ) -> Work | None:
        options.asyncOp = async_op
        options.timeout = timedelta(seconds=self.limit(seconds))
        work = self._begin(names, *arguments, options)
        if async_op:
            return cast(Work, work)
        if work is not None:
            work.wait()
        return None

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        return self._call("allreduce", async_op, seconds, AllreduceOptions(reduceOp=op), [tensor])

    def all_reduce_list(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        options = AllreduceCoalescedOptions(reduceOp=op)
        return self._call("allreduce_coalesced", async_op, seconds, options, list(tensors))

    def all_reduce_sparse(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        return self._call("allreduce", async_op, seconds, AllreduceOptions(reduceOp=op), list(tensors))

    def reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        return self._call("reduce", async_op, seconds, ReduceOptions(reduceOp=op, rootRank=root), [tensor])

    def broadcast(
        self, tensor: torch.Tensor, root: int, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        return self._call("broadcast", async_op, seconds, BroadcastOptions(rootRank=root), [tensor])

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        return self._call("allgather", async_op, seconds, AllgatherOptions(), [list(outputs)], [tensor])

    def all_gather_into_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool = False, seconds: float | None = None
    ) -> Work | None:
        names = "all_gather_single _allgather_base allgather_into_tensor"
        return self._call(names, async_op, seconds, AllgatherOptions(), output, tensor)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        targets = [] if outputs is None else [list(outputs)]
        return self._call("gather", async_op, seconds, GatherOptions(rootRank=root), targets, [tensor])

    def scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor] | None,
        root: int,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        sources = [] if tensors is None else [list(tensors)]
        return self._call("scatter", async_op, seconds, ScatterOptions(rootRank=root), [output], sources)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        options = ReduceScatterOptions(reduceOp=op)
        return self._call("reduce_scatter", async_op, seconds, options, [output], [list(tensors)])

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: ReduceOp,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        names = "reduce_scatter_single _reduce_scatter_base reduce_scatter_tensor"
        return self._call(names, async_op, seconds, ReduceScatterOptions(reduceOp=op), output, tensor)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        return self._call("alltoall", async_op, seconds, AllToAllOptions(), list(outputs), list(tensors))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
        seconds: float | None = None,
    ) -> Work | None:
        splits = list(output_splits or ()), list(input_splits or ())
        names = "alltoall_base all_to_all_single"
        return self._call(names, async_op, seconds, AllToAllOptions(), output, tensor, *splits)

    def barrier(self, async_op: bool = False, seconds: float | None = None) -> Work | None:
        return self._call("barrier", async_op, seconds, BarrierOptions())

    def _check_peer(self, rank: int | None, name: str) -> None:
        if rank == self.rank:
            raise InvalidArgumentError(
                f"{name}: Invalid {'destination' if 'send' in name else 'source'} rank: rank {rank} is this"
                " one; a rank cannot send to or receive from itself"
            )

    def send(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> None:
        self.isend(tensor, rank, tag, seconds).wait()

    def recv(self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None) -> int:
        work = self.irecv(tensor, rank, tag, seconds)
        work.wait()
        return work._source_rank() if rank is None else rank

    def isend(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> Work:
        self._check_peer(rank, "send")
        return cast(Work, self._begin("send", [tensor], rank, tag))

    def irecv(
        self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None
    ) -> Work:
        if rank is None:
            return cast(Work, self._begin("recv_anysource", [tensor], tag))
        self._check_peer(rank, "recv")
        return cast(Work, self._begin("recv", [tensor], rank, tag))
