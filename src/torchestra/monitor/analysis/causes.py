"""Why a rank is slow: its processor time, page faults, disks, frequency and lines, beside the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from torchestra.engine.recorder.formats.rows import Row, SampleRow

_MAX_LINES, _MIN_SAMPLES = 3, 3
_QUEUED = 0.1
_SHORT = 0.25
_IDLE = 0.8
_MANY_FAULTS_PER_S = 2000.0
_FEW_MAJOR_FAULTS_PER_S = 5.0
_READ_BYTES_PER_S = 1 << 20
_SLOW_CORE = 0.9


@dataclass(frozen=True)
class Readings:
    """What the readings of a rank's process tell, for the time from the first to the last of them.

    Attributes:
        seconds: between these two.
        on_core: the share of the time in which its main thread ran, from 0 to 1.
        queued: the share in which that could have run, but no core was free: oversubscription.
        minor_faults, major_faults: page faults a second, without and with a read from a disk.
        read_bytes: from disks, bytes a second.
        swapped_bytes: that lay in swap space at the end.
        mhz: the mean frequency of its cores, or None.
        threads: of the process, that could run, on average.
        lines: the lines at which its program was most often, and in which share of the looks.
    """

    rank: int
    seconds: float
    on_core: float
    queued: float
    minor_faults: float
    major_faults: float
    read_bytes: float
    swapped_bytes: int
    mhz: float | None
    threads: float
    lines: tuple[tuple[str, float], ...]


def readings_of(samples: Sequence[SampleRow], rows: Sequence[Row] = ()) -> list[Readings]:
    """Return the readings of each rank of which there are at least two, by rank.

    Args:
        samples: of one group, by time.
        rows: the group's operations: lines at which a rank was while it was in one are left out, where there
            are others.
    """
    found = []
    for rank in sorted({sample.rank for sample in samples}):
        own = [sample for sample in samples if sample.rank == rank]
        first, last = own[0], own[-1]
        seconds = (last.at_us - first.at_us) / 1e6
        if seconds <= 0:
            continue
        sites = Counter(_sites(own, [row for row in rows if row.rank == rank and row.blocking]))
        known = [sample.mhz for sample in own if sample.mhz is not None]
        found.append(
            Readings(
                rank=rank,
                seconds=seconds,
                on_core=min(1.0, (last.cpu_s - first.cpu_s) / seconds),
                queued=min(1.0, (last.runnable_s - first.runnable_s) / seconds),
                minor_faults=(last.minor_faults - first.minor_faults) / seconds,
                major_faults=(last.major_faults - first.major_faults) / seconds,
                read_bytes=(last.read_bytes - first.read_bytes) / seconds,
                swapped_bytes=last.swapped_bytes,
                mhz=fmean(known) if known else None,
                threads=fmean(sample.threads for sample in own),
                lines=tuple((site, count / sites.total()) for site, count in sites.most_common(_MAX_LINES)),
            )
        )
    return found


def _sites(samples: Sequence[SampleRow], operations: Sequence[Row]) -> list[str]:
    """Return the lines at which a rank was when it was asked, outside of these operations if there are any.

    A reading has the answer to the question that was asked at the one before.
    """
    asked = [(before.at_us, now.site) for before, now in pairwise(samples) if now.site is not None]
    outside = [
        site
        for at_us, site in asked
        if not any(row.started_us <= at_us <= row.started_us + row.duration_us for row in operations)
    ]
    return outside if len(outside) >= _MIN_SAMPLES else [site for _, site in asked]


def causes(readings: Sequence[Readings], rank: int) -> list[str]:
    """Return why a rank is slow, in sentences, as far as its readings differ from the others'; the line last.

    They are told as what was seen, not as a proof: several can be true at once.
    """
    own = next((each for each in readings if each.rank == rank), None)
    others = [each for each in readings if each.rank != rank]
    if own is None or not others:
        return []

    def usual(of: Callable[[Readings], float]) -> float:
        return median(map(of, others))

    told = []
    if own.queued >= _QUEUED and own.queued >= 1.5 * usual(lambda each: each.queued):
        told.append(
            f"It could run, but had no core, {own.queued:.0%} of the time (the others"
            f" {usual(lambda each: each.queued):.0%}): its cores are oversubscribed."
        )
    if own.major_faults >= _FEW_MAJOR_FAULTS_PER_S and own.major_faults > 2 * usual(
        lambda each: each.major_faults
    ):
        told.append(
            f"It takes {own.major_faults:,.0f} page faults a second that read from a disk or from swap space"
            f" (the others {usual(lambda each: each.major_faults):,.0f})"
            + (
                f"; {own.swapped_bytes >> 20:,} MiB of it are swapped out."
                if own.swapped_bytes >> 20
                else "."
            )
        )
    if own.minor_faults >= _MANY_FAULTS_PER_S and own.minor_faults > 2 * usual(
        lambda each: each.minor_faults
    ):
        told.append(
            f"It takes {own.minor_faults:,.0f} page faults a second (the others"
            f" {usual(lambda each: each.minor_faults):,.0f}): it gets memory anew again and again."
        )
    if own.read_bytes >= _READ_BYTES_PER_S and own.read_bytes > 2 * usual(lambda each: each.read_bytes):
        told.append(
            f"It reads {own.read_bytes / 1e6:,.1f} MB a second from disks (the others"
            f" {usual(lambda each: each.read_bytes) / 1e6:,.1f})."
        )
    if own.mhz and (frequencies := [each.mhz for each in others if each.mhz]):
        normal = median(frequencies)
        if own.mhz < _SLOW_CORE * normal:
            told.append(f"Its core runs at {own.mhz:,.0f} MHz, the others' at {normal:,.0f}.")
    if own.on_core + own.queued < _IDLE:
        queued = f", and had no core for {own.queued:.0%} of it" if own.queued >= _QUEUED else ""
        told.append(
            f"Its main thread ran only {own.on_core:.0%} of the time{queued}: for the rest it slept, or"
            " waited for another rank, a disk, a lock, another thread or a timer."
        )
    elif not told and own.on_core >= _IDLE:
        told.append(f"Its main thread ran {own.on_core:.0%} of the time: it has more to compute.")
    if own.lines:
        lines = ", ".join(f"{Path(site).name} ({share:.0%} of the looks)" for site, share in own.lines)
        told.append(f"Between operations its program was mostly at {lines}.")
    return told


def shortage(readings: Sequence[Readings]) -> list[str]:
    """Return the sentence that tells that most ranks lack cores, if they do."""
    if not readings or (queued := median(each.queued for each in readings)) < _SHORT:
        return []
    return [
        f"The ranks' main threads could run, but had no core, {queued:.0%} of the time: this machine has more"
        " to do than it has cores for."
    ]
