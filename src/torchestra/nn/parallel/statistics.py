"""Where the time of data parallel training goes, counted as it passes."""

from __future__ import annotations

from dataclasses import dataclass

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
        buckets: in how many buckets a step reduces them.
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
    """The same numbers while they are counted, and when the things of the current step happened.

    Times are of ``time.perf_counter_ns``, 0 for what has not happened.
    """

    __slots__ = (
        "backward_ended",
        "backward_ns",
        "backward_started",
        "buckets",
        "bytes_reduced",
        "communication_ended",
        "communication_ns",
        "communication_started",
        "copy_ns",
        "forward_ns",
        "forward_started",
        "reduced",
        "steps",
        "wait_ns",
    )

    def __init__(self) -> None:
        self.steps = self.buckets = self.bytes_reduced = self.reduced = 0
        self.forward_ns = self.backward_ns = self.communication_ns = self.wait_ns = self.copy_ns = 0
        self.forward_started = self.backward_started = self.backward_ended = 0
        self.communication_started = self.communication_ended = 0

    def snapshot(self) -> DDPStatistics:
        """Return the numbers as they are now."""
        return DDPStatistics(
            self.steps,
            self.forward_ns / 1e9,
            self.backward_ns / 1e9,
            self.communication_ns / 1e9,
            self.wait_ns / 1e9,
            self.copy_ns / 1e9,
            self.bytes_reduced,
            self.buckets,
        )
