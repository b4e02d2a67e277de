"""Which algorithm and which chunk an operation takes, by size and number of ranks.

The numbers were measured on two cores with 1 MiB of second-level cache each (``torchestra bench``);
they are chosen so that what is in flight stays in the caches: three buffers per rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """The thresholds of one group, in bytes. All ranks of a group must use the same.

    Attributes:
        direct: all_reduce of up to this many bytes has every rank read every tensor.
        chunk: bytes of a chunk of the pipelined algorithms.
        share: bytes of a chunk where one piece in a buffer is read by everybody (broadcast, all_gather).
        stream_above: results larger than this are written past the caches.
    """

    direct: int
    chunk: int
    share: int
    stream_above: int = 4 << 20

    @classmethod
    def for_group(cls, size: int, buffer_bytes: int) -> Choices:
        direct, share = (128 << 10, 256 << 10) if size == 2 else (16 << 10, 512 << 10)
        return cls(
            direct=min(direct, buffer_bytes),
            chunk=min(512 << 10, buffer_bytes),
            share=min(share, buffer_bytes),
        )

    def part(self, size: int) -> int:
        """Bytes per chunk and peer of an operation in which a buffer holds one piece for each peer."""
        return max(64, self.chunk // max(1, size - 1) // 64 * 64)


def cores_in_affinity() -> int:
    """How many cores the system may run this process on, whatever quota it has of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def waiting_policy(ranks_here: int) -> tuple[int, int]:
    """How often a wait spins, and how often it then yields, for so many ranks on this host.

    Spinning is of use only while every rank has a core of its own, and is kept short (some 3 µs) even then:
    where the system has put two ranks on one core, nothing happens until the spinning one yields. A yield
    with nobody else to run costs 0.3 µs, so little is lost.
    """
    return (100 if ranks_here <= cores_in_affinity() else 0), 1000


def spare_cores(ranks_here: int) -> int:
    """How many cores so many ranks leave idle on this host while each computes on one."""
    return max(0, cores_in_affinity() - ranks_here)
