"""The ranks' side of a host's calibration: flags and sleep on two ranks, memory on any number.

Ranks see each other's memory in the heaps of their group; what they write there are flags and buffers of
this module only (probes.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels.reductions import reduction
from torchestra.engine.kernels.selection import Choices, spin_policy
from torchestra.engine.native.atomics import load
from torchestra.engine.recorder.clock import Moment, TickScale, best_clock
from torchestra.errors import DistBackendError
from torchestra.performance import probes
from torchestra.types import ReduceOp

CHUNK_BYTES = 128 << 10
"""The longest part of a tensor that goes through a buffer at once."""

_FLAG_WORDS = 8
_ROUNDS = 500
_WAKE_ROUNDS = 40
_ASLEEP_S = 50e-6
"""After so long a rank that has said it will sleep does."""
_LONGEST_SLEEP_S = 5
_MAX_PASSES = 100
_CALLS, _FEW_BYTES = 16, 8
_SWITCHED_S = 100e-6
"""A rank that did not run for longer has lost its core to another."""

RateSamples = dict[int, dict[str, list[float]]]
"""By the size of a tensor in bytes: bytes per second of each chunk, by ``copy``, ``fetch`` and ``reduce``.

Where the system lets ranks read their peers' tensors where they lie, also by ``peer_read``; by
``peer_read_call`` the seconds of calls that read a few bytes; and by ``reads_peers`` 1 if this group does so,
else 0.
"""


def time_waits(seconds: float) -> dict[str, list[float]]:
    """On two ranks of a new group, return samples of ``flag_s``, ``wakeup_s`` and ``switch_s``, in seconds.

    Args:
        seconds: about how long to take samples of each.

    Raises:
        DistBackendError: the other rank is gone.
    """
    with _Meeting() as meeting:
        own, peer = meeting.flags[meeting.rank], meeting.flags[1 - meeting.rank]
        spins = spin_policy(1).spins

        def bounce() -> float:
            meeting.lower_flags()
            start = time.perf_counter()
            _expect(probes.bounce(own, peer, _ROUNDS, int(meeting.rank == 0), spins))
            return (time.perf_counter() - start) / (2 * _ROUNDS)

        found = {"flag_s": _together(bounce, seconds), "wakeup_s": _wake_ups(meeting, seconds)}
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        spins = 0
        found["switch_s"] = _together(bounce, seconds)
        os.sched_setaffinity(0, allowed)
        return found


def _wake_ups(meeting: _Meeting, seconds: float) -> list[float]:
    """Return how long after rank 0 has raised a flag rank 1, which sleeps, runs; on rank 1, else nothing."""
    own, peer = meeting.flags[meeting.rank], meeting.flags[1 - meeting.rank]
    early = Moment.now(meeting.clock)
    time.sleep(0.01)
    scale = TickScale(early, Moment.now(meeting.clock))
    scratch, timespec = np.zeros(2, dtype=np.int64), np.array([_LONGEST_SLEEP_S, 0], dtype=np.int64)
    ticks = np.zeros(_WAKE_ROUNDS, dtype=np.int64)
    delay = round(_ASLEEP_S / scale.seconds_per_tick)
    samples: list[float] = []
    for _ in range(max(1, round(seconds / (_WAKE_ROUNDS * _ASLEEP_S)))):
        meeting.lower_flags()
        if meeting.rank == 0:
            _expect(probes.wake(own, peer, _WAKE_ROUNDS, delay, meeting.clock, scratch.ctypes.data))
        else:
            words = (ticks.ctypes.data, meeting.clock, scratch.ctypes.data, timespec.ctypes.data)
            _expect(probes.sleep(own, peer, _WAKE_ROUNDS, *words))
            samples += [scale.duration(int(each)) for each in ticks]
    everybodys: list[list[float] | None] = [None, None]
    dist.all_gather_object(everybodys, samples)
    return everybodys[1] or []


def time_slices(seconds: float) -> list[float]:
    """On two ranks of a new group, compute on one core; return for how long this rank had it each time."""
    with _Meeting():
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed)})
        dist.barrier()
        slices: list[float] = []
        begun = since = last = time.perf_counter()
        while last - begun < seconds:
            now = time.perf_counter()
            if now - last > _SWITCHED_S:
                if last > since:  # else it lost the core again at once: for how long it had it is not known
                    slices.append(last - since)
                since = now
            last = now
        os.sched_setaffinity(0, allowed)
        return slices[1:]


def working_set_bytes(kind: str, nbytes: int) -> int:
    """Return how much memory a rank goes through that is timed with tensors of so many bytes.

    For a copy, out of one tensor and into another, these and the buffer, of which there is none if the one is
    a peer's; for a reduction one tensor, the buffer, and the chunk that is put into it.
    """
    chunk = 0 if kind == "peer_read" else min(nbytes, CHUNK_BYTES)
    return nbytes + 2 * chunk if kind == "reduce" else 2 * nbytes + chunk


def time_rates(sizes: Sequence[int], seconds: float) -> RateSamples:
    """On any number of ranks, return samples of how fast this rank goes through tensors while all others do.

    Args:
        sizes: of the tensors in bytes, multiples of 4.
        seconds: about how long to take samples of each; at least two passes through the tensor are made.

    Raises:
        DistBackendError: another rank is gone.
    """
    with _Meeting() as meeting:
        reads = reads_peers(meeting.size)
        return {nbytes: _rates(meeting, nbytes, seconds, reads) for nbytes in sizes}


def reads_peers(size: int) -> bool:
    """Return whether ranks of the default group read long pieces where they lie, by calls of the system.

    Where that is about as fast as a way through a buffer, one group does and the next does not.
    """
    if size == 1:
        return False
    engine: Any = dist.group.WORLD.communicator.engine  # type: ignore[union-attr]
    tensor = torch.zeros(size * (engine.choices.single_copy + 4) // 4)
    dist.all_to_all_single(torch.empty_like(tensor), tensor)  # the first such operation finds it out
    return bool(engine.context.load_word(at.READER) == at.BY_SYSTEM_CALL)


def _rates(meeting: _Meeting, nbytes: int, seconds: float, reads: bool) -> dict[str, list[float]]:
    """Return samples for one working set; every rank calls this.

    Args:
        reads: whether ranks of this group read their peers' tensors where they lie.
    """
    source, target = (torch.zeros(nbytes // 4) for _ in range(2))
    warm = torch.zeros(min(nbytes, CHUNK_BYTES) // 4)
    chunk = warm.nbytes
    copying = _Exchange(meeting, source, chunk, target, chunk, function=0)
    reducing = _Exchange(meeting, warm, 0, target, chunk, reduction(torch.float32, ReduceOp("SUM")))
    found: dict[str, list[float]] = {"copy": [], "fetch": [], "reduce": []}
    for exchange in (copying, reducing):
        exchange.run()  # which may compile the kernel
        begun = time.perf_counter()
        exchange.run()
        passes = torch.tensor([(seconds / 2) / max(1e-6, time.perf_counter() - begun)])
        dist.all_reduce(passes, dist.ReduceOp.MIN)
        for _ in range(max(2, min(_MAX_PASSES, int(passes)))):
            copied, taken = exchange.run()
            if exchange is copying:
                found["copy"] += copied
                found["fetch"] += taken
            else:
                found["reduce"] += [2 * each for each in taken]
    times = max(2, len(found["copy"]) * chunk // nbytes)
    if meeting.size > 1 and (read := _peer_reads(meeting, source, target, times)):
        found |= {**read, "reads_peers": [float(reads)]}
    return found


def _peer_reads(
    meeting: _Meeting, source: torch.Tensor, target: torch.Tensor, passes: int
) -> dict[str, list[float]]:
    """Have all ranks read the next one's ``source`` at once, so often; return samples by kind.

    Nothing if the system does not let one of them.
    """
    where = torch.empty(2 * meeting.size, dtype=torch.int64)
    dist.all_gather_into_tensor(where, torch.tensor([os.getpid(), source.data_ptr()]))
    pid, address = where.reshape(-1, 2)[(meeting.rank + 1) % meeting.size].tolist()
    chunk = min(source.nbytes, CHUNK_BYTES)
    ticks: npt.NDArray[np.int64] = np.zeros(max(_CALLS, source.nbytes // chunk), dtype=np.int64)
    words: npt.NDArray[np.int64] = np.zeros(probes.READ_WORDS, dtype=np.int64)
    words[probes.READ_TICKS // 8], words[probes.READ_CLOCK // 8] = ticks.ctypes.data, meeting.clock

    def read(length: int, chunk: int) -> int:
        code: int = probes.read_peer(words.ctypes.data, pid, target.data_ptr(), address, length, chunk)
        return code

    lets = torch.tensor([int(read(_FEW_BYTES, _FEW_BYTES) == probes.DONE)])
    dist.all_reduce(lets, dist.ReduceOp.MIN)
    if not lets:
        return {}

    def seconds_of(length: int, chunk: int) -> list[float]:
        taken: list[float] = []
        dist.barrier()
        for _ in range(passes):
            _expect(read(length, chunk))
            scale = meeting.scale().seconds_per_tick
            taken += [scale * max(1, int(each)) for each in ticks[: length // chunk]]
        dist.barrier()  # until then nobody frees what others read
        return taken

    calls = seconds_of(_CALLS * _FEW_BYTES, _FEW_BYTES)
    call_s = sorted(calls)[len(calls) // 2]
    whole = seconds_of(source.nbytes // chunk * chunk, chunk)
    return {
        "peer_read_call": calls,
        "peer_read": [chunk / max(seconds - call_s, seconds / 100) for seconds in whole],
    }


class _Exchange:
    """The words of :func:`probes.exchange`, and the memory that they are about."""

    def __init__(
        self,
        meeting: _Meeting,
        source: torch.Tensor,
        step: int,
        target: torch.Tensor,
        chunk: int,
        function: int,
    ) -> None:
        self._meeting, self._chunk = meeting, chunk
        self._memory = source, target
        rank, size = meeting.rank, meeting.size
        self._ticks = np.zeros((2, -(-target.nbytes // chunk)), dtype=np.int64)
        self._pointers = np.zeros(2, dtype=np.int64)
        streams = source.nbytes + target.nbytes > Choices.for_group(size, chunk).stream_above
        self._words: npt.NDArray[np.int64] = np.zeros(probes.EXCHANGE_WORDS, dtype=np.int64)
        for word, value in {
            probes.OWN_FLAG: meeting.flags[rank],
            probes.NEXT_FLAG: meeting.flags[(rank + 1) % size],
            probes.PREVIOUS_FLAG: meeting.flags[rank - 1],
            probes.SPINS: spin_policy(size).spins,
            probes.SOURCE: source.data_ptr(),
            probes.SOURCE_STEP: step,
            probes.TARGET: target.data_ptr(),
            probes.TARGET_BYTES: target.nbytes,
            probes.BUFFER: meeting.buffers[rank],
            probes.NEXT_BUFFER: meeting.buffers[(rank + 1) % size],
            probes.CHUNK: chunk,
            probes.FUNCTION: function,
            probes.POINTERS: self._pointers.ctypes.data,
            probes.STREAMS: int(streams),
            probes.COPY_TICKS: self._ticks[0].ctypes.data,
            probes.FETCH_TICKS: self._ticks[1].ctypes.data,
            probes.CLOCK: meeting.clock,
        }.items():
            self._words[word // 8] = value

    def run(self) -> tuple[list[float], list[float]]:
        """Make one pass; return bytes per second of each whole chunk: copied into the buffer, and taken."""
        meeting = self._meeting
        meeting.lower_flags()
        _expect(probes.exchange(self._words.ctypes.data, 0))
        seconds_per_tick = meeting.scale().seconds_per_tick
        copied, taken = (
            [self._chunk / (seconds_per_tick * max(1, int(each))) for each in ticks] for ticks in self._ticks
        )
        return copied, taken


class _Meeting:
    """A new default group of this process's ranks, and memory that they share, for a ``with`` block.

    Attributes:
        flags, buffers: by rank, the addresses of its flag, and of its buffer of CHUNK_BYTES.
        clock: see clock.py.
    """

    def __enter__(self) -> _Meeting:
        torch.set_num_threads(1)
        dist.init_process_group()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._own_flag = dist.zeros(_FLAG_WORDS, dtype=torch.int64)
        self._own_buffer = dist.zeros(CHUNK_BYTES, dtype=torch.uint8)
        self.flags, self.buffers = self._everybodys(self._own_flag), self._everybodys(self._own_buffer)
        self.clock = best_clock()
        self._early = Moment.now(self.clock)
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def _everybodys(self, own: torch.Tensor) -> list[int]:
        """Return the addresses, here, of all ranks' tensors, each in its rank's heap."""
        group = dist.group.WORLD
        assert group is not None
        context = group.communicator.engine.context.address
        heaps, heap_bytes = load(context + at.HEAPS), load(context + at.HEAP_BYTES)
        offsets = torch.empty(self.size, dtype=torch.int64)
        offset = own.data_ptr() - heaps - self.rank * heap_bytes
        dist.all_gather_into_tensor(offsets, torch.tensor([offset]))
        return [heaps + rank * heap_bytes + int(offset) for rank, offset in enumerate(offsets)]

    def lower_flags(self) -> None:
        """Set all flags to 0; every rank calls this."""
        dist.barrier()
        self._own_flag.zero_()
        dist.barrier()

    def scale(self) -> TickScale:
        """Return what turns ticks into seconds."""
        return TickScale(self._early, Moment.now(self.clock))


def _together(sample: Callable[[], float], seconds: float) -> list[float]:
    """Return as many samples on every rank as take about ``seconds``, after one that does not count."""
    count = torch.tensor([seconds / max(1e-6, sample() * 2 * _ROUNDS)])
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return [sample() for _ in range(max(5, min(1000, int(count))))]


def _expect(code: int) -> None:
    if code != probes.DONE:
        raise DistBackendError(f"rank {dist.get_rank()} lost the others while it measured: has a rank ended?")
