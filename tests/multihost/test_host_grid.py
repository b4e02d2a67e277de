"""Hosts in a grid: each exchanges with its row and its column, and all get the same sums."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from simulated import on_threads

import torchestra as dist
from torchestra.engine.multihost import grid
from torchestra.engine.multihost.grid import Grid, grid_of
from torchestra.engine.multihost.thread_bridge import ThreadBridge
from torchestra.errors import CollectiveMismatchError

OPS = ("SUM", "AVG", "MAX", "PRODUCT")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(63, None), (64, Grid(8, 8)), (1000, Grid(25, 40)), (1009, None), (12_500, Grid(100, 125))],
)
def test_the_grid_is_as_square_as_it_can_be(hosts: int, expected: Grid | None) -> None:
    assert grid_of(hosts) == expected


def test_every_host_is_in_one_row_and_one_column() -> None:
    twelve = Grid(3, 4)
    assert twelve.row(6) == [4, 5, 6, 7]
    assert twelve.column(6) == [2, 6, 10]
    for host in range(12):
        assert [each for each in twelve.row(host) if each in twelve.column(host)] == [host]


def reduce_all(counts: tuple[int, ...]) -> list[Any]:
    """Reduce tensors of several lengths, dtypes and operations; return the results."""
    found = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in counts:
        for dtype in (torch.float32, torch.int64):
            for op in OPS:
                tensor = (torch.arange(count) % 5 + rank % 3 + 1).to(dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                everyone = torch.stack([(torch.arange(count) % 5 + each % 3 + 1) for each in range(size)])
                want = {
                    "SUM": everyone.sum(0),
                    "AVG": everyone.sum(0) / size if dtype.is_floating_point else everyone.sum(0) // size,
                    "MAX": everyone.amax(0),
                    "PRODUCT": everyone.prod(0),
                }[op]
                torch.testing.assert_close(tensor, want.to(dtype))
                found.append(tensor.tolist())
    return found


@pytest.mark.parametrize("layout", [(1,) * 6, (2,) * 4, (1, 2, 1, 2)])
def test_all_ranks_get_the_same_sums(layout: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MIN_HOSTS", 4)
    first, *others = on_threads(layout, reduce_all, (1, 5, 4099))
    assert all(other == first for other in others)


def test_large_tensors_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MIN_HOSTS", 4)

    def body() -> float:
        tensor = torch.full((3 << 20,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    assert on_threads((1,) * 4, body) == [10.0] * 4


def test_hosts_send_to_their_row_and_column_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MIN_HOSTS", 4)
    sent: dict[int, Counter[int]] = {}
    begin = ThreadBridge.begin

    def counted(bridge: ThreadBridge, receives: Any, sends: Any, timeout_s: float) -> Any:
        sent.setdefault(bridge.host, Counter()).update(end for end, _ in sends)
        return begin(bridge, receives, sends, timeout_s)

    def body() -> None:
        dist.barrier()
        sent.clear()
        dist.barrier()
        dist.all_reduce(torch.ones(1000))

    monkeypatch.setattr(ThreadBridge, "begin", counted)
    on_threads((1,) * 9, body)
    nine = Grid(3, 3)
    for host, ends in sent.items():
        assert set(ends) == {*nine.row(host), *nine.column(host)} - {host}


@pytest.mark.parametrize("wrong", [0, 4, 5])
def test_every_rank_finds_a_mismatch(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose row and column all called the same."""
    monkeypatch.setattr(grid, "MIN_HOSTS", 4)

    def body() -> bool:
        calls = {True: partial(dist.all_reduce, torch.ones(3)), False: dist.barrier}
        with pytest.raises(CollectiveMismatchError, match=f"rank {wrong} on host h{wrong} called all_reduce"):
            calls[dist.get_rank() == wrong]()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)  # the group stays usable
        return bool((tensor == 6).all())

    assert all(on_threads((1,) * 6, body))
