"""The parts of operations are timed on ranks, and the numbers are those of what was done."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from machines import HOST

from torchestra.errors import InvalidArgumentError
from torchestra.launcher.api import launch
from torchestra.performance import host_timing
from torchestra.performance.host import HostOptions, default_ranks, fitted_switch_s
from torchestra.performance.host_timing import time_rates, time_waits
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import steady_state_seconds
from torchestra.performance.sampling import summarise
from torchestra.performance.workload import Operation


def test_all_ranks_time_every_kind_of_rate() -> None:
    sizes = [4 << 10, 200 << 10]  # one chunk, and two of which the second is not whole
    for found in launch(time_rates, 3, sizes, 0.01, kind="threads"):
        assert list(found) == sizes
        for kinds in found.values():
            assert set(kinds) == {"copy", "fetch", "reduce"}
            assert all(samples and min(samples) > 0 for samples in kinds.values())


def test_where_ranks_read_their_peers_tensors_that_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_timing, "reads_peers", lambda size: size > 1)  # threads need no call for it
    sizes = [64 << 10, 200 << 10]
    for found in launch(time_rates, 2, sizes, 0.01, kind="threads"):
        for kinds in found.values():
            assert set(kinds) == {"copy", "fetch", "reduce", "peer_read", "peer_read_call"}
            assert 0 < min(kinds["peer_read_call"]) < 1  # seconds
            assert min(kinds["peer_read"]) > 1e6  # bytes a second, and none of no bytes


def test_both_ranks_time_flags_and_rank_1_wakes_up() -> None:
    allowed = os.sched_getaffinity(0)
    for found in launch(time_waits, 2, 0.01, kind="threads"):
        assert set(found) == {"flag_s", "wakeup_s", "switch_s"}
        for samples in found.values():
            assert len(samples) >= 5
            assert min(samples) > 0
            assert min(samples) < 1  # seconds; one sample may be of a moment in which nothing ran
    assert os.sched_getaffinity(0) == allowed


def test_the_summary_of_samples() -> None:
    samples = [float(each) for each in range(1, 102)]  # 1 to 101: the percentiles are the numbers
    assert summarise(samples) == (51.0, 25 / 51)
    assert summarise(samples, 0.1).value == 11.0
    assert summarise([2.0]) == (2.0, 0.0)


def test_the_numbers_of_ranks_by_default() -> None:
    assert default_ranks(1) == (1, 2, 4, 8, 16)
    assert default_ranks(6) == (1, 6, 12)
    assert default_ranks(64) == (1, 64)


@pytest.mark.parametrize("options", [{"seconds": 0.0}, {"ranks": (0,)}, {"quantile": 1.0}])
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        HostOptions(**options)  # type: ignore[arg-type]


def test_the_switch_is_the_one_that_most_operations_agree_on() -> None:
    host = replace(HOST, cores=2)
    slower = Machine(1, 4, replace(host, switch_s=3 * host.switch_s))
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    operations = [Operation("barrier", 0), *(Operation(name, 4) for name in names)]
    measured = {each: steady_state_seconds(each, slower) for each in operations}
    measured[operations[0]] /= 2  # a barrier that goes from rank to rank in another order
    assert fitted_switch_s(host, 4, measured) == pytest.approx(3 * host.switch_s, rel=0.12)
