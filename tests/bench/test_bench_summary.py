"""The statistics of a cell."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ranks.timing import timed, timed_dirtied
from benchmarks.summary import (
    geometric_mean,
    median_interval,
    percentile,
    plan_batches,
    slowest,
    summarise,
)

samples = st.lists(st.floats(min_value=0.1, max_value=1e9), min_size=1, max_size=50)


def test_the_slowest_rank_counts_sample_by_sample():
    assert slowest([[1.0, 9.0, 3.0], [2.0, 4.0, 3.5]]) == [2.0, 9.0, 3.5]


def test_ranks_with_different_numbers_of_samples_are_a_mistake():
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 2.0], [1.0]])


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.99, 3.0), ([4.0, 1.0, 2.0], 0.5, 2.0), ([1.0, 2.0], 0.5, 1.5), (list(range(101)), 0.99, 99)],
)
def test_percentiles_interpolate(values, share, expected):
    assert percentile(values, share) == pytest.approx(expected)


@given(samples, st.floats(0, 1))
def test_a_percentile_lies_among_the_samples(values, share):
    assert min(values) <= percentile(values, share) * (1 + 1e-12)
    assert percentile(values, share) <= max(values) * (1 + 1e-12)


@given(samples)
def test_the_interval_of_a_median_holds_that_of_the_samples(values):
    low, high = median_interval(values)
    assert low <= statistics.median(values) <= high
    assert low in values
    assert high in values


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (5, 0), (6, 0), (9, 1), (24, 6), (100, 39)])
def test_the_interval_of_a_median_leaves_out_what_tables_of_the_sign_test_say(count, left_out):
    """The largest number of samples on each side with which 95 % are kept; below 6 samples there is none."""
    assert median_interval(range(count)) == (left_out, count - 1 - left_out)


def test_no_samples_have_no_percentile():
    with pytest.raises(ValueError, match="at least one sample"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


def test_the_geometric_mean_treats_half_and_double_alike():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 100.0]) == pytest.approx(10.0)
    assert geometric_mean([]) is None


@given(st.floats(1, 1e10), st.floats(0.01, 1))
def test_a_plan_neither_runs_on_nor_stops_at_once(call_ns, seconds):
    batch, batches = plan_batches(call_ns, seconds)
    assert 2 <= batches <= 2_000
    assert batch >= 1
    # Two calls are the least; beyond that, about as long as was asked for.
    assert batch * batches * call_ns <= max(seconds * 1e9 * 2, 3 * call_ns, 400_000)


def test_short_calls_are_timed_in_batches_and_long_ones_alone():
    assert plan_batches(500.0, 0.1) == (2000, 100)
    assert plan_batches(500_000.0, 0.1) == (2, 100)
    assert plan_batches(400e6, 0.1) == (1, 2)


def test_a_summary_is_in_microseconds():
    timing = summarise([2_000.0, 1_000.0, 3_000.0], [float(n) for n in range(0, 101_000, 1_000)], 7, True)
    assert (timing.median_us, timing.best_us, timing.batches, timing.batch) == (2.0, 1.0, 3, 7)
    assert math.isclose(timing.p99_us, 99.0)


@pytest.mark.parametrize("count", [1, 2])
def test_the_timed_loop_calls_everything_as_often_as_it_says(count):
    made: list[int] = []
    calls = tuple((lambda number=number: made.append(number)) for number in range(count))
    means = timed(calls, batch=3, batches=5)
    assert len(means) == 5
    assert made == list(range(count)) * 15


def test_a_rank_without_a_part_takes_no_time():
    assert timed((), 3, 2) == [0.0, 0.0]


def test_what_is_written_before_each_turn_is_not_timed(monkeypatch):
    log: list[str] = []
    now = 0

    def passing(nanoseconds: int, what: str) -> None:
        nonlocal now
        now += nanoseconds
        log.append(what)

    monkeypatch.setattr("benchmarks.ranks.timing.perf_counter_ns", lambda: now)
    calls = (lambda: passing(3, "send"), lambda: passing(4, "receive"))
    means = timed_dirtied(
        calls, lambda: passing(1000, "write"), lambda: passing(100, "barrier"), batch=2, batches=3
    )
    assert log == ["write", "barrier", "send", "receive"] * 6
    assert means == [7.0] * 3
    assert timed_dirtied((), lambda: None, None, 1, 2) == [0.0, 0.0]
