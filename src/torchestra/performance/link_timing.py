"""Measure a link: the lowest ranks of a job's first two hosts exchange messages over the engine's bridge.

Timed are, for messages of several sizes: round trips; streams in one direction, with up to WINDOW messages on
their way, and the processor time of both processes meanwhile; and streams in both directions at once. The
terms of LogGOPS are fitted to these (:func:`fit_link`), in classes by size. Then small operations of the two
ranks are timed, which tell what an exchange between hosts takes in an operation besides its messages
(:func:`fit_costs`); and at last operations of several sizes, with one rank on each of the two hosts and with
more, for fitting.py:fit_factors.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import torchestra as dist
from torchestra.engine.multihost.hierarchy import Call, Hierarchy
from torchestra.engine.operations import BARRIER, pack
from torchestra.errors import InvalidArgumentError
from torchestra.monitor.operation_timing import Cell, prepare, time_call
from torchestra.performance.calibration import LinkCalibration, LinkClass
from torchestra.performance.fitting import cells_to_fit
from torchestra.performance.operation_rounds import time_rounds
from torchestra.performance.recording import Recorder
from torchestra.performance.sampling import summarise
from torchestra.performance.schedule import Overhead
from torchestra.performance.workload import Operation
from torchestra.system.proc import boot_id

_SIZES = (64, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20)
_LIMITS = (4 << 10, 64 << 10, 1 << 20)
"""The longest messages of the classes but the last. Up to 64 KB are one frame (multihost/curve_bridge.py)."""

_WINDOW = 8
_MIN_SAMPLES, _MAX_SAMPLES = 4, 400
_LONGEST_SHARE = 0.2
"""A size is the last one if its round trip takes this share of the time for all."""
_BUSIER = 1.25
"""By how much longer streams in both directions take if it is not the link that is busy."""
_BATCH, _ROUNDS = 10, 3
_TIMEOUT_S = 60.0
_SMALL = (
    Cell("barrier", "float32", 0),
    *(
        Cell(name, "float32", 8)
        for name in (
            "all_reduce",
            "broadcast",
            "reduce_scatter_tensor",
            "all_gather_into_tensor",
            "all_to_all_single",
        )
    ),
)
"""Operations in which hosts exchange messages once, twice and four times."""

_OPERATIONS = (*(cell.operation for cell in _SMALL), "reduce")
_OPERATION_SIZES = (4, 4 << 10, 32 << 10, 256 << 10, 2 << 20)
_SHARES = 100  # of the time for the link: an operation has one of them


@dataclass(frozen=True)
class MessageTimes:
    """The measured times of messages of one size, in seconds.

    Attributes:
        one_way_s: half a round trip.
        stream_s: from one message of a stream to the next.
        send_cpu_s, receive_cpu_s: of the processor, for a message of a stream.
        both_ways_s: from one message to the next where each end streams to the other.
        spread: of the round trips.
    """

    one_way_s: float
    stream_s: float
    send_cpu_s: float
    receive_cpu_s: float
    both_ways_s: float = 0.0
    spread: float = 0.0

    @property
    def processor_s(self) -> tuple[float, float]:
        """Return the processor's time to send and to receive a message.

        The system's work for the network is in no process's time. Where streams in both directions take
        longer than one, it is not the link that is busy but the processor, with all of that time.
        """
        known_s = self.send_cpu_s + self.receive_cpu_s
        if self.both_ways_s <= _BUSIER * self.stream_s or not known_s:
            return self.send_cpu_s, self.receive_cpu_s
        factor = max(1.0, self.both_ways_s / known_s)
        return factor * self.send_cpu_s, factor * self.receive_cpu_s


@dataclass(frozen=True)
class LinkMeasurement:
    """The link, and what a host's calibration has of operations on several hosts.

    Attributes:
        link: the link.
        per_op_s: ``multihost_call``, ``bridge_begin`` and ``local_step``.
        times: what was measured, by size in bytes.
        operations: the seconds of operations, by the number of ranks on each of the two hosts.
    """

    link: LinkCalibration
    per_op_s: Mapping[str, float]
    times: Mapping[int, MessageTimes]
    operations: Mapping[int, Mapping[Operation, float]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """Return the widest spread of round trips."""
        return max(each.spread for each in self.times.values())


def measure_link(seconds: float, quantile: float, progress: Callable[[str], None]) -> LinkMeasurement | None:
    """Measure the link between the first two hosts of the default group. Every rank of the group calls it.

    Args:
        seconds: about how long.
        quantile: of the samples, which counts; 0.5 is the median.
        progress: called on rank 0 with what is measured next.

    Returns:
        On rank 0 the measurement; on others None.

    Raises:
        InvalidArgumentError: the group is on one host.
        DistError: a rank failed.
    """
    world = dist.group.WORLD
    hosts = None if world is None else world.communicator.engine.hosts
    if hosts is None:
        raise InvalidArgumentError(
            "a link is measured between two hosts, and all ranks of this job are on one"
        )
    pair = dist.new_group([hosts.members[0][0], hosts.members[1][0]])
    measurement = None
    if dist.get_rank(pair) >= 0:
        measurement = _Pair(pair, quantile).measure(seconds, progress)
        dist.destroy_process_group(pair)
    operations = {}
    for ranks in _counts(min(len(members) for members in hosts.members[:2])):
        if measurement is not None:
            progress(f"operations of {ranks} ranks on each host")
        operations[ranks] = _operations(hosts.members[:2], ranks, seconds / _SHARES)
    return None if measurement is None else replace(measurement, operations=operations)


def _counts(most: int) -> list[int]:
    """Return numbers of ranks on each host: the powers of two up to the most, and the most."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _operations(members: Sequence[Sequence[int]], ranks: int, seconds: float) -> dict[Operation, float]:
    """Return the seconds of operations of some ranks on each host; other ranks return nothing."""
    group = dist.new_group(sorted(itertools.chain(*(on_host[:ranks] for on_host in members))))
    found = {}
    if dist.get_rank(group) >= 0:
        cells = cells_to_fit(len(members) * ranks, _OPERATION_SIZES, _OPERATIONS)
        times = time_rounds(cells, seconds, group, stops=True)
        found = {
            Operation(cell.operation, cell.nbytes): each
            for cell, each in zip(cells, times, strict=True)
            if each is not None
        }
        dist.destroy_process_group(group)
    dist.barrier()
    return found


class _Pair:
    """One of the two ranks between which a link is measured; rank 0 of their group begins.

    Args:
        group: the two ranks.
        quantile: see :func:`measure_link`.
    """

    def __init__(self, group: Any, quantile: float) -> None:
        self._group, self._quantile = group, quantile
        self._first = dist.get_rank(group) == 0
        engine: Any = group.communicator.engine
        self._hierarchy: Hierarchy = engine.hierarchy
        bridge = self._hierarchy.bridge
        assert bridge is not None
        self._bridge, self._peer = bridge, 1 - bridge.host

    def measure(self, seconds: float, progress: Callable[[str], None]) -> LinkMeasurement | None:
        """Return the measurement on rank 0, else None."""
        each_s = seconds / (len(_SIZES) + 1) / 2
        times: dict[int, MessageTimes] = {}
        for nbytes in _SIZES:
            if self._first:
                progress(f"messages of {nbytes} bytes to the other host")
            times[nbytes] = self._message_times(nbytes, each_s)
            if 2 * times[nbytes].one_way_s > _LONGEST_SHARE * seconds:
                break
        if self._first:
            progress("small operations over both hosts")
        per_op_s = self._per_op(each_s, times[_SIZES[0]].one_way_s)
        boots = ["", ""]
        dist.all_gather_object(boots, boot_id(), group=self._group)
        if not self._first:
            return None
        link = fit_link(times, self._bridge.kind, len(set(boots)) == 1 and boots[0] != "")
        return LinkMeasurement(link, per_op_s, times)

    def _message_times(self, nbytes: int, seconds: float) -> MessageTimes:
        payload, buffer = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        self._round_trip(payload, buffer)
        trips = [self._round_trip(payload, buffer) for _ in range(_MIN_SAMPLES)]
        count = self._agreed_count(seconds / statistics.median(trips))
        trips += [self._round_trip(payload, buffer) for _ in range(count)]
        measured = summarise([each / 2 for each in trips], self._quantile)
        messages = self._agreed_count(seconds / measured.value) + _WINDOW
        streams = [self._stream(payload, buffer, messages) for _ in range(3)]
        own = [statistics.median(column) for column in zip(*streams, strict=True)]
        both: list[Any] = [None, None]
        dist.all_gather_object(both, own, group=self._group)
        (_, send_cpu_s), (stream_s, receive_cpu_s) = both
        both_s = statistics.median(self._stream_both_ways(payload, buffer, messages) for _ in range(3))
        told = [MessageTimes(measured.value, stream_s, send_cpu_s, receive_cpu_s, both_s, measured.spread)]
        dist.broadcast_object_list(told, group_src=0, group=self._group)
        return told[0]

    def _agreed_count(self, wanted: float) -> int:
        """Return a number that both ranks have, from that of rank 0."""
        told = [max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(wanted)))]
        dist.broadcast_object_list(told, group_src=0, group=self._group)
        return told[0]

    def _round_trip(self, payload: torch.Tensor, buffer: torch.Tensor) -> float:
        """Send to the other rank and back; return the seconds, of rank 0."""
        start = time.perf_counter()
        for sends in (self._first, not self._first):
            self._wait(self._begin_send(payload) if sends else self._begin_receive(buffer))
        return time.perf_counter() - start

    def _stream(self, payload: torch.Tensor, buffer: torch.Tensor, messages: int) -> tuple[float, float]:
        """Have rank 0 send messages to rank 1; return the time from one to the next, and of the processor."""
        begin, memory = (self._begin_send, payload) if self._first else (self._begin_receive, buffer)
        dist.barrier(group=self._group)
        cpu = time.process_time()
        seconds = self._windowed(lambda: begin(memory), messages)
        return seconds, (time.process_time() - cpu) / messages

    def _stream_both_ways(self, payload: torch.Tensor, buffer: torch.Tensor, messages: int) -> float:
        """Have both ranks send messages to each other; return the time from one to the next."""
        dist.barrier(group=self._group)
        receives, sends = [(self._peer, buffer)], [(self._peer, payload)]
        return self._windowed(lambda: self._bridge.begin(receives, sends, _TIMEOUT_S), messages)

    def _windowed(self, begin: Callable[[], Any], count: int) -> float:
        """Begin transfers, up to WINDOW before the first has ended; return the time from end to end."""
        under_way: deque[Any] = deque()
        ends: list[float] = []
        for number in range(count + _WINDOW):
            if number >= _WINDOW:
                self._wait(under_way.popleft())
                ends.append(time.perf_counter())
            if number < count:
                under_way.append(begin())
        return (ends[-1] - ends[0]) / (count - 1)

    def _begin_send(self, payload: torch.Tensor) -> Any:
        return self._bridge.begin([], [(self._peer, payload)], _TIMEOUT_S)

    def _begin_receive(self, buffer: torch.Tensor) -> Any:
        return self._bridge.begin([(self._peer, buffer)], [], _TIMEOUT_S)

    def _wait(self, pending: Any) -> None:
        self._hierarchy.wait(pending, Call(pack(BARRIER.kind), 0, _TIMEOUT_S, None))

    def _per_op(self, seconds: float, message_s: float) -> dict[str, float]:
        """Return the costs of operations on several hosts; both ranks call it, rank 0 gets its times.

        Args:
            message_s: the time of one small message.
        """
        word = torch.zeros(1, dtype=torch.int64)

        def step() -> None:
            self._hierarchy.share_from(0, word, Call(pack(BARRIER.kind), 0, _TIMEOUT_S, None))

        step_s = self._time(step, seconds)
        calls = {cell: prepare(cell, group=self._group) for cell in _SMALL}
        share_s = seconds / len(calls) / _ROUNDS
        rounds = [
            {cell: time_call(call, share_s, self._group, _BATCH) for cell, call in calls.items()}
            for _ in range(_ROUNDS)
        ]
        times = [
            _operation_time(cell, statistics.median(found[cell].median_us for found in rounds) / 1e6)
            for cell in calls
        ]
        return {"local_step": step_s, **fit_costs(times, step_s, message_s)}

    def _time(self, call: Callable[[], None], seconds: float) -> float:
        """Return the seconds of a call that both ranks make, one after the other."""

        def sample() -> float:
            start = time.perf_counter()
            for _ in range(_BATCH):
                call()
            return (time.perf_counter() - start) / _BATCH

        sample()
        batch_s = _BATCH * statistics.median(sample() for _ in range(_MIN_SAMPLES))
        count = self._agreed_count(seconds / batch_s)
        return summarise([sample() for _ in range(count)], self._quantile).value


@dataclass(frozen=True)
class OperationTime:
    """The time of a small operation of two hosts, and how often it goes through its parts.

    Attributes:
        exchanges: how often the hosts send each other messages.
        steps: how many steps each has within itself.
        seconds: what was measured.
    """

    exchanges: int
    steps: int
    seconds: float


def _operation_time(cell: Cell, seconds: float) -> OperationTime:
    events = Recorder(2, 1).record(Operation(cell.operation, cell.nbytes)).events[0, 0]
    names = [event.name for event in events if isinstance(event, Overhead)]
    return OperationTime(names.count("bridge_begin"), names.count("local_step"), seconds)


def fit_costs(times: Sequence[OperationTime], step_s: float, message_s: float) -> dict[str, float]:
    """Return what calls of operations cost, and exchanges in them, beyond their steps and messages.

    Between two exchanges the engine is Python. How long that takes depends on what has run on its core
    meanwhile, so operations tell it, and not messages alone.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for each in times:
        seconds[each.exchanges].append(max(0.0, each.seconds - each.steps * step_s))
    call_s, exchange_s = fit_line({number: statistics.mean(found) for number, found in seconds.items()})
    return {"multihost_call": call_s, "bridge_begin": max(0.0, exchange_s - message_s)}


def fit_link(times: Mapping[int, MessageTimes], bridge: str, shares_cores: bool) -> LinkCalibration:
    """Return the link that messages of these sizes, in bytes, were sent over.

    One message takes, where nothing else is sent (:mod:`torchestra.performance.network`)::

        o_send + max(k O_send, g + k G) + L + o_receive + max(0, k O_receive - (g + k G))

    o + k O is fitted to the processor time, g + k G to the streams, and L is what is left of half a round
    trip.
    """
    limits = [limit for limit in _LIMITS if any(nbytes > limit for nbytes in times)]
    classes, low = [], 0
    for limit in (*limits, None):
        chosen = [nbytes for nbytes in sorted(times) if low < nbytes <= (limit or nbytes)]
        if chosen:
            classes.append(_fit_class(limit, {nbytes: times[nbytes] for nbytes in chosen}))
        low = limit or low
    return LinkCalibration(tuple(classes), bridge, shares_cores)


def _fit_class(limit: int | None, times: Mapping[int, MessageTimes]) -> LinkClass:
    gap_s, gap_per_byte_s = fit_line({k: each.stream_s for k, each in times.items()})
    send_s, send_per_byte_s = fit_line({k: each.processor_s[0] for k, each in times.items()})
    receive_s, receive_per_byte_s = fit_line({k: each.processor_s[1] for k, each in times.items()})
    left = []
    for nbytes, each in times.items():
        gap = gap_s + nbytes * gap_per_byte_s
        sent = send_s + max(nbytes * send_per_byte_s, gap)
        left.append(each.one_way_s - sent - receive_s - max(0.0, nbytes * receive_per_byte_s - gap))
    return LinkClass(
        up_to_bytes=limit,
        latency_s=max(0.0, statistics.median(left)),
        send_overhead_s=send_s,
        receive_overhead_s=receive_s,
        gap_s=gap_s,
        gap_per_byte_s=gap_per_byte_s,
        send_overhead_per_byte_s=send_per_byte_s,
        receive_overhead_per_byte_s=receive_per_byte_s,
    )


def fit_line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return the intercept and the slope, neither negative, of the line with the least relative errors."""
    sizes, values = (np.array([*each], dtype=float) for each in (points.keys(), points.values()))
    weights = 1 / np.maximum(values, 1e-12)
    candidates = [_weighted([np.ones_like(sizes), sizes], values, weights)] if len(points) > 1 else []
    (slope,) = _weighted([sizes], values, weights)
    (constant,) = _weighted([np.ones_like(sizes)], values, weights)
    candidates += [np.array([0.0, slope]), np.array([constant, 0.0])]
    fit = [each for each in candidates if (each >= 0).all()]
    errors = [np.square((intercept + slope * sizes - values) * weights).sum() for intercept, slope in fit]
    intercept, slope = fit[int(np.argmin(errors))]
    return float(intercept), float(slope)


def _weighted(columns: Sequence[Any], values: Any, weights: Any) -> Any:
    matrix = np.stack(columns, axis=1) * weights[:, None]
    return np.linalg.lstsq(matrix, values * weights, rcond=None)[0]
