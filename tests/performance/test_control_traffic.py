"""Control messages are counted by the code that sends them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from machines import machine

from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.performance.control_traffic import Traffic, control_traffic
from torchestra.performance.prediction import predict
from torchestra.performance.workload import Operation


def by_what(hosts: int, ranks: int) -> dict[tuple[str, str], Traffic]:
    return {(row.what, row.sender): row for row in control_traffic(machine(hosts, ranks))}


def test_one_host_only_joins() -> None:
    assert {row.per for row in control_traffic(machine(1, 4))} == {"job"}


def memory_files() -> int:
    paths = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum("memfd:torchestra:" in os.readlink(path) for path in paths if path.is_symlink())


def test_a_simulated_job_leaves_no_memory_behind() -> None:
    before = memory_files()
    control_traffic(machine(10, 4))
    predict([Operation("all_reduce", 1 << 20)], machine(2, 2))
    gc.collect()
    assert memory_files() == before


def test_pings_grow_with_the_root_of_the_hosts_and_lists_with_the_square_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "8")  # a ping a second
    small, large = by_what(10, 4), by_what(100, 4)
    for sender in ("the coordinator", "those hosts' leaders"):
        key = "pings and answers", sender
        assert (small[key].messages, large[key].messages) == (2 * 9, 2 * (9 + 9))
    assert large["pings and answers", "each row's coordinator"].messages == 2 * (9 + 1)
    end = "the end of a group"
    assert (small[end, "who finds it out"].messages, large[end, "who finds it out"].messages) == (9, 9 + 9)
    assert large[end, "that host"].messages == 9
    joining = "joining: meeting, finding hosts", "every rank"
    assert 5 < large[joining].messages / small[joining].messages < 12
    shrinking = "shrink(): who goes on", "every rank"
    assert large[shrinking].nbytes > 5 * small[shrinking].nbytes
