"""Groups on hosts that are really apart: network namespaces, joined by cables that can be cut."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_hosts import Network, on_hosts, why_not
from simulated import Layout
from test_hosts_collectives import every_case_and_sums, objects_and_the_rest, subgroups_in_any_pattern
from test_hosts_messages import everybody_to_everybody, from_anybody
from torch import nn

import torchestra as dist
from torchestra.errors import DistBackendError, RankFailedError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import Outcome, await_note, leave_note

datasets = pytest.importorskip("sklearn.datasets")
_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def everything() -> list[list[int]]:
    every_case_and_sums((1, 5003))
    objects_and_the_rest()
    everybody_to_everybody()
    from_anybody()
    subgroups_in_any_pattern(3)
    functional_sum()
    return [list(ranks) for ranks in dist.group.WORLD.communicator.hosts.members]  # type: ignore[union-attr]


def functional_sum() -> None:
    import torchestra.functional as funcol

    size = dist.get_world_size()
    total = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert torch.equal(total + 0, torch.full((3,), float(size)))


@pytest.mark.parametrize(
    ("layout", "members"), [((2, 2), [[0, 1], [2, 3]]), ((1, 2, 3), [[0], [1, 2], [3, 4, 5]])]
)
def test_everything_works_between_hosts(network: Network, layout: Layout, members: list[list[int]]) -> None:
    with on_hosts(network, layout, everything) as world:
        assert [outcome.result() for outcome in world.finish()] == [members] * sum(layout)


def train_on_digits(distributed: bool = True) -> tuple[str, float]:
    """A digest of the parameters, and the accuracy."""
    images, labels = datasets.load_digits(return_X_y=True)
    data = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(plain) if distributed else plain
    for batch in torch.randperm(1600, generator=torch.Generator().manual_seed(1)).repeat(6).split(160):
        mine = batch[rank::size]
        model.zero_grad()
        nn.functional.cross_entropy(model(data[0][mine]), data[1][mine]).backward()
        with torch.no_grad():  # plain descent: torch.optim takes seconds to load in each process
            for parameter in model.parameters():
                parameter -= 0.7 * parameter.grad  # type: ignore[operator]
    with torch.no_grad():
        right = (model(data[0][1600:]).argmax(1) == data[1][1600:]).float().mean().item()
    bits = b"".join(bytes(parameter.detach().numpy()) for parameter in model.parameters())
    return hashlib.sha256(bits).hexdigest(), right


def test_ddp_learns_the_digits_as_one_process_does(network: Network) -> None:
    with on_hosts(network, (2, 2), train_on_digits) as world:
        found = [outcome.result() for outcome in world.finish()]
    assert len(set(found)) == 1, "the ranks differ"
    _, alone = train_on_digits(distributed=False)
    assert found[0][1] == pytest.approx(alone, abs=0.03)
    assert found[0][1] > 0.8


def sums_through_a_cut() -> list[float]:
    """Sums before, while and after the link is cut; the test does that when it reads the note."""
    tensor = torch.ones(200_000)
    found = []
    for number in range(400):
        dist.all_reduce(total := tensor * number)
        found.append(total[-1].item())
        if dist.get_rank() == 0 and number == 50:
            leave_note("cut")
        if number == 51:
            await_note("is cut")
    return found


def test_a_link_that_comes_back_in_time_is_only_a_pause(network: Network) -> None:
    with on_hosts(network, (1, 1), sums_through_a_cut) as world:
        world.await_file("cut")
        network.cut(1)
        try:
            with open(world.path("is cut"), "w"):
                pass
            time.sleep(0.7)
        finally:
            network.restore(1)
        assert [outcome.result() for outcome in world.finish()] == [[2.0 * n for n in range(400)]] * 2


def sums_for_ever() -> None:
    dist.all_reduce(torch.ones(1))
    leave_note(f"ready-{dist.get_rank()}")
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    finally:
        leave_note(f"ended-{dist.get_rank()}")


def messages_of(outcomes: list[Outcome], kind: type[BaseException]) -> list[str]:
    for outcome in outcomes:
        assert isinstance(outcome.error, kind), outcome
    return [outcome.message for outcome in outcomes]


def test_a_link_that_stays_cut_is_an_error_on_all_ranks_within_the_bound(network: Network) -> None:
    with on_hosts(network, (2, 2), sums_for_ever, heartbeat=2.0) as world:
        for rank in range(4):
            world.await_file(f"ready-{rank}")
        network.cut(1)
        try:
            for rank in range(4):
                world.await_file(f"ended-{rank}", limit=30.0)
        finally:
            network.restore(1)
        told = messages_of(world.finish(), DistBackendError)
    name = network.hosts[1]
    assert all("with ranks 2, 3 has been silent for 2 s" in text for text in told[:2]), (name, told)
    assert all("has not reached the group's store for 2 s" in text for text in told[2:]), told


def test_a_host_whose_processes_are_all_killed_is_named(network: Network) -> None:
    with on_hosts(network, (2, 2), sums_for_ever, heartbeat=2.0) as world:
        for rank in range(4):
            world.await_file(f"ready-{rank}")
        for rank in (2, 3):
            world.signal(rank, signal.SIGKILL)
        survivors = [world.wait(rank, 30.0) for rank in (0, 1)]
    told = messages_of(survivors, RankFailedError)
    assert all("with ranks 2, 3 has been silent" in text for text in told), told
    assert [outcome.error.ranks for outcome in survivors] == [(2, 3), (2, 3)]  # type: ignore[union-attr]


def test_a_killed_rank_is_named_on_all_hosts(network: Network) -> None:
    with on_hosts(network, (2, 2), sums_for_ever, heartbeat=4.0) as world:
        for rank in range(4):
            world.await_file(f"ready-{rank}")
        world.signal(3, signal.SIGKILL)
        survivors = [world.wait(rank, 30.0) for rank in range(3)]
    for text in messages_of(survivors, RankFailedError):
        assert "rank 3 died" in text
    assert [outcome.error.ranks for outcome in survivors] == [(3,)] * 3  # type: ignore[union-attr]


def come_late(rank: int) -> Any:
    group = dist.new_group()
    group.set_timeout(1.0)  # type: ignore[union-attr]
    if dist.get_rank() == rank:
        await_note("go on")
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    finally:
        leave_note(f"ended-{dist.get_rank()}")


def test_a_time_out_tells_where_the_ranks_of_all_hosts_are(network: Network) -> None:
    with on_hosts(network, (2, 2), come_late, 3) as world:
        for rank in range(3):
            world.await_file(f"ended-{rank}")
        with open(world.path("go on"), "w"):
            pass
        told = messages_of(world.finish()[:3], DistBackendError)
    for text in told:
        assert "all_reduce(SUM, float32, 1 element)" in text
        assert "rank 3 last called operation" in text
        assert "in await_note" in text
        assert "in come_late" in text
