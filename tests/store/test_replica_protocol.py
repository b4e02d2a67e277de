"""The replicas' protocol, without sockets: whatever is lost, late, twice or in disorder, they stay alike.

verification/simulation/replicas.py is the network, the clock and the clients; a seed is a schedule.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra.store.replicated.messages import Kind
from verification.simulation.replicas import HARMFUL, Cluster, first_failure, mutated, run


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([2, 3, 3, 3, 4, 5]))
def test_replicas_execute_the_same_entries_in_the_same_order_whatever_happens(seed: int, count: int) -> None:
    run(seed, count)


@pytest.mark.parametrize("name", HARMFUL)
def test_a_broken_protocol_is_found_out(name: str) -> None:
    """By the seed that is noted: after a change of the simulation, another one may be needed."""
    seed = HARMFUL[name][0]
    assert first_failure([seed]) is None
    with mutated(name):
        assert first_failure([seed]) is not None


def test_a_seed_is_one_schedule() -> None:
    """A failing seed can be replayed."""
    for seed in range(5):
        one, other = run(seed), run(seed)
        assert one.told == other.told
        assert one.committed == other.committed
        assert one.now == other.now


def test_a_message_of_an_earlier_life_is_not_counted() -> None:
    """The vote that a replica gave before it lost its memory."""
    cluster = Cluster(3, random.Random(0))
    first, second, _ = cluster.replicas
    assert first is not None
    assert second is not None
    (old,) = [message for to, message in second.on_disconnect(0) if to == 0]
    newer = replace(old, kind=Kind.RECOVERY, view=0, incarnations=(1, 5, 1))
    first.on_message(newer)
    assert first.on_message(old) == []
    assert first.view == 0
