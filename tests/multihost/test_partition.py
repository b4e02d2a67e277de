"""A training in a network that falls apart: one side goes on, the ranks of the other end with an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from real_hosts import Network, needs_hosts, on_hosts
from torch import nn

import torchestra as dist
from torchestra import elastic
from worlds import ProcessWorld, await_note, leave_note, results

pytestmark = needs_hosts()
HEARTBEAT_S = 2.0
STEPS, CUT_AFTER = 12, 4


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def train() -> tuple[int, float]:
    """Train through a cut; how many ranks are left, and what was learnt."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    state = elastic.State(model)

    def update() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]

    for shard in elastic.shards(state, STEPS, shards=6, update=update):
        if shard.step == CUT_AFTER:
            leave_note(f"at-{dist.get_rank()}") if dist.get_world_size() == 3 else None
            await_note("is cut")
        inputs = torch.randn(5, 4, generator=shard.generator)
        shard.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
    assert state.step == STEPS
    return dist.get_world_size(), float(sum(each.detach().double().sum() for each in model.parameters()))


def lasting_cut(network: Network, world: ProcessWorld, host: int, goes_on: list[int]) -> None:
    """Cut a host off for as long as ranks that go on need to finish."""
    for rank in range(3):
        world.await_file(f"at-{rank}")
    network.cut(host)
    try:
        with open(world.path("is cut"), "w"):
            pass
        for rank in goes_on:
            world.wait(rank, 60.0)
    finally:
        network.restore(host)


@pytest.mark.parametrize(("cut", "goes_on"), [(2, [0, 1]), (0, [0])], ids=["without-store", "with-store"])
def test_exactly_the_side_that_reaches_the_store_goes_on(
    network: Network, cut: int, goes_on: list[int]
) -> None:
    """Be it the smaller one; what it learns does not show that the others are gone."""
    with on_hosts(network, (1, 1, 1), train, heartbeat=HEARTBEAT_S, timeout=40.0, server=True) as world:
        lasting_cut(network, world, cut, goes_on)
        outcomes = world.finish()
    ended = results([outcomes[rank] for rank in goes_on])
    assert len(set(ended)) == 1
    assert ended[0][0] == len(goes_on)
    for rank in {0, 1, 2} - set(goes_on):
        error, text = outcomes[rank].error, outcomes[rank].message
        assert isinstance(error, (dist.RankExcludedError, dist.DistNetworkError)), outcomes[rank]
        assert "has no part in what the others do" in text or "store is gone or out of reach" in text, text
