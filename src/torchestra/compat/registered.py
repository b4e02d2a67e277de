"""Groups of registered backends, whose operations a class of the user's runs.

Such a class derives from :class:`ProcessGroup` and has torch's C++ methods (``allreduce(tensors, opts)`` and
so on). The functions of the package use it like every group, by its communicator, which passes each operation
on to the corresponding method. An operation for which the class has no method is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch

from torchestra import process_group
from torchestra.arguments import options
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.interface import Ended, Engine
from torchestra.engine.kernels.reductions import combine_tensors
from torchestra.engine.operations import BARRIER, Collective, Parameter, Shape
from torchestra.errors import DistBackendError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.process_group.group import GroupMaker
from torchestra.store import FakeStore, PrefixStore, Store
from torchestra.types import ReduceOp, Timeout

__all__ = ["Creator", "DistributedBackendOptions", "ProcessGroup", "maker_of"]

Creator = Callable[..., Any]
"""Makes a backend's group from a store, a rank, a size and a timedelta, or from options (see below)."""


class _EveryGroup(type):
    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for ProcessGroup and any group; for derived classes, check as usual."""
        return isinstance(instance, process_group.ProcessGroup) and (
            cls is ProcessGroup or type.__instancecheck__(cls, instance)
        )


class ProcessGroup(process_group.ProcessGroup, metaclass=_EveryGroup):
    """The base class of groups of registered backends: ``ProcessGroup([store,] rank, size)``.

    It runs no operation by itself. Its number, name, store and ranks are known if it was made by
    :func:`~torchestra.compat.init_process_group` or :func:`~torchestra.compat.new_group`.
    """

    def __init__(self, *arguments: Any) -> None:
        store = arguments[0] if arguments and isinstance(arguments[0], Store) else FakeStore()
        rank_and_size = arguments[1:3] if arguments and isinstance(arguments[0], Store) else arguments[:2]
        if len(rank_and_size) != 2:
            raise InvalidArgumentTypeError(f"ProcessGroup takes ([store,] rank, size), got {arguments!r}")
        rank, size = rank_and_size
        engine = RegisteredEngine(self, rank, size)
        name = f"{type(self).__name__} {id(self):x}"
        super().__init__(store, rank, size, communicator=Communicator(engine, name, 0.0))
        self.backend = self.getBackendName()
        self._registered = False

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return type(self).__name__

    def name(self) -> str:
        """Return the backend's name."""
        return self.getBackendName()

    def abort(self) -> None:
        """Abort pending operations; backends override this."""

    def shutdown(self) -> None:
        """Release the backend's resources when the group is destroyed; backends override this."""

    def shrink(self, exclude: Sequence[int] = (), timeout: Timeout | None = None) -> ProcessGroup:
        """Refuse; a backend that can shrink overrides this.

        Raises:
            InvalidArgumentTypeError: the backend does not override this.
        """
        raise InvalidArgumentTypeError(
            f"shrink: Process group backend for {self.group_name!r} does not support shrinking operations:"
            f" {type(self).__name__}, of backend {self.getBackendName()!r}, has no method shrink"
        )

    def shrink_when_idle(self, exclude: Sequence[int], timeout: Timeout | None = None) -> ProcessGroup:
        """Call :meth:`shrink`: only the backend knows when its operations end."""
        return self.shrink(exclude, timeout)

    @property
    def supports_reconfigure(self) -> bool:
        """Return False; a backend that can be reconfigured overrides this and the two methods."""
        return False

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
    """The arguments of a creator that was registered with ``extended_api=True``."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


def maker_of(backend: str, creator: Creator, extended: bool, options: Any) -> GroupMaker:
    """Return the function by which the world makes a registered backend's groups.

    Args:
        backend: its name.
        creator: as registered.
        extended: whether the creator takes :class:`DistributedBackendOptions`, and ``options``.
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


class RegisteredEngine(Engine):
    """Passes every operation on to the group's method, with the arguments of torch's C++ methods."""

    delegates = True
    is_aborted = False

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def plan(
        self, row: Collective, dtype: torch.dtype, op: ReduceOp | None = None, root: int | None = None
    ) -> Collective:
        return row

    def collective(
        self, plan: Any, inputs: Any, outputs: Any, timeout_s: float, site: str | None = None
    ) -> None:
        raise self._missing(plan.method)

    def delegate(
        self,
        row: Collective,
        output: Any,
        input: Any,  # noqa: A002 - the row's word
        op: ReduceOp | None,
        root: int | None,
        splits: tuple[Any, Any],
        async_op: bool,
        timeout_s: float,
    ) -> Work | None:
        """Call the method of the row; wait for it unless ``async_op``."""
        values = {"reduceOp": op, "rootRank": root}
        chosen = {name: value for name, value in values.items() if value is not None}
        made = getattr(options, row.options)(**chosen)
        made.asyncOp, made.timeout = async_op, timedelta(seconds=timeout_s)
        arguments = [_as_torch_takes_it(row, row.output, output)] if row.output is not None else []
        if row.input is not None and not row.in_place:
            arguments.append(_as_torch_takes_it(row, row.input, input))
        if row.splits:
            arguments += [list(each or ()) for each in splits]
        work = self._begin((*row.method_aliases[::-1], row.method), *arguments, made)
        if async_op:
            return cast(Work, work)
        if work is not None:
            work.wait()
        return None

    def _begin(self, names: Sequence[str], *arguments: Any) -> Any:
        """Call the first of some methods that the class itself defines."""
        for name in names:
            if getattr(type(self._group), name, None) is not getattr(process_group.ProcessGroup, name, None):
                return getattr(self._group, name)(*arguments)
        raise self._missing(names[0])

    def _missing(self, name: str) -> DistBackendError:
        return DistBackendError(
            f"Backend {self._group.getBackendName()} does not implement {name}: {type(self._group).__name__}"
            " has no such method"
        )

    def barrier(self, timeout_s: float, site: str | None = None) -> None:
        self.delegate(BARRIER, None, None, None, None, (None, None), False, timeout_s)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        self.begin_send(tensor, rank, tag, timeout_s, print).wait()

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float) -> int:
        work = self.begin_receive(tensor, rank, tag, timeout_s, print)
        work.wait()
        return work._source_rank() if rank is None else rank

    def begin_send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Ended) -> Work:
        self._check_peer(rank, "destination", "send")
        return cast(Work, self._begin(["send"], [tensor], rank, tag))

    def begin_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float, done: Ended
    ) -> Work:
        if rank is None:
            return cast(Work, self._begin(["recv_anysource"], [tensor], tag))
        self._check_peer(rank, "source", "recv")
        return cast(Work, self._begin(["recv"], [tensor], rank, tag))

    def _check_peer(self, rank: int, role: str, name: str) -> None:
        if rank == self.rank:
            raise InvalidArgumentError(
                f"{name}: Invalid {role} rank: rank {rank} is this one; a rank cannot send to or receive from"
                " itself"
            )

    def complete(self, transfer: Work) -> object:
        return transfer.wait()

    def combine(self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
        combine_tensors(target, sources, op)

    def abort(self, why: str, failed: Sequence[int] = ()) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()


def _as_torch_takes_it(row: Collective, parameter: Parameter, value: Any) -> Any:
    """Return a tensor or list inside a list; arguments of single-tensor methods unchanged."""
    if row.shape in (Shape.OUTPUT_IS_WHOLE, Shape.INPUT_IS_WHOLE, Shape.ROWS):
        return value
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None:
        return []
    return list(value) if row.shape is Shape.PAIRS or not parameter.is_list else [list(value)]
