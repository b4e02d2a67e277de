"""Ranks of one group with different settings for the connection between hosts all raise an error."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from simulated import host_names

import torchestra as dist
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.host_id import HOST_VARIABLE
from torchestra.store import PrefixStore, Store, TCPStore
from torchestra.store.base import interruptible_sleep
from torchestra.store.secret import SECRET_VARIABLE
from worlds import processes

LAYOUT = (1, 2, 1)


class LateReader(TCPStore):
    """The store of a rank that reads the terms when all others are about to raise."""

    others = 0

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        raised = key.partition("/torchestra/")[0] + "/torchestra/init/raised"
        while key.endswith("/terms") and not (self.check([raised]) and int(self.get(raised)) >= self.others):
            interruptible_sleep(0.002)
        return super().compare_set(key, expected_value, desired_value)


def meet_with_bounds(store: Store, rank: int, size: int, bounds: list[str], late: int | None) -> str:
    """Return the text of the rank's error when the group is made; it ends at once, rank 0 with the store."""
    os.environ.update({HOST_VARIABLE: host_names(LAYOUT)[rank], HEARTBEAT_VARIABLE: bounds[rank]})
    os.environ[SECRET_VARIABLE] = "a secret of these tests"
    if rank == 0:
        shared = TCPStore("127.0.0.1", 0, is_master=True)
        store.set("port", str(shared.port))
    else:
        shared = (LateReader if rank == late else TCPStore)("127.0.0.1", int(store.get("port")))
    if isinstance(shared, LateReader):
        shared.others = size - 1
    try:
        dist.init_process_group(store=PrefixStore("job", shared), rank=rank, world_size=size, timeout=60)
    except dist.DistError as error:
        return str(error)
    shared.barrier("made", size)
    dist.destroy_process_group()
    return "a group"


def told_with(bounds: list[str], late: int | None = None) -> list[str]:
    with processes(len(bounds), meet_with_bounds, bounds, late, init=False) as world:
        return [outcome.result() for outcome in world.finish()]


@pytest.mark.parametrize("late", [None, 3])
def test_ranks_that_do_not_agree_on_the_heartbeat_bound_are_told_so(late: int | None) -> None:
    """Else a host with a longer bound beats too rarely for the others, which give it up though it lives.

    The ranks raise together: the store, in rank 0's process, is there until the last has read why.
    """
    bounds = ["1000", "2000", "1000", "3000"]
    told = told_with(bounds, late)
    found = {
        match.groups()
        for text in told
        for match in re.finditer(
            r"rank (\d) on host (h\d) has a heartbeat bound of (\d+) s, but rank (\d) on host (h\d) of"
            r" (\d+) s; .* set TORCHESTRA_HEARTBEAT to the same for all ranks",
            text,
        )
    }
    assert len(found) == 1, told
    [(rank, host, bound, other, other_host, other_bound)] = found
    assert (bounds[int(rank)], bounds[int(other)]) == (bound, other_bound)
    assert (host_names(LAYOUT)[int(rank)], host_names(LAYOUT)[int(other)]) == (host, other_host)
    assert all("set TORCHESTRA_HEARTBEAT" in text for text in told), told


def test_one_bound_may_be_written_in_several_ways() -> None:
    assert told_with(["1000", "1000.0", "1e3", "1000"]) == ["a group"] * 4
