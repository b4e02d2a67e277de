"""What a report finds out, from records that were made up so that the answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchestra.engine.recorder.formats.rows import CallRow, Row, SampleRow, SpanRow, Table, TracedGroup
from torchestra.monitor.analysis.bandwidth import bandwidths_of, measure_copies
from torchestra.monitor.analysis.calls import call_edges
from torchestra.monitor.analysis.causes import causes, readings_of, shortage
from torchestra.monitor.analysis.phases import buckets_of, overlaps_of, phases_of, slowest_phase
from torchestra.monitor.analysis.summary import analyse, sentences
from torchestra.monitor.analysis.waiting import overlap, straggler, time_use, union, waiting_of

MS = 1000.0


def row(rank: int, number: int, start: float, length: float, waited: float = 0.0, **other: Any) -> Row:
    """An all_reduce; times in milliseconds."""
    usual: dict[str, Any] = {
        "group": 1, "group_name": "default", "pid": 100 + rank, "kind": "all_reduce", "op": "SUM",
        "dtype": "float32", "root": None, "count": 250, "nbytes": 1000, "peer": None, "tag": None,
        "blocking": True, "state": "done", "waited_for": None,
    }  # fmt: skip
    times = {"started_us": start * MS, "duration_us": length * MS, "waited_us": waited * MS}
    return Row(rank=rank, number=number, **times, **{**usual, **other})


def span(rank: int, kind: str, step: int, start: float, end: float, index: int | None = None) -> SpanRow:
    return SpanRow(1, rank, kind, step, index, 1000 if index is not None else 0, start * MS, end * MS)


def sample(rank: int, at_s: float, **other: Any) -> SampleRow:
    usual: dict[str, Any] = {
        "cpu_s": at_s, "runnable_s": 0.0, "minor_faults": 0, "major_faults": 0, "read_bytes": 0,
        "swapped_bytes": 0, "mhz": 2600.0, "threads": 1, "site": "train.py:7 in step",
    }  # fmt: skip
    return SampleRow(group=1, rank=rank, at_us=at_s * 1e6, **{**usual, **other})


def table(rows: list[Row], spans: list[SpanRow] = [], samples: list[SampleRow] = []) -> Table:  # noqa: B006
    ranks = sorted({each.rank for each in rows})
    group = TracedGroup(1, "default", len(ranks), {rank: 100 + rank for rank in ranks}, {})
    return Table((group,), tuple(rows), 0.0, tuple(spans), tuple(samples))


def test_waiting_is_put_down_to_the_rank_that_is_recorded_as_waited_for() -> None:
    rows = [
        row(0, 1, 0, 30, 20, waited_for=2),
        row(1, 1, 0, 30, 20, waited_for=2),
        row(2, 1, 20, 10),
        row(0, 5, 40, 10, 4, kind="recv", peer=1, tag=0),
        row(1, 6, 40, 10, 4, kind="recv", peer=0, tag=0, blocking=False),  # nobody waits for this one
    ]
    found = waiting_of(rows, 3)
    assert found.seconds == ((0, pytest.approx(0.004), 0.02), (0, 0, 0.02), (0, 0, 0))
    assert found.total == pytest.approx(0.044)
    assert found.caused_by(2) == 0.04


def test_waiting_between_hosts_is_put_down_to_the_rank_that_came_last() -> None:
    found = waiting_of([row(0, 1, 0, 30, 25), row(1, 1, 25, 5, 1), row(0, 2, 40, 5, 1)], 2)
    assert found.seconds == ((0, 0.025), (0, 0))
    assert found.unattributed == (0.001, 0.001)  # nobody came after these ranks


def test_time_is_counted_once_where_operations_overlap() -> None:
    own = [row(0, 1, 0, 10), row(0, 2, 5, 10, 3), row(0, 3, 35, 5), row(0, 4, 36, 100, blocking=False)]
    (use,) = time_use(own, [0])
    assert (use.waiting, use.moving, use.elsewhere) == pytest.approx((0.003, 0.017, 0.02))
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlap([(0, 3), (5, 9)], [(2, 6)]) == 2


def job(late_ms: float = 30.0, late: int = 3, size: int = 4, calls: int = 10) -> list[Row]:
    """All come to each operation after 50 ms, and one rank so much later; an operation takes 10 ms."""
    rows, now = [], 0.0
    for number in range(1, calls + 1):
        came = now + 50 + late_ms
        for rank in range(size):
            if rank == late:
                rows.append(row(rank, number, came, 10))
            else:
                rows.append(row(rank, number, now + 50, late_ms + 10, late_ms, waited_for=late))
        now = came + 10
    return rows


def test_the_straggler_is_found_and_told_where_it_is_slow() -> None:
    (found,) = analyse(table(job()))
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.share_of_waiting) == (3, pytest.approx(1))
    assert found.straggler.seconds == pytest.approx(0.9)
    assert sentences(found)[0] == (
        "Rank 3 is 60% slower between operations (80 ms against 50 ms); 100% of all waiting is for it (900 ms"
        " in all)."
    )


def test_nobody_is_blamed_for_waiting_that_all_cause() -> None:
    rows = [row(rank, 1, 0, 10, 3, waited_for=(rank + 1) % 4) for rank in range(4)]
    (found,) = analyse(table(rows))
    assert found.straggler is None
    assert (
        sentences(found)[0] == "The ranks wait for each other 30% of their time; no rank causes most of it."
    )
    assert straggler(waiting_of(job(0.1), 4), time_use(job(0.1), range(4))) is None  # it is not worth telling
    (quiet,) = analyse(table(job(0.1)))
    assert sentences(quiet)[0] == "The ranks hardly wait for each other."


def steps(forward: dict[int, float], waited: float = 0.0) -> tuple[list[Row], list[SpanRow]]:
    """Four steps of so many milliseconds of forward; backward takes 20, and what lies between steps 5."""
    rows, spans = [], []
    for rank, length in forward.items():
        now = 0.0
        for step in range(1, 5):
            taken = (length if step > 1 else 500.0) + waited
            spans.append(span(rank, "forward", step, now, now + taken))
            rows.append(row(rank, step, now + 1, waited + 1, waited))  # a broadcast of buffers, say
            spans.append(span(rank, "backward", step, now + taken, now + taken + 20))
            now += taken + 25
    return rows, spans


@pytest.mark.parametrize("waited", [0.0, 7.0])
def test_the_parts_of_a_step_are_compared_without_the_first_and_without_waiting(waited: float) -> None:
    phases = phases_of(*steps({0: 10, 1: 10, 2: 10.1, 3: 11.8}, waited))
    assert [phase.name for phase in phases] == ["forward", "backward", "between steps"]
    slow = slowest_phase(phases, 3)
    assert slow is not None
    assert (slow.name, slow.slowdown(3)) == ("forward", pytest.approx(0.18, abs=1e-3))
    assert slow.mean[3] == pytest.approx(0.0118)
    assert phases[2].mean == pytest.approx(dict.fromkeys(range(4), 0.005))
    assert slowest_phase(phases, 0) is None


def test_the_first_sentence_tells_rank_part_and_share() -> None:
    rows, spans = steps({0: 10, 1: 10, 2: 10, 3: 11.8})
    first = len(rows)
    rows += [row(rank, 9, 200, 41, 41, waited_for=3) for rank in (0,)]
    rows += [row(rank, 9, 200, 30, 29.5, waited_for=2) for rank in (1,)]
    rows += [row(rank, 9, 200, 30, 29.5, waited_for=1) for rank in (2,)]
    assert len(rows) == first + 3
    (found,) = analyse(table(rows, spans))
    assert sentences(found)[0] == (
        "Rank 3 is 18% slower in forward (11.8 ms against 10 ms); 41% of all waiting is for it (41 ms in"
        " all)."
    )


def test_a_bucket_is_matched_with_its_reduction_and_overlap_is_what_is_not_waited_for() -> None:
    spans = [
        span(0, "backward", 1, 0, 36),
        span(0, "bucket", 1, 10, 34, index=0),
        span(0, "bucket", 1, 20, 35, index=1),
        span(0, "wait", 1, 30, 36),
    ]
    rows = [
        row(0, 1, 2, 3),  # before any bucket was ready
        row(0, 2, 12, 8),
        row(0, 3, 22, 1, nbytes=4),  # of another size
        row(0, 4, 26, 6),
    ]
    found = buckets_of(rows, spans)
    assert [(each.index, each.ready_us, each.started_us, each.ended_us) for each in found] == [
        (0, 10 * MS, 12 * MS, 20 * MS),
        (1, 20 * MS, 26 * MS, 32 * MS),
    ]
    (seen,) = overlaps_of(spans, found)
    assert (seen.steps, seen.communicating, seen.exposed) == (1, pytest.approx(0.014), pytest.approx(0.002))
    assert seen.hidden_share == pytest.approx(12 / 14)
    assert [(each.started_us, each.ended_us) for each in buckets_of([], spans)] == [
        (10 * MS, 34 * MS),
        (20 * MS, 35 * MS),
    ]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ({"cpu_s": 2.0}, "Its main thread ran 100% of the time: it has more to compute."),
        (
            {"cpu_s": 1.0, "runnable_s": 1.0},
            "It could run, but had no core, 50% of the time (the others 0%): its cores are oversubscribed.",
        ),
        ({"cpu_s": 0.2}, "Its main thread ran only 10% of the time: for the rest it slept"),
        ({"cpu_s": 2.0, "minor_faults": 80_000}, "It takes 40,000 page faults a second (the others 0):"),
        (
            {"cpu_s": 2.0, "major_faults": 60, "swapped_bytes": 5 << 20},
            "It takes 30 page faults a second that read from a disk or from swap space (the others 0); 5 MiB",
        ),
        ({"cpu_s": 2.0, "read_bytes": 90_000_000}, "It reads 45.0 MB a second from disks (the others 0.0)."),
        ({"cpu_s": 2.0, "mhz": 1000.0}, "Its core runs at 2,067 MHz, the others' at 2,600."),
    ],
)  # fmt: skip
def test_a_slow_rank_is_explained_by_how_its_process_differs(end: dict[str, Any], told: str) -> None:
    samples = [sample(rank, at) for at in (0.0, 0.5) for rank in range(3)]
    samples += [sample(rank, 2.0) for rank in (0, 2)] + [sample(1, 2.0, site="load.py:3 in read", **end)]
    found = causes(readings_of(samples), 1)
    assert found[0].startswith(told)
    assert len(found) == 2
    assert "train.py:7 in step (50% of the looks)" in found[1]
    assert "load.py:3 in read (50% of the looks)" in found[1]


def test_lines_within_operations_are_left_out() -> None:
    sites = [None, "a.py:1 in f", "b.py:2 in g", "b.py:2 in g", "b.py:2 in g"]
    samples = [sample(0, at / 10, site=site) for at, site in enumerate(sites)]
    (without,) = readings_of(samples, [row(0, 1, 0, 50)])  # in which the first was asked for
    assert without.lines == (("b.py:2 in g", 1.0),)
    (kept,) = readings_of(samples, [row(0, 1, 0, 150)])  # too few are left
    assert kept.lines == (("b.py:2 in g", 0.75), ("a.py:1 in f", 0.25))


def test_a_machine_without_enough_cores_is_told() -> None:
    samples = [
        sample(rank, at, runnable_s=at * 0.6, cpu_s=at * 0.4) for at in (0.0, 1.0) for rank in range(2)
    ]
    assert shortage(readings_of(samples))[0].startswith(
        "The ranks' main threads could run, but had no core, 60%"
    )
    assert shortage(readings_of([sample(0, 0.0), sample(0, 1.0)])) == []
    assert causes([], 0) == readings_of([sample(0, 1.0)]) == []


def test_bandwidth_leaves_waiting_out() -> None:
    rows = [
        row(0, number, number, 0.5, waited, nbytes=1000) for number, waited in ((1, 0.4), (2, 0), (3, 0.25))
    ]
    rows += [row(0, 4, 9, 1, nbytes=1000, state="running"), row(0, 5, 9, 1, nbytes=0, kind="barrier")]
    (found,) = bandwidths_of(rows)
    assert (found.kind, found.nbytes, found.calls) == ("all_reduce", 1000, 3)
    assert found.bytes_per_s == pytest.approx(1000 / 0.25e-3)
    assert found.whole_bytes_per_s == pytest.approx(1000 / 0.5e-3)
    assert all(rate > 0 for rate in measure_copies([1000, 100_000]).values())


def test_ranks_that_are_stuck_come_first() -> None:
    rows = [row(rank, 1, 0, 1) for rank in range(3)]
    rows += [row(rank, 2, 10, 4000, 3990, state="running", waited_for=1) for rank in (0, 2)]
    (found,) = analyse(table(rows))
    assert (
        sentences(found)[0] == "Ranks 0, 2 have been in all_reduce (number 2) for 4 s; rank 1 had not come."
    )


CALLS = [
    CallRow(1, 1, 0, "fetch", 100, 0.5),
    CallRow(1, 1, 0, "push", 20, 1.5),
    CallRow(1, 0, 2, "push", 1, 0.25),
]


def test_calls_are_edges_between_workers_and_those_that_take_most_time_come_first() -> None:
    first, second = call_edges(CALLS)
    assert (first.caller, first.callee, first.calls, first.seconds) == (0, 1, 120, 2.0)
    assert first.functions == (("push", 20, 1.5), ("fetch", 100, 0.5))
    assert (second.caller, second.callee) == (2, 0)


def test_of_workers_that_only_call_each_other_the_calls_are_told() -> None:
    meeting = [row(rank, 1, 0, 5, 2, waited_for=1, kind="barrier") for rank in range(3)]
    (found,) = analyse(table(meeting)._replace(calls=tuple(CALLS)))
    assert not found.rows
    assert sentences(found) == [
        "Of calls by RPC, rank 1 spent most time on those of rank 0: 2 s in 120 calls; push took 1.5 s in 20"
        " of them."
    ]


def test_ranks_of_a_smaller_group_are_told_with_their_global_ranks() -> None:
    group = TracedGroup(2, "half", 4, {rank: 101 + 2 * rank for rank in range(4)}, {})
    whole = TracedGroup(1, "default", 8, {rank: 100 + rank for rank in range(8)}, {})
    (found,) = analyse(Table((whole, group), tuple(replace(each, group=2) for each in job()), 0.0))
    assert sentences(found)[0].startswith("Rank 3 (global rank 7) is ")
    stuck = [row(rank, 11, 5000, 2000, group=2, state="running") for rank in (0, 1, 2)]
    rows = [replace(each, group=2) for each in job()]
    (found,) = analyse(Table((whole, group), (*rows, *stuck), 0.0))
    assert sentences(found)[0].startswith("Ranks 0, 1, 2 (global ranks 1, 3, 5) have been in all_reduce")
    assert sentences(found)[0].endswith("; rank 3 (global rank 7) had not come.")
