"""A calibration: the times of the parts of operations on a machine, over a link, and of a training step.

``torchestra calibrate`` writes one as JSON, and the performance model takes all its numbers from it. Units
are seconds, bytes and bytes per second; a time is a median. A file is read with checks: a key that is unknown
or missing, and a number that is negative, infinite or NaN, are errors that name the field.

The terms of a link are those of LogGP (Alexandrov and others, "LogGP: Incorporating Long Messages into the
LogP Model", 1995), and, for the processor's time by byte, of LogGOPS (Hoefler and others, "LogGOPSim", 2010).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchestra.engine.recorder.trace import replacing
from torchestra.errors import InvalidArgumentError
from torchestra.performance.decoding import decode, encode
from torchestra.performance.interpolation import (
    OperationFactor,
    Rate,
    Slowdown,
    SwitchTime,
    check_numbers,
    interpolated,
    is_fit,
    rate_at,
    slowdown_at,
)

__all__ = [
    "VERSION",
    "Calibration",
    "Conditions",
    "HostCalibration",
    "LinkCalibration",
    "LinkClass",
    "OperationFactor",
    "Rate",
    "Slowdown",
    "StepCalibration",
    "StepTimes",
    "SwitchTime",
    "rate_at",
    "slowdown_at",
]

VERSION = 3
"""Of the file. A file of another version is refused."""


@dataclass(frozen=True)
class HostCalibration:
    """The times of the parts of an operation on a host.

    The rates are those of a tensor that the operation has not touched before. What it touches again is in the
    caches: there the rate of the smallest working set holds.

    Attributes:
        cores: the cores on which ranks may run.
        call_s: a public call of an operation that has nothing to wait for (a barrier of one rank).
        flag_s: until a rank that spins, on a core of its own, sees a flag that another has set: one way.
        wakeup_s: from a flag's setting until a rank that sleeps on it runs, on an idle core.
        switch_s: until a core has gone from one rank that waits to another that is ready, with two on it.
        switches: the same by the number of ranks of the host, in rising order.
        time_slice_s: for how long a rank keeps a core while others are ready for it.
        copy: how fast a tensor is copied into a shared buffer.
        fetch: how fast a peer's buffer, just written on its core, is copied into a tensor.
        reduce: how fast a float32 tensor and a peer's buffer are added up, into the tensor.
        per_op_s: other costs by name. ``call.NAME``: :attr:`call_s` of the collective NAME on 4 bytes.
            ``multihost_call``: a call of a group on several hosts, beyond its steps; ``local_step``: one of
            its steps within a host of one rank; ``bridge_begin``: one of its exchanges between hosts, beyond
            the messages. ``process_vm_readv``: a call by which a rank reads a peer's
            memory, without its bytes.
        peer_read: how fast such calls copy a peer's tensor into another. Empty where most groups make none,
            because they may not, or are not faster so (engine/kernels/single_copy.py).
        call_slowdowns: of calls, :attr:`call_s` and ``call.NAME``.
        work_slowdowns: of copies and reductions.
        operations: of whole operations, beyond all of these.
    """

    cores: int
    call_s: float
    flag_s: float
    wakeup_s: float
    switch_s: float
    time_slice_s: float
    copy: tuple[Rate, ...]
    fetch: tuple[Rate, ...]
    reduce: tuple[Rate, ...]
    per_op_s: Mapping[str, float] = field(default_factory=dict)
    switches: tuple[SwitchTime, ...] = ()
    peer_read: tuple[Rate, ...] = ()
    call_slowdowns: tuple[Slowdown, ...] = ()
    work_slowdowns: tuple[Slowdown, ...] = ()
    operations: tuple[OperationFactor, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, positive=("cores", "time_slice_s"))
        ranks = [each.ranks for each in self.switches]
        if ranks != sorted(set(ranks)):
            raise InvalidArgumentError(
                f"HostCalibration.switches: the numbers of ranks must rise, got {ranks}"
            )
        for name in ("copy", "fetch", "reduce"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"HostCalibration.{name} must have at least one rate, it has none")
        for name, seconds in self.per_op_s.items():
            if not is_fit(seconds):
                raise InvalidArgumentError(f"HostCalibration.per_op_s[{name!r}] must be >= 0, got {seconds}")

    def switch_at(self, ranks: int) -> float:
        """Return the seconds of a switch with so many ranks on the host, between those that were measured."""
        if not self.switches:
            return self.switch_s
        return interpolated([(each.ranks, each.switch_s) for each in self.switches], ranks)

    def call_slowdown(self, ranks: int) -> float:
        """Return by how much calls are longer with so many ranks on the host (:func:`slowdown_at`)."""
        return slowdown_at(self.call_slowdowns, 1, ranks)

    def work_slowdown(self, operation_bytes: int, ranks: int) -> float:
        """Return by how much work on memory takes longer in such an operation (:func:`slowdown_at`)."""
        return slowdown_at(self.work_slowdowns, operation_bytes, ranks)

    def copy_bytes_per_s(self, working_set_bytes: int, ranks: int = 1) -> float:
        """Return how fast one of ``ranks`` ranks copies (:func:`rate_at`)."""
        return rate_at(self.copy, working_set_bytes, ranks)

    def fetch_bytes_per_s(self, working_set_bytes: int, ranks: int = 1) -> float:
        """Return how fast one of ``ranks`` ranks fetches from a peer's buffer (:func:`rate_at`)."""
        return rate_at(self.fetch, working_set_bytes, ranks)

    def peer_read_bytes_per_s(self, working_set_bytes: int, ranks: int = 1) -> float:
        """Return how fast one of ``ranks`` ranks reads its peers' tensors (:func:`rate_at`)."""
        return rate_at(self.peer_read, working_set_bytes, ranks)

    def reduce_bytes_per_s(self, working_set_bytes: int, ranks: int = 1) -> float:
        """Return how fast one of ``ranks`` ranks reduces, in bytes read (:func:`rate_at`)."""
        return rate_at(self.reduce, working_set_bytes, ranks)


_LINK_SECONDS = (
    "latency_s",
    "send_overhead_s",
    "receive_overhead_s",
    "gap_s",
    "gap_per_byte_s",
    "send_overhead_per_byte_s",
    "receive_overhead_per_byte_s",
)


@dataclass(frozen=True)
class LinkClass:
    """The times of messages up to a size, between two hosts over the engine's own transport.

    A message of k bytes keeps its sender's processor for ``send_overhead_s + k * send_overhead_per_byte_s``,
    the sender's link for ``gap_s + k * gap_per_byte_s``, arrives ``latency_s`` after its last byte has left,
    and keeps its receiver's processor like the sender's.

    Attributes:
        up_to_bytes: the longest message of this class; None for the last class.
        latency_s: L. Of the network and what runs it, without the overheads.
        send_overhead_s, receive_overhead_s: o. Of the processor, for a message.
        gap_s: g. The least time between two messages.
        gap_per_byte_s: G. The link's time by byte. All ranks of a host share its link.
        send_overhead_per_byte_s, receive_overhead_per_byte_s: O. Of the processor, by byte (copies, the
            system, encryption); it runs while the link sends.
    """

    up_to_bytes: int | None
    latency_s: float
    send_overhead_s: float
    receive_overhead_s: float
    gap_s: float
    gap_per_byte_s: float
    send_overhead_per_byte_s: float = 0.0
    receive_overhead_per_byte_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, positive=("up_to_bytes",))

    def times(self, factor: float) -> LinkClass:
        """Return the class of messages that take ``factor`` times as long."""
        if factor == 1.0:
            return self
        seconds = {name: factor * getattr(self, name) for name in _LINK_SECONDS}
        return replace(self, **seconds)


@dataclass(frozen=True)
class LinkCalibration:
    """A link between two hosts: one class, or several by size if one line does not fit.

    Attributes:
        classes: by size, in rising order; only the last one has no limit.
        bridge: what was measured: ``"curve"``, ``"gloo"``, ``"mpi"``.
        shares_cores: both hosts were one machine's namespaces, so that they shared its cores.
        operations: by how much longer operations of both hosts take over it than their parts.
    """

    classes: tuple[LinkClass, ...]
    bridge: str = "curve"
    shares_cores: bool = False
    operations: tuple[OperationFactor, ...] = ()

    def __post_init__(self) -> None:
        limits = [each.up_to_bytes for each in self.classes]
        if not limits or limits[-1] is not None or None in limits[:-1]:
            raise InvalidArgumentError(
                f"LinkCalibration.classes: only the last has up_to_bytes None, got {limits}"
            )
        known = [limit for limit in limits if limit is not None]
        if known != sorted(set(known)):
            raise InvalidArgumentError(f"LinkCalibration.classes: up_to_bytes must rise, got {limits}")

    def of(self, nbytes: int) -> LinkClass:
        """Return the class of a message."""
        for each in self.classes:
            if each.up_to_bytes is None or nbytes <= each.up_to_bytes:
                return each
        raise AssertionError


@dataclass(frozen=True)
class StepTimes:
    """The times of a training step's compute where ``ranks`` ranks of a host compute at once.

    Where they are more than its cores, the time for which others have the core does not count.

    Attributes:
        ranks: how many.
        forward_s: the forward pass and the loss.
        backward_s: the backward pass, without any communication.
        optimizer_s: the rest: the optimizer's step, and setting gradients to zero.
        ready_s: by bucket, in the order in which they are reduced: when it is ready, since backward began.
        whole_s: from one step to the next under DistributedDataParallel, in which these ranks' gradients are
            reduced; 0 if it was not measured.
    """

    ranks: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    ready_s: tuple[float, ...]
    whole_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, positive=("ranks",))
        if not all(is_fit(each) for each in self.ready_s) or list(self.ready_s) != sorted(self.ready_s):
            raise InvalidArgumentError(
                f"StepTimes.ready_s must be >= 0 and must not fall, got {list(self.ready_s)}"
            )


@dataclass(frozen=True)
class StepCalibration:
    """A training step of a model under DistributedDataParallel.

    Attributes:
        name: what was measured, for people.
        bucket_bytes: the sizes of the buckets of gradients, in the order in which they are reduced.
        dtype: of the gradients.
        times: by the number of ranks of a host, in rising order.
    """

    name: str
    bucket_bytes: tuple[int, ...]
    dtype: str
    times: tuple[StepTimes, ...]

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.times or [each.ranks for each in self.times] != sorted(
            {each.ranks for each in self.times}
        ):
            raise InvalidArgumentError("StepCalibration.times must not be empty, and its ranks must rise")
        for each in self.times:
            if len(each.ready_s) != len(self.bucket_bytes):
                raise InvalidArgumentError(
                    f"StepCalibration: {each.ranks} ranks have {len(each.ready_s)} times ready_s for"
                    f" {len(self.bucket_bytes)} buckets"
                )
        if any(nbytes <= 0 for nbytes in self.bucket_bytes):
            raise InvalidArgumentError(f"StepCalibration.bucket_bytes must be > 0, got {self.bucket_bytes}")

    def at(self, ranks: int) -> StepTimes:
        """Return the times for a number of ranks on a host: those measured for the nearest number."""
        return min(self.times, key=lambda each: (abs(each.ranks - ranks), each.ranks))


@dataclass(frozen=True)
class Conditions:
    """The circumstances of a calibration: where, when and how it was measured.

    Attributes:
        machine: the processor and the system.
        versions: of torchestra, torch and Python.
        taken_at: the time, ISO 8601.
        busy_share: the share of all cores that other programs used before the measurements, 0 to 1; None if
            the system does not say.
        seconds: how long it took.
        spread: by field, as ``host.flag_s``: half the distance between the quartiles, by the median.
        warnings: what may be wrong with the numbers, for people.
    """

    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    taken_at: str = ""
    busy_share: float | None = None
    seconds: float = 0.0
    spread: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class Calibration:
    """All that ``torchestra calibrate`` has measured: a host; a link and a training step if asked to."""

    host: HostCalibration
    link: LinkCalibration | None = None
    step: StepCalibration | None = None
    conditions: Conditions = field(default_factory=Conditions)

    def save(self, path: str | Path) -> None:
        """Write it to a file as JSON, which replaces an earlier file at once."""
        text = json.dumps({"version": VERSION, **encode(self)}, indent=1, allow_nan=False)
        with replacing(Path(path)) as file:
            file.write(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file that :meth:`save` wrote.

        Raises:
            InvalidArgumentError: the file is not there, is not JSON, has another version, or a field in it is
                unknown, missing or makes no sense.
        """
        try:
            found = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                f"cannot read the calibration {path}: {error}; `torchestra calibrate` writes one"
            ) from error
        if not isinstance(found, dict) or found.pop("version", None) != VERSION:
            raise InvalidArgumentError(
                f"{path} is not a calibration of version {VERSION}: measure again with `torchestra calibrate`"
            )
        try:
            calibration: Calibration = decode(cls, found)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"the calibration {path} is wrong: {error}") from error
        return calibration
