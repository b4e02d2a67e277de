"""The parts of operations are timed on ranks, and the numbers are those of what was done."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from machines import HOST

from torchestra.errors import InvalidArgumentError
from torchestra.launcher.api import launch
from torchestra.monitor.operation_timing import Cell
from torchestra.performance import host_timing, probes
from torchestra.performance.calibration import Slowdown
from torchestra.performance.fitting import cells_to_fit, fit_operations
from torchestra.performance.host import HostOptions, default_ranks
from torchestra.performance.host_timing import time_rates, time_waits
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import steady_state_seconds
from torchestra.performance.sampling import summarise
from torchestra.performance.workload import Operation


def test_all_ranks_time_every_kind_of_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "read_peer", lambda *words: probes.LOST)  # the system does not let them
    sizes = [4 << 10, 200 << 10]  # one chunk, and two of which the second is not whole
    for found in launch(time_rates, 3, sizes, 0.01, kind="threads"):
        assert list(found) == sizes
        for kinds in found.values():
            assert set(kinds) == {"copy", "fetch", "reduce"}
            assert all(samples and min(samples) > 0 for samples in kinds.values())


@pytest.mark.parametrize("reads", [True, False])
def test_where_ranks_may_read_their_peers_tensors_that_is_timed_too(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this group or another: whether it pays is found anew by each."""
    monkeypatch.setattr(host_timing, "reads_peers", lambda size: reads)  # threads need no call for it
    sizes = [64 << 10, 200 << 10]
    for found in launch(time_rates, 2, sizes, 0.01, kind="threads"):
        for kinds in found.values():
            assert set(kinds) == {"copy", "fetch", "reduce", "peer_read", "peer_read_call", "reads_peers"}
            assert 0 < min(kinds["peer_read_call"]) < 1  # seconds
            assert min(kinds["peer_read"]) > 1e6  # bytes a second, and none of no bytes
            assert kinds["reads_peers"] == [float(reads)]


@pytest.mark.parametrize(("raised", "expected"), [(True, probes.DONE), (False, probes.LOST)])
def test_a_sleep_that_ends_without_a_reason_is_gone_on_with(raised: bool, expected: int) -> None:
    """A signal ends it, say; a flag that is not raised in several is that of a rank that is gone."""
    own, peer, scratch, ticks = (np.zeros(2, dtype=np.int64) for _ in range(4))
    timespec = np.array([0, 300_000_000], dtype=np.int64)  # nobody wakes it: each sleep ends by itself
    words = [each.ctypes.data for each in (own, peer, ticks, scratch, timespec)]
    found: list[int] = []

    def sleep() -> None:
        found.append(probes.sleep(*words[:2], 1, words[2], 0, *words[3:]))

    sleeper = threading.Thread(target=sleep)
    began = time.monotonic()
    sleeper.start()
    while not own[0]:
        time.sleep(0)
    if raised:
        while time.monotonic() - began < 0.4:  # in its second sleep
            time.sleep(0.01)
        peer[0] = 1
    sleeper.join()
    assert found == [expected]


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
    assert default_ranks(2) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert default_ranks(6) == (1, 6, 9, 12)
    assert default_ranks(64) == (1, 64)


@pytest.mark.parametrize("options", [{"seconds": 0.0}, {"ranks": (0,)}, {"quantile": 1.0}])
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        HostOptions(**options)  # type: ignore[arg-type]


def test_what_operations_take_among_several_ranks_is_found_again() -> None:
    host = replace(HOST, cores=2)
    known = replace(
        host,
        switch_s=3 * host.switch_s,
        call_slowdowns=(Slowdown(4, 4, 1.5),),
        work_slowdowns=(Slowdown(4, 4 << 10, 2.0), Slowdown(4, 64 << 10, 0.8)),
    )
    names = ("all_reduce", "all_gather_into_tensor", "broadcast", "scan")
    operations = [Operation(name, nbytes) for nbytes in (4, 4 << 10, 64 << 10) for name in names]
    measured = {each: steady_state_seconds(each, Machine(1, 4, known)) for each in operations}
    found = fit_operations(host, 4, measured)
    assert found.switch_at(4) == pytest.approx(3 * host.switch_s, rel=0.13)
    assert found.call_slowdown(4) == pytest.approx(1.5, rel=0.2)
    assert found.work_slowdown(4 << 10, 4) == pytest.approx(2.0, rel=0.2)
    assert found.work_slowdown(64 << 10, 4) == pytest.approx(0.8, rel=0.05)
    assert not fit_operations(host, 2, {operations[0]: 1e-6}).switches  # every rank has a core


def test_the_operations_that_tell_fit_into_memory() -> None:
    for ranks in (1, 16):
        cells = cells_to_fit(ranks)
        assert Cell("barrier", "float32", 0) in cells
        assert max(cell.nbytes for cell in cells) * ranks * ranks <= 256 << 20
        assert len(set(cells)) == len(cells)
