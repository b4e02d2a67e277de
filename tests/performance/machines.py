"""Machines with round numbers, for tests of predictions."""

from __future__ import annotations

from typing import Any

from torchestra.performance.calibration import HostCalibration, LinkCalibration, LinkClass, Rate
from torchestra.performance.machine import Machine

HOST = HostCalibration(
    cores=64,
    call_s=1e-6,
    flag_s=1e-7,
    wakeup_s=5e-6,
    switch_s=2e-6,
    time_slice_s=3e-3,
    copy=(Rate(1, 1 << 20, 10e9),),
    fetch=(Rate(1, 1 << 20, 10e9),),
    reduce=(Rate(1, 1 << 20, 10e9),),
    per_op_s={"multihost_call": 1e-5, "local_step": 2e-6},
)


def link_of(
    bits_per_s: float = 1e9, latency_s: float = 1e-4, *, shares_cores: bool = False
) -> LinkCalibration:
    """Return a link of that speed, with 10 µs of a processor for each message."""
    one = LinkClass(None, latency_s, 1e-5, 1e-5, 1e-6, 8 / bits_per_s)
    return LinkCalibration((one,), shares_cores=shares_cores)


def machine(hosts: int, ranks: int, bits_per_s: float = 1e9, **changes: Any) -> Machine:
    """Return a machine of hosts that have 64 cores each."""
    return Machine(hosts, ranks, HOST, link_of(bits_per_s) if hosts > 1 else None, **changes)
