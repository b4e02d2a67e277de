"""The link between hosts is measured by the engine's bridge, and its terms are those of the messages."""

from __future__ import annotations

import pytest
from simulated import on_threads

from torchestra.errors import RankError
from torchestra.launcher.api import launch
from torchestra.performance import link_timing
from torchestra.performance.link_timing import (
    LinkMeasurement,
    MessageTimes,
    OperationTime,
    fit_costs,
    fit_link,
    measure_link,
)


def measure() -> tuple[LinkMeasurement | None, list[str]]:
    said: list[str] = []
    return measure_link(0.02, 0.5, said.append), said


def join_and_measure() -> None:
    import torchestra as dist

    dist.init_process_group()
    try:
        measure_link(0.1, 0.5, print)
    finally:
        dist.destroy_process_group()


def test_two_hosts_are_measured_while_the_third_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_timing, "_OPERATION_SIZES", (4, 4 << 10))
    (measurement, said), *others = on_threads((1, 2, 1), measure)
    assert others == [(None, [])] * 3
    assert said[0] == "messages of 64 bytes to the other host"
    assert measurement is not None
    assert measurement.link.bridge == "threads"
    assert measurement.link.shares_cores  # both hosts are this machine
    assert set(measurement.per_op_s) == {"bridge_begin", "local_step", "multihost_call"}
    for times in measurement.times.values():
        assert min(times.one_way_s, times.stream_s, times.send_cpu_s, times.receive_cpu_s) > 0


def test_one_host_has_no_link() -> None:
    with pytest.raises(RankError, match="between two hosts"):
        launch(join_and_measure, 2, kind="threads")


def test_the_terms_of_a_link_are_found_again() -> None:
    """Messages that take exactly what the model says give the terms of the model."""
    latency, send, receive, gap, per_byte = 1e-3, 2e-5, 3e-5, 1e-4, 1e-8
    times = {
        nbytes: MessageTimes(
            one_way_s=send + gap + nbytes * per_byte + latency + receive,
            stream_s=gap + nbytes * per_byte,
            send_cpu_s=send + nbytes * 1e-10,
            receive_cpu_s=receive + nbytes * 2e-10,
        )
        for nbytes in (64, 4096, 16384, 65536, 1 << 20, 4 << 20)
    }
    link = fit_link(times, "curve", shares_cores=False)
    assert [each.up_to_bytes for each in link.classes] == [4096, 65536, 1 << 20, None]
    for each in link.classes[:2]:
        assert each.latency_s == pytest.approx(latency)
        assert each.send_overhead_s == pytest.approx(send)
        assert each.receive_overhead_s == pytest.approx(receive)
        assert each.gap_s == pytest.approx(gap)
        assert each.gap_per_byte_s == pytest.approx(per_byte)
        assert each.receive_overhead_per_byte_s == pytest.approx(2e-10)


def test_a_line_is_never_negative() -> None:
    """Where noise would make a long message cheaper than a short one, the cost is a constant."""
    noisy = {nbytes: MessageTimes(1.0, each, each, each) for nbytes, each in ((64, 3e-5), (4096, 2e-5))}
    (only,) = fit_link(noisy, "curve", shares_cores=False).classes
    assert only.up_to_bytes is None
    assert only.gap_per_byte_s == only.send_overhead_per_byte_s == 0.0
    assert 2e-5 < only.gap_s < 3e-5


def test_the_costs_of_calls_and_exchanges_are_found_again() -> None:
    call, exchange, step, message = 1e-4, 3e-4, 5e-6, 9e-5
    times = [
        OperationTime(exchanges, steps, call + exchanges * (exchange + message) + steps * step)
        for exchanges, steps in ((1, 2), (1, 3), (2, 4), (4, 6))
    ]
    costs = fit_costs(times, step, message)
    assert costs == pytest.approx({"multihost_call": call, "bridge_begin": exchange})
