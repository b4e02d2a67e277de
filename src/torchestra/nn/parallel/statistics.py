"""Measures where data parallel training spends its time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DDPStatistics:
    """The work of a DistributedDataParallel on this rank so far, in steps whose gradients were reduced.

    Attributes:
        steps: the number of steps.
        forward_seconds: in the module's forward, including the broadcast of buffers before it.
        backward_seconds: from the first gradient of the module's output to the last averaged gradient.
        communication_seconds: from the start of a step's first reduction to the end of its last, and in
            broadcasts of buffers.
        wait_seconds: the part of ``communication_seconds`` that the program spent waiting for it.
        copy_seconds: spent copying gradients into buckets and back.
        bytes_reduced: of gradients, each counted once per step.
        buckets: the number of buckets of a step.
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
        """Return the part of ``communication_seconds`` in which backward went on."""
        return max(0.0, self.communication_seconds - self.wait_seconds)

    @property
    def communication_share(self) -> float:
        """Return the share of forward and backward that waiting and copying took, from 0 to 1."""
        total = self.forward_seconds + self.backward_seconds
        return (self.wait_seconds + self.copy_seconds) / total if total else 0.0


@dataclass(slots=True)
class Counters:
    """The same numbers while they are counted, and the times of events in the current step.

    Times are of ``time.perf_counter_ns``, 0 for events that have not happened.
    """

    steps: int = 0
    buckets: int = 0
    bytes_reduced: int = 0
    reduced: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    communication_ns: int = 0
    wait_ns: int = 0
    copy_ns: int = 0
    forward_started: int = 0
    backward_started: int = 0
    backward_ended: int = 0
    communication_started: int = 0
    communication_ended: int = 0

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
