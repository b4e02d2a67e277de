"""Choose the algorithm and the chunk of an operation, by size and number of ranks.

The numbers were measured on two cores with 1 MiB of second-level cache each (``make bench``);
they are chosen so that what is in flight stays in the caches: three buffers per rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchestra.engine.layout import EAGER_SLOT_BYTES
from torchestra.errors import InvalidArgumentError

_SMALLEST_CHUNK = 64
_USUAL_CACHE_BYTES, _MOST_CACHE_BYTES = 32 << 20, 128 << 20
_SINGLE_COPY = 192 << 10


@dataclass(frozen=True)
class Choices:
    """The thresholds of one group, in bytes. All ranks must use the same, but for ``stream_above``.

    Attributes:
        direct: all_reduce of up to this many bytes has every rank read every tensor. At most a buffer.
        chunk: bytes of a chunk of the pipelined algorithms. 64 to a buffer.
        share: bytes of a chunk where one piece in a buffer is read by everybody (broadcast, all_gather).
            64 to a buffer.
        eager: broadcast, reduce, gather and scatter with pieces of up to this many bytes have nobody wait for
            those whom it has nothing from (eager.py). At most EAGER_SLOT_BYTES; -1 for none of them.
        single_copy: operations that only move bytes have ranks read pieces of more than so many bytes where
            they lie, if all ranks can and it is faster (single_copy.py). At least a cache line.
        stream_above: an operation for which a rank reads and writes more than this of its own tensors writes
            its results past the caches.
    """

    direct: int
    chunk: int
    share: int
    eager: int = EAGER_SLOT_BYTES
    single_copy: int = _SINGLE_COPY
    stream_above: int = 12 << 20

    @classmethod
    def for_group(cls, size: int, buffer_bytes: int) -> Choices:
        """Return the usual thresholds of a group of ``size`` ranks on a host."""
        direct, share = (128 << 10, 128 << 10) if size == 2 else (16 << 10, 512 << 10)
        return cls(
            direct=min(direct, buffer_bytes),
            chunk=min(512 << 10, buffer_bytes),
            share=min(share, buffer_bytes),
            # A virtual machine is told the cache of the whole processor, of which it has a share.
            stream_above=3 * min(last_level_cache_bytes(), _MOST_CACHE_BYTES) // 4 // size,
        )

    def check(self, buffer_bytes: int) -> None:
        """Refuse what the kernels cannot work with, in buffers of so many bytes.

        Raises:
            InvalidArgumentError: names the field, its value and its limits.
        """
        limits = {
            "direct": (0, buffer_bytes),
            "chunk": (_SMALLEST_CHUNK, buffer_bytes),
            "share": (_SMALLEST_CHUNK, buffer_bytes),
            "eager": (-1, EAGER_SLOT_BYTES),
            "single_copy": (_SMALLEST_CHUNK, (1 << 63) - 1),
            "stream_above": (0, (1 << 63) - 1),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidArgumentError(
                    f"{name} is {value} bytes, must be from {least} to {most}"
                    + (" (the bytes of a buffer of this group)" if most == buffer_bytes else "")
                )

    @property
    def digest(self) -> int:
        """Return a number of 22 bits for what all ranks must have in common."""
        agreed = f"{self.direct} {self.chunk} {self.share} {self.eager} {self.single_copy}"
        return zlib.crc32(agreed.encode()) & 0x3F_FFFF

    def part(self, size: int) -> int:
        """Bytes per chunk and peer of an operation in which a buffer holds one piece for each peer."""
        return max(_SMALLEST_CHUNK, self.chunk // max(1, size - 1) // 64 * 64)


@functools.cache
def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of a core, as the system tells, or what is usual."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            largest = max(largest, int(path.read_text().strip().removesuffix("K")) << 10)
    return largest or _USUAL_CACHE_BYTES


def cores_in_affinity() -> int:
    """Return how many cores the system may run this process on, whatever quota it has of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SpinPolicy(NamedTuple):
    """The way in which a wait begins: so many spins, then so many yields, before it sleeps.

    It sleeps for ``poll_interval_s``, in seconds, and then lets Python check for failures.
    """

    spins: int
    yields: int
    poll_interval_s: float = 0.05


def spin_policy(ranks_here: int) -> SpinPolicy:
    """Return the policy of waits where ``ranks_here`` ranks share this host.

    Spinning is of use only while every rank has a core of its own, and is kept short (some 3 µs) even then:
    where the system has put two ranks on one core, nothing happens until the spinning one yields. A yield
    with nobody else to run costs 0.3 µs, so little is lost.
    """
    return SpinPolicy(100 if ranks_here <= cores_in_affinity() else 0, 1000, poll_interval(ranks_here))


def poll_interval(ranks_here: int) -> float:
    """Return how long, in seconds, a rank sleeps that waits for others, before it looks whether they live.

    The pause of survivors at a death begins with the rest of a poll interval; but each look at the others
    costs some 10 µs for each of them.
    """
    return min(max(0.02, 0.0025 * ranks_here), 0.05)


def spare_cores(ranks_here: int) -> int:
    """Return how many cores so many ranks leave idle on this host while each computes on one."""
    return max(0, cores_in_affinity() - ranks_here)
