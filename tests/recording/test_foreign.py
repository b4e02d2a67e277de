"""An arena read from outside: whatever its header and its records say, it is read or refused, and no more."""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from forking import Child
from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.memory.foreign import ForeignArena
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.engine.recorder.trace import trace_of
from torchestra.errors import DistBackendError
from torchestra.monitor import jobs
from torchestra.monitor.live.job_table import group_tables
from torchestra.monitor.live.rank_page import rank_page
from torchestra.monitor.live.samples import GroupSample, JobSample, changes
from torchestra.monitor.rates import rates, straggler
from torchestra.monitor.top import as_json

ANY_WORD = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from([0, 1, -1, 2, 255, 1 << 62, at.MAGIC, at.VERSION])
)
HEADER_WORDS = [
    at.HEADER_MAGIC,
    at.HEADER_VERSION,
    at.HEADER_SIZE,
    at.HEADER_SLOT_BYTES,
    at.HEADER_CHUNK_BUFFER_BYTES,
    at.HEADER_HEAP_BYTES,
]
RANKS = 2


@pytest.fixture
def arena() -> Iterator[tuple[Arena, int]]:
    made, descriptor = Arena.create(layout_for(RANKS), "outside")
    yield made, descriptor
    os.close(descriptor)


def group_of(record: FlightRecord) -> GroupSample:
    return GroupSample("1", record, (True,) * RANKS, ("",) * RANKS, (None,) * RANKS)


def show(descriptor: int) -> str:
    """All that is ever made of an arena, as text."""
    foreign = ForeignArena(descriptor)
    before, after = read_flight_record(foreign), read_flight_record(foreign)
    between = rates(before, after)
    straggler(between)
    early, late = (JobSample(1, "made", 0.0, 0.0, "null", (group_of(record),)) for record in (before, after))
    (change,) = changes(early, late)
    pages = [part for place in range(RANKS) for part in rank_page(change, place)]
    Console(file=io.StringIO(), width=200).print(*group_tables([change]), *pages)
    return json.dumps([as_json(early, late), trace_of([after])])


def test_an_arena_is_read_from_outside(arena: tuple[Arena, int]) -> None:
    assert '"group": "outside"' in show(arena[1])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(HEADER_WORDS), ANY_WORD, min_size=1))
def test_a_damaged_header_is_refused(changes: dict[int, int]) -> None:
    made, descriptor = Arena.create(layout_for(RANKS), "outside")
    try:
        right = {offset: made.load_word(offset) for offset in HEADER_WORDS}
        for offset, value in changes.items():
            made.store_word(offset, value)
        if all(right[offset] == value for offset, value in changes.items()):
            ForeignArena(descriptor)
        else:
            with pytest.raises(DistBackendError, match=r"not an arena|layout of version|header is damaged"):
                ForeignArena(descriptor)
            with pytest.raises(
                DistBackendError, match=r"in word \d+ of its header, expected|has \d+ bytes, expected"
            ):
                Arena.attach(descriptor, layout_for(RANKS))
    finally:
        os.close(descriptor)


WORDS_READ = st.one_of(
    st.sampled_from(
        [
            at.HEADER_CLOCK,
            at.HEADER_TICKS,
            at.HEADER_NANOSECONDS,
            at.HEADER_NAME_LENGTH,
            at.HEADER_ABORT,
            at.HEADER_ABORT_LENGTH,
        ]
    ),
    st.integers(0, 63).map(lambda word: layout_for(RANKS).control + word * 8),
    st.integers(0, layout_for(RANKS).record_bytes // 8 - 1).map(
        lambda word: layout_for(RANKS).records + word * 8
    ),
    st.integers(0, 3).map(
        lambda entry: layout_for(RANKS).records + at.OPERATIONS_AT + entry * at.ENTRY_BYTES
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(WORDS_READ, ANY_WORD, min_size=1, max_size=40), st.binary(max_size=300))
def test_whatever_a_record_says_it_is_shown(changes: dict[int, int], said: bytes) -> None:
    made, descriptor = Arena.create(layout_for(RANKS), "outside")
    try:
        made.bytes[at.HEADER_ABORT_TEXT : at.HEADER_ABORT_TEXT + len(said)] = bytearray(said)
        for offset, value in changes.items():
            made.store_word(offset, value)
        show(descriptor)
    finally:
        os.close(descriptor)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2 * at.PAGE), st.booleans(), st.booleans())
def test_a_foreign_file_is_refused(content: bytes, sealed: bool, begins_right: bool) -> None:
    descriptor = os.memfd_create("torchestra:foreign", os.MFD_ALLOW_SEALING)
    try:
        if begins_right:
            content = at.MAGIC.to_bytes(8, "little") + at.VERSION.to_bytes(8, "little") + content
        os.write(descriptor, content)
        if sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(DistBackendError):
            ForeignArena(descriptor)
    finally:
        os.close(descriptor)


def test_files_of_other_kinds_are_refused() -> None:
    for path in ("/dev/null", "/proc/self/stat", __file__):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(DistBackendError, match="it is not a sealed memory file"):
                ForeignArena(descriptor)
        finally:
            os.close(descriptor)


def test_an_arena_cannot_be_cut_under_its_readers(arena: tuple[Arena, int]) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena[1], at.PAGE)


def test_what_looks_at_an_arena_of_its_own_process_closes_nobody_elses_file(tmp_path: Path) -> None:
    """The ranks here may end while it looks; the next files to be opened get the numbers of those closed."""
    made, descriptor = Arena.create(layout_for(RANKS), "own")
    made.hold(0)
    looking = [jobs._opened(Path(f"/proc/self/fd/{descriptor}")) for _ in range(2)]
    os.close(descriptor)
    del made  # closes its file, and what waited for that
    others = [os.open(tmp_path / f"{number}", os.O_CREAT | os.O_RDWR) for number in range(8)]
    try:
        assert [each.is_held(0) for each in looking] == [False, False]
        del looking
        assert [os.write(each, b"open") for each in others] == [4] * 8
    finally:
        for each in others:
            os.close(each)


def test_looking_at_an_arena_of_its_own_process_keeps_the_lock_and_few_files() -> None:
    made, descriptor = Arena.create(layout_for(RANKS), "own")
    made.hold(0)
    path, before = Path(f"/proc/self/fd/{descriptor}"), set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        looking = [jobs._opened(path) for _ in range(3)]
        del looking
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 4  # three at a time, each by way of one more
    assert Child(partial(made.is_held, 0)).result()  # a lock is seen by other processes only
    os.close(descriptor)
    del made
    assert set(os.listdir("/proc/self/fd")) < before
