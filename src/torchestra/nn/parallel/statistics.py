"""Where the time of data parallel training goes, counted as it passes."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["DDPStatistics"]


@dataclass(frozen=True)
class DDPStatistics:
    """What a DistributedDataParallel has done on this rank so far, in steps whose gradients were reduced.

    Attributes:
        steps: how often all gradients were reduced.
        forward_seconds: in the module's forward, the broadcast of buffers before it included.
        backward_seconds: from the first gradient of the module's output to the last averaged gradient.
        communication_seconds: from the start of a step's first reduction to the end of its last, and in
            broadcasts of buffers.
        wait_seconds: the part of it in which the program stood still for it.
        copy_seconds: copying gradients into buckets and back.
        bytes_reduced: of gradients, each counted once per step.
        buckets: how many all_reduces a step takes.
    """

    steps: int
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    wait_seconds: float
    copy_seconds: float
    bytes_reduced: int
    buckets: int

    @property
    def overlap_seconds(self) -> float:
        """The part of ``communication_seconds`` in which backward went on."""
        return max(0.0, self.communication_seconds - self.wait_seconds)

    @property
    def communication_share(self) -> float:
        """The share of forward and backward that waiting and copying took, from 0 to 1."""
        total = self.forward_seconds + self.backward_seconds
        return (self.wait_seconds + self.copy_seconds) / total if total else 0.0


class Counters:
    """The same numbers while they are counted."""

    __slots__ = tuple(field.name for field in fields(DDPStatistics))

    steps: int
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    wait_seconds: float
    copy_seconds: float
    bytes_reduced: int
    buckets: int

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def snapshot(self) -> DDPStatistics:
        """The numbers as they are now."""
        return DDPStatistics(**{name: getattr(self, name) for name in self.__slots__})
