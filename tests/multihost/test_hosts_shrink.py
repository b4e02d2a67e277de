"""Survivors of a group on several hosts go on, as those of a group on one host do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated import outcomes_on_threads

import torchestra as dist
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE

# What ranks do there, they do here.
sys.path.append(str(Path(__file__).parents[1] / "shrinking"))
import test_shrink as within
from test_shrink import meet, until_it_fails

__all__ = ["meet", "until_it_fails"]

PAIRS = (2, 2)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look eight times as often at what another host says."""
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "4")


@pytest.mark.parametrize("victim", [0, 2, 3])
def test_the_ranks_that_are_left_go_on_with_new_numbers(victim: int) -> None:
    previous = tuple(rank for rank in range(4) if rank != victim)
    ended = outcomes_on_threads(PAIRS, within.lose_one, victim)
    assert within.results(ended) == [(rank, previous) for rank in range(3)]


def test_a_group_shrinks_again_and_again_over_fewer_hosts_down_to_one_rank() -> None:
    """Of hosts with 1, 2 and 2 ranks: a host that gets smaller, one that goes, and one host that is left."""
    (seen,) = within.results(outcomes_on_threads((1, 2, 2), within.lose_all_but_one))
    assert seen == [(0, 1, 3, 4), (0, 1, 3), (0, 2), (0,)]


@pytest.mark.parametrize(
    ("life", "expected"),
    [
        (within.lose_nobody, [None] * 3),
        (within.use_the_store, [b"value"] * 2),
    ],
)
def test_what_holds_within_a_host_holds_across(life: Callable[[], Any], expected: list[Any]) -> None:
    assert within.results(outcomes_on_threads((1, 2), life)) == expected


def test_groups_can_be_made_in_the_world_that_is_left() -> None:
    names = within.results(outcomes_on_threads((1, 2), within.new_groups_in_a_shrunken_world))
    assert names[0] == names[1]


def kinds_of_bridges() -> tuple[str, str] | None:
    def kind(group: Any) -> str:
        return str(group.communicator.engine.hierarchy.bridge.kind)

    meet()  # shrink() calls ranks out of operations
    before = kind(within.world())
    if dist.get_rank() == 2:
        return None
    new = within.world().shrink(exclude=[2])
    within.check_group(new)
    return before, kind(new)


def test_who_takes_part_in_a_smaller_group_has_proved_the_secret_as_in_the_larger_one() -> None:
    ended = outcomes_on_threads((1, 2), kinds_of_bridges, bridge="curve")
    assert within.results(ended[:2]) == [("curve", "curve")] * 2
