"""Measure a host: :func:`measure_host` starts ranks on it, and makes a HostCalibration of what they find."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torchestra.engine.operations import COLLECTIVES
from torchestra.errors import InvalidArgumentError
from torchestra.launcher.api import launch
from torchestra.launcher.cores import usable_cores
from torchestra.monitor.operation_timing import Cell, time_operations
from torchestra.performance.calibration import HostCalibration, Rate
from torchestra.performance.fitting import cells_to_fit, fit_host
from torchestra.performance.host_timing import (
    RateSamples,
    time_rates,
    time_slices,
    time_waits,
    working_set_bytes,
)
from torchestra.performance.operation_rounds import join_and_time
from torchestra.performance.rank_log import READ_CALL
from torchestra.performance.sampling import Measured, check_quantile, summarise
from torchestra.performance.workload import Operation

Progress = Callable[[str], None]
"""Called with a line that says what is measured next."""

_TENSOR_BYTES = (64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20)
_RATES = ("copy", "fetch", "reduce", "peer_read")
_MAX_BYTES = 1 << 29  # of all ranks' tensors together
_MAX_RANKS = 16
_SHARES = 25  # of the time for a number: an operation has one of them


@dataclass(frozen=True)
class HostOptions:
    """How to measure a host.

    Attributes:
        ranks: numbers of ranks at once, for the rates of memory; empty for :func:`default_ranks`.
        seconds: about how long each number is measured for.
        quantile: of the samples, which counts: 0.5, the median.
    """

    ranks: tuple[int, ...] = ()
    seconds: float = 0.5
    quantile: float = 0.5

    def __post_init__(self) -> None:
        check_quantile(self.quantile)
        if not 0 < self.seconds <= 600:
            raise InvalidArgumentError(f"the seconds must be more than 0 and at most 600, got {self.seconds}")
        if any(not 1 <= each <= 1024 for each in self.ranks):
            raise InvalidArgumentError(f"numbers of ranks must be from 1 to 1024, got {list(self.ranks)}")


def default_ranks(cores: int) -> tuple[int, ...]:
    """Return the numbers of ranks to measure: 1, the cores, half as many again, twice as many, up to 16."""
    counts, last = {1, cores}, cores
    while last * 2 <= _MAX_RANKS:
        counts |= {last * 3 // 2, last * 2}
        last *= 2
    return tuple(sorted(counts))


def measure_host(options: HostOptions, progress: Progress) -> tuple[HostCalibration, dict[str, float]]:
    """Return the calibration of this host, and the spread of its numbers by field.

    Raises:
        DistError: a rank failed.
    """
    cores = usable_cores()
    progress("calls of operations")
    names = list(COLLECTIVES)
    cells = [Cell(name, "float32", 4) for name in names]
    timings = launch(time_operations, 1, cells, options.seconds / len(cells), False)[0]
    calls = {name: timing.median_us / 1e6 for name, timing in zip(names, timings, strict=True)}
    progress("flags, sleep and the switch from rank to rank")
    waits = _measured_waits(options)
    progress("time slices")
    slices = [*itertools.chain(*launch(time_slices, 2, options.seconds / 2))]
    waits["time_slice_s"] = summarise(slices or [options.seconds / 2], options.quantile)
    tables: dict[str, list[Rate]] = {kind: [] for kind in _RATES}
    read_calls: list[float] = []
    verdicts: list[float] = []
    spread: dict[str, float] = {f"host.{name}": each.spread for name, each in waits.items()}
    counts = sorted(set(options.ranks)) or default_ranks(cores)
    for ranks in counts:
        progress(f"copies and reductions, {ranks} ranks at once")
        found = _rate_samples(ranks, options)
        for kinds in itertools.chain(*(one.values() for one in found)):
            read_calls += kinds.get("peer_read_call", [])
            verdicts += kinds.get("reads_peers", [])
        for kind, rates, widest in _measured_rates(ranks, found, options.quantile):
            tables[kind] += rates
            spread[f"host.{kind}"] = max(widest, spread.get(f"host.{kind}", 0.0))
    host = HostCalibration(
        cores=cores,
        call_s=calls["barrier"],
        flag_s=waits["flag_s"].value,
        wakeup_s=waits["wakeup_s"].value,
        switch_s=waits["switch_s"].value,
        time_slice_s=waits["time_slice_s"].value,
        copy=tuple(tables["copy"]),
        fetch=tuple(tables["fetch"]),
        reduce=tuple(tables["reduce"]),
        per_op_s={f"call.{name}": seconds for name, seconds in calls.items()},
        peer_read=tuple(tables["peer_read"]) if 2 * sum(verdicts) > len(verdicts) else (),
    )
    if host.peer_read:
        call_s = summarise(read_calls, options.quantile).value
        host = replace(host, per_op_s={**host.per_op_s, READ_CALL: call_s})
    measured: dict[int, dict[Operation, float]] = {}
    for ranks in counts:
        progress(f"operations of {ranks} ranks")
        measured[ranks] = _measured_operations(ranks, options)
    progress("fitting the operations")
    return fit_host(host, measured), spread


def _measured_operations(ranks: int, options: HostOptions) -> dict[Operation, float]:
    """Return the seconds of some operations of so many ranks."""
    cells = cells_to_fit(ranks)
    times = launch(join_and_time, ranks, cells, options.seconds / _SHARES)[0]
    return {
        Operation(cell.operation, cell.nbytes): seconds
        for cell, seconds in zip(cells, times, strict=True)
        if seconds is not None
    }


def _measured_waits(options: HostOptions) -> dict[str, Measured]:
    """Return what two ranks found, by field. Both time the same rounds; the slower one counts."""
    found = launch(time_waits, 2, options.seconds / 3)
    summaries = [{name: summarise(each, options.quantile) for name, each in one.items()} for one in found]
    return {name: max(one[name] for one in summaries) for name in summaries[0]}


def _rate_samples(ranks: int, options: HostOptions) -> list[RateSamples]:
    """Return what each of some ranks found."""
    sizes = [nbytes for nbytes in _TENSOR_BYTES if nbytes * ranks <= _MAX_BYTES] or [_TENSOR_BYTES[0]]
    return launch(time_rates, ranks, sizes, options.seconds / len(sizes))


def _measured_rates(
    ranks: int, found: Sequence[RateSamples], quantile: float
) -> Iterator[tuple[str, list[Rate], float]]:
    """Yield each kind of rate, its numbers by working set, and the widest spread among them."""
    for kind in _RATES:
        if any(kind not in kinds for one in found for kinds in one.values()):
            continue  # its ranks do not read each other's tensors
        measured = {
            # A rate is a number by time: the other end of the times' quantile.
            nbytes: summarise([*itertools.chain(*(one[nbytes][kind] for one in found))], 1 - quantile)
            for nbytes in found[0]
        }
        rates = [
            Rate(ranks, working_set_bytes(kind, nbytes), each.value) for nbytes, each in measured.items()
        ]
        yield kind, rates, max(each.spread for each in measured.values())
