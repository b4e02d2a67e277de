"""The options of a group and of its operations, with torch.distributed's names and defaults.

They are plain objects whose attributes are set one by one, as code written for torch.distributed does. An
options object is read when an operation is called, so it may be changed and used again afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchestra.arguments.annotations import check_integer, checked
from torchestra.errors import InvalidArgumentError, shown
from torchestra.types import DEFAULT_TIMEOUT, ReduceOp, Timeout, timeout_seconds

if TYPE_CHECKING:
    import torch

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "GroupOptions",
    "OperationOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
]

_UNSET = timedelta(milliseconds=-1)


@dataclass
class OperationOptions:
    """Hold the options that every operation has.

    Attributes:
        timeout: how long the operation may wait for other ranks, a timedelta or seconds; -1 ms (the
            default) stands for the group's.
        asyncOp: if true (the default), the operation is only begun, and its Work is to be waited for. If
            false, it has ended when its method returns.
    """

    timeout: Timeout = _UNSET
    asyncOp: bool = True

    def seconds(self, name: str = "") -> float | None:
        """Return the time-out in seconds, or None for the group's.

        Args:
            name: the function that the options are for, for messages.

        Raises:
            InvalidArgumentError: it is not a duration.
        """
        unset = isinstance(self.timeout, timedelta) and self.timeout == _UNSET
        return None if unset else timeout_seconds(self.timeout, name)


@dataclass
class AllreduceOptions(OperationOptions):
    """Of ``allreduce``: the reduce operation. ``sparseIndices`` is torch's, and has no meaning here."""

    reduceOp: ReduceOp = ReduceOp.SUM
    sparseIndices: torch.Tensor | None = None


@dataclass
class AllreduceCoalescedOptions(AllreduceOptions):
    """Of ``allreduce_coalesced``: the reduce operation."""


@dataclass
class BroadcastOptions(OperationOptions):
    """Of ``broadcast``: which rank sends (in the group's numbering), and which tensor of its list."""

    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class ReduceOptions(OperationOptions):
    """Of ``reduce``: the reduce operation, which rank receives (in the group's numbering), and where."""

    reduceOp: ReduceOp = ReduceOp.SUM
    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class GatherOptions(OperationOptions):
    """Of ``gather``: which rank receives, in the group's numbering."""

    rootRank: int = 0


@dataclass
class ScatterOptions(OperationOptions):
    """Of ``scatter``: which rank sends, in the group's numbering."""

    rootRank: int = 0


@dataclass
class ReduceScatterOptions(OperationOptions):
    """Of ``reduce_scatter``: the reduce operation."""

    reduceOp: ReduceOp = ReduceOp.SUM


@dataclass
class AllgatherOptions(OperationOptions):
    """Of ``allgather`` and its relatives."""


@dataclass
class AllToAllOptions(OperationOptions):
    """Of ``alltoall`` and ``alltoall_base``."""


@dataclass
class BarrierOptions(OperationOptions):
    """Of ``barrier``. ``device_ids`` and ``device`` are torch's, and have no meaning here."""

    device_ids: Sequence[int] = field(default_factory=list)
    device: torch.device | None = None


def _also(name: str) -> property:
    """Make a second spelling of an attribute."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


class GroupOptions:
    """Hold the options of a :class:`ProcessGroup` that is made directly.

    Every attribute can also be spelled with an underscore before it.

    Attributes:
        timeout: of the group's operations, and of meeting the others: set as a timedelta or seconds, read as
            a timedelta; default 30 minutes.
        threads, devices: how many threads torch's Gloo group uses and over which network devices; kept,
            but nothing here depends on them.
        backend: ``"native"`` (the ranks are processes), ``"threads"``, or None for the calling rank's.
        group_name: the group's name, the same on all ranks; None to have one generated.
    """

    @checked
    def __init__(
        self,
        timeout: Timeout = DEFAULT_TIMEOUT,
        threads: int = 2,
        devices: Sequence[Any] = (),
        backend: str | None = None,
        group_name: str | None = None,
    ) -> None:
        self.timeout = timeout
        self.threads = threads
        self.devices = list(devices)
        self.backend = backend
        self.group_name = group_name

    @property
    def timeout(self) -> timedelta:
        return self._duration

    @timeout.setter
    def timeout(self, timeout: Timeout) -> None:
        self._duration = timedelta(seconds=timeout_seconds(timeout, "GroupOptions"))

    @property
    def threads(self) -> int:
        return self._number

    @threads.setter
    def threads(self, threads: int) -> None:
        number = check_integer(threads, "threads", "GroupOptions")
        if number < 1:
            raise InvalidArgumentError(
                f"GroupOptions: `threads` must be a positive int, got {shown(threads)}"
            )
        self._number = number

    _timeout, _threads, _devices = _also("timeout"), _also("threads"), _also("devices")

    def __repr__(self) -> str:
        return (
            f"GroupOptions(timeout={self.timeout!r}, threads={self.threads}, devices={self.devices!r},"
            f" backend={self.backend!r}, group_name={self.group_name!r})"
        )
