"""A recorded schedule is what ranks do: the same flags on one host, the same messages between hosts."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import HOST

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.multihost.thread_bridge import ThreadBridge
from torchestra.errors import InvalidArgumentError
from torchestra.performance.calibration import Rate
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import predict
from torchestra.performance.rank_log import READ_CALL
from torchestra.performance.recording import Recorder, Recording
from torchestra.performance.schedule import (
    AwaitFlag,
    Copy,
    Event,
    Fetch,
    LocalCopy,
    Overhead,
    PeerRead,
    Reduce,
    Send,
    SetFlag,
    WriteMiss,
)
from torchestra.performance.workload import Operation
from worlds import run

sys.path.append(str(Path(__file__).parent.parent / "multihost"))

from simulated import on_threads

Messages = dict[tuple[int, int], Counter[tuple[int, int]]]
"""By host and rail, how many messages there are to each host, of each length."""


def call(name: str, count: int) -> None:
    """Call an operation on ``count`` float32 elements."""
    tensor, ranks = torch.zeros(count), dist.get_world_size()
    if name == "barrier":
        dist.barrier()
    elif name == "all_gather_into_tensor":
        dist.all_gather_into_tensor(torch.zeros(ranks * count), tensor)
    elif name == "all_to_all_single":
        dist.all_to_all_single(torch.zeros(count), tensor)
    elif name == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(torch.zeros(count // ranks), tensor)
    elif name == "gather":
        dist.gather(tensor, [torch.zeros(count) for _ in range(ranks)] if dist.get_rank() == 0 else None)
    elif name == "broadcast":
        dist.broadcast(tensor, 0)
    else:
        getattr(dist, name)(tensor)


NAMES = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
    "scan",
)


def steps_taken(calls: list[tuple[str, int]], reader: int) -> list[tuple[int, int]]:
    """Run operations on this rank; return how many of the arena each was, and the last step.

    Args:
        reader: how it reads its peers' memory.
    """
    context: Any = dist.group.WORLD.communicator.engine.context
    taken = []
    context.store_word(at.READER, reader)
    dist.barrier()
    for name, count in calls:
        before = context.load_word(at.SEQUENCE)
        call(name, count)
        after = context.load_word(at.SEQUENCE)
        taken.append((after - before, context.arena.progress(context.rank) & ((1 << at.STEP_BITS) - 1)))
    dist.barrier()
    return taken


@pytest.mark.parametrize("reader", [at.REFUSED, at.BY_SYSTEM_CALL])
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_one_host_the_flags_are_those_that_ranks_set(ranks: int, reader: int) -> None:
    calls = [("barrier", 0), *((name, count * ranks) for name in NAMES for count in (2, 1 << 18))]
    real = run("threads", ranks, steps_taken, calls, reader)
    recorder = Recorder(1, ranks, single_copy=reader == at.BY_SYSTEM_CALL)
    for index, (name, count) in enumerate(calls):
        recording = recorder.record(Operation(name, 4 * count))
        for rank in range(ranks):
            values = [event.value for event in recording.events[0, rank] if isinstance(event, SetFlag)]
            assert values == sorted(values)
            last = values[-1] if values else 0
            expected = real[rank][index]
            assert (recording.flags[0] >> at.STEP_BITS, last & ((1 << at.STEP_BITS) - 1)) == expected, name


def total(events: list[Event], *kinds: type[Copy] | type[LocalCopy] | type[Fetch] | type[PeerRead]) -> int:
    """Return the bytes of all events of some kinds."""
    return sum(event.nbytes for event in events if isinstance(event, kinds))


def test_what_is_read_where_it_lies_is_moved_once() -> None:
    """Without a copy into a buffer; a rank copies its own piece, and checks that its tensor can be read."""
    nbytes = 3 << 20
    one, two = (
        Recorder(1, 3, single_copy=single_copy).record(Operation("all_to_all_single", nbytes)).events[0, 1]
        for single_copy in (True, False)
    )
    others, own = nbytes * 2 // 3, nbytes // 3
    assert nbytes <= total(two, Copy, LocalCopy) < nbytes + 128  # they tell each other lengths, too
    assert (total(two, Fetch), total(two, PeerRead)) == (others, 0)
    assert total(one, LocalCopy) == own
    assert total(one, Copy) < 128
    assert others <= total(one, PeerRead) < others + 128
    assert total(one, Fetch) == 0
    calls = [event for event in one if isinstance(event, Overhead) and event.name == READ_CALL]
    reads = [event for event in one if isinstance(event, PeerRead) and event.nbytes == own]
    assert len(reads) == 2 <= len(calls) <= 5
    machine = replace(HOST, peer_read=(Rate(2, 1 << 20, 1e10),), per_op_s={READ_CALL: 1e-6})
    slow = replace(machine, peer_read=(Rate(2, 1 << 20, 1e9),), per_op_s={READ_CALL: 1e-3})
    for operation in ("all_to_all_single", "scatter"):
        fast_s, slow_s = (
            predict([Operation(operation, nbytes)], Machine(1, 3, each)).seconds for each in (machine, slow)
        )
        assert slow_s > fast_s + 1e-3


_MOVES = (Copy, LocalCopy, WriteMiss, Fetch, Reduce)


def moved(events: list[Event], *kinds: type) -> int:
    """Return the bytes of all events of these kinds."""
    return sum(event.nbytes for event in events if isinstance(event, _MOVES) and type(event) in kinds)


def test_the_bytes_of_an_all_reduce_are_counted_once() -> None:
    """In two halves: each rank copies the other's half out, reduces its own, and fetches the other's back."""
    nbytes = 1 << 20
    (events,) = [Recorder(1, 2).record(Operation("all_reduce", nbytes)).events[0, 0]]
    assert moved(events, Fetch) == nbytes // 2
    assert moved(events, Reduce) == nbytes
    assert moved(events, Copy) == nbytes  # its own result goes into its buffer too
    new = {
        kind: sum(e.nbytes for e in events if type(e) is kind and e.working_set_bytes)
        for kind in (Copy, Fetch)
    }
    assert new == {Copy: nbytes // 2, Fetch: 0}  # what was copied out is not new when it comes back


def test_memory_that_is_touched_first_comes_from_where_all_of_it_fits() -> None:
    """A rank alone copies its tensor into its buffer, and from there into the other tensor."""
    nbytes = 1 << 20
    (events,) = Recorder(1, 1).record(Operation("all_gather_into_tensor", nbytes)).events.values()
    far = {kind: sum(e.nbytes for e in events if type(e) is kind and e.working_set_bytes) for kind in _MOVES}
    assert far == {Copy: nbytes, LocalCopy: 0, WriteMiss: 2 * nbytes, Fetch: 0, Reduce: 0}
    (footprint,) = {e.working_set_bytes for e in events if isinstance(e, _MOVES) and e.working_set_bytes}
    assert 3 * nbytes <= footprint <= 3 * nbytes + (64 << 10)  # two tensors and two buffers of half as much


def test_the_result_of_a_reduction_in_other_memory_costs_its_writing_and_no_copy_besides() -> None:
    nbytes = 1 << 20
    events = Recorder(1, 2).record(Operation("reduce_scatter_tensor", nbytes)).events[0, 0]
    assert (moved(events, Fetch), moved(events, Reduce)) == (0, nbytes)
    assert moved(events, Copy) == nbytes // 2


@pytest.mark.parametrize(("ranks", "of_a_tensor"), [(2, 2), (4, 10 / 3)])
def test_a_reduction_takes_as_long_as_it_reads_and_writes(ranks: int, of_a_tensor: float) -> None:
    """In bytes of two sources, which read two and write one: of four, four are read and one is written."""
    events = Recorder(1, ranks).record(Operation("all_reduce", 12 << 10)).events[0, 0]
    assert moved(events, Reduce) == of_a_tensor * (12 << 10)


def test_a_reduction_of_one_source_is_a_copy() -> None:
    (events,) = Recorder(1, 1).record(Operation("reduce_scatter_tensor", 1 << 20)).events.values()
    assert (moved(events, Reduce), moved(events, LocalCopy)) == (0, 1 << 20)


def test_every_wait_is_for_a_flag_that_is_set() -> None:
    recording = Recorder(1, 3).record(Operation("all_reduce", 1 << 20))
    for events in recording.events.values():
        for event in events:
            if isinstance(event, AwaitFlag):
                flags = [e.value for e in recording.events[0, event.local_rank] if isinstance(e, SetFlag)]
                assert max(flags) >= event.value


def messages_of(recording: Recording) -> Messages:
    found: Messages = {}
    for (host, rail), events in recording.events.items():
        sends = [event for event in events if isinstance(event, Send)]
        found[host, rail] = Counter((other, event.nbytes) for event in sends for other in event.hosts)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 1)])
def test_between_hosts_the_messages_are_those_that_bridges_carry(
    name: str, layout: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, calls = sum(layout), (60, 1 << 18)
    real: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    begin = ThreadBridge.begin

    def counted(bridge: ThreadBridge, receives: Any, sends: Any, timeout_s: float) -> Any:
        real[dist.get_rank()] += [(bridge.host, end, tensor.numel()) for end, tensor in sends]
        return begin(bridge, receives, sends, timeout_s)

    def run_all() -> None:
        for count in calls:
            dist.barrier()
            real[dist.get_rank()].clear()
            call(name, count * ranks)
            taken[dist.get_rank(), count] = Counter((end, nbytes) for _, end, nbytes in real[dist.get_rank()])

    taken: dict[tuple[int, int], Counter[tuple[int, int]]] = {}
    monkeypatch.setattr(ThreadBridge, "begin", counted)
    on_threads(layout, run_all)
    recorder = Recorder(len(layout), layout[0])
    for count in calls:
        recorded = messages_of(recorder.record(Operation(name, 4 * count * ranks)))
        for rank in range(ranks):
            assert recorded[divmod(rank, layout[0])] == taken[rank, count], (rank, count)


def test_one_host_stands_for_many() -> None:
    recorder = Recorder(67, 1, apart=[7])
    assert (recorder.recorded, recorder.stands_for_others) == ([7, 66], 66)
    for host, rails in messages_of(recorder.record(Operation("all_reduce", 1 << 20))).items():
        assert {end for end, _ in rails} == set(range(67)) - {host[0]}


def test_a_host_in_a_grid_is_recorded_with_one_of_its_row() -> None:
    """The slow host 7 delays its row, and that the others, so one of its row has to stand for them."""
    recorder = Recorder(100, 1, apart=[7])
    assert (recorder.recorded, recorder.stands_for_others) == ([0, 7], 0)
    sent = messages_of(recorder.record(Operation("all_reduce", 1 << 20)))
    assert {end for end, _ in sent[7, 0]} == ({*range(10)} | {*range(7, 100, 10)}) - {7}


@pytest.mark.parametrize(
    ("hosts", "ranks", "apart", "told"),
    [
        (0, 1, (), "at least 1 host"),
        (1, 0, (), "1 to 256"),
        (1 << 20, 2, (), "at most"),
        (2, 1, (2,), "no host 2"),
    ],
)
def test_impossible_jobs_are_refused(hosts: int, ranks: int, apart: tuple[int, ...], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        Recorder(hosts, ranks, apart)


def test_what_needs_every_host_is_refused_on_many() -> None:
    with pytest.raises(InvalidArgumentError, match="gather is simulated on up to 64 ranks"):
        Recorder(100, 1).record(Operation("gather", 4096))
