"""Groups on hosts that are really apart: network namespaces, joined by cables that can be cut."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from real_hosts import Network, needs_hosts, on_hosts
from simulated import Layout
from test_hosts_collectives import every_case_and_sums, objects_and_the_rest, subgroups_in_any_pattern
from test_hosts_messages import everybody_to_everybody, from_anybody
from test_hosts_shrink import until_it_fails
from torch import nn

import torchestra as dist
import torchestra.functional as funcol
from torchestra.errors import DistBackendError, RankFailedError
from torchestra.nn.parallel import DistributedDataParallel
from worlds import Outcome, ProcessWorld, await_note, leave_note, results

datasets = pytest.importorskip("sklearn.datasets")
pytestmark = needs_hosts()


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
    check_the_record()
    return [list(ranks) for ranks in dist.group.WORLD.communicator.engine.hosts.members]  # type: ignore[union-attr]


def check_the_record() -> None:
    """It tells of all ranks of all hosts, in times that fit each other."""
    dist.barrier()
    began = time.monotonic()
    dist.barrier()
    dist.barrier()
    record, ended = dist.flight_record(), time.monotonic()
    assert all(host.answered for host in record.hosts)
    error = max(host.clock_error for host in record.hosts)
    number = record.ranks[dist.get_rank()].operations_begun - 1
    for rank in record.ranks:
        (entry,) = [each for each in rank.operations if each.number == number]
        assert (entry.kind, entry.state, rank.presence) == ("barrier", "done", "present")
        assert entry.ended is not None
        assert began - error <= entry.ended <= ended + error
    dist.barrier()


def functional_sum() -> None:
    size = dist.get_world_size()
    total = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert torch.equal(total + 0, torch.full((3,), float(size)))


@pytest.mark.parametrize(
    ("layout", "members"), [((2, 2), [[0, 1], [2, 3]]), ((1, 2, 3), [[0], [1, 2], [3, 4, 5]])]
)
def test_everything_works_between_hosts(network: Network, layout: Layout, members: list[list[int]]) -> None:
    with on_hosts(network, layout, everything) as world:
        assert results(world.finish()) == [members] * sum(layout)


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
        found = results(world.finish())
    assert len(set(found)) == 1, "the ranks differ"
    _, alone = train_on_digits(distributed=False)
    assert found[0][1] == pytest.approx(alone, abs=0.03)
    assert found[0][1] > 0.8


SUMS = 120


def sums_through_a_cut() -> list[float]:
    """Sums before, while and after the link is cut; the test does that when it reads the note."""
    tensor = torch.ones(200_000)
    found = []
    for number in range(SUMS):
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
        assert results(world.finish()) == [[2.0 * n for n in range(SUMS)]] * 2


def sums_for_ever() -> None:
    dist.all_reduce(torch.ones(1))
    leave_note(f"ready-{dist.get_rank()}")
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    finally:
        leave_note(f"ended-{dist.get_rank()}")


def kill_together(world: ProcessWorld, ranks: Sequence[int]) -> None:
    """Kill ranks, of which none acts on the death of another before its own."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            world.signal(rank, number)


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
                world.await_file(f"ended-{rank}")
        finally:
            network.restore(1)
        told = messages_of(world.finish(), DistBackendError)
    assert all("with ranks 2, 3 has been silent for 2 s" in text for text in told[:2]), "\n".join(told)
    assert all("with ranks 0, 1 has been silent for 2 s" in text for text in told[2:]), "\n".join(told)


def test_a_host_whose_processes_are_all_killed_is_named(network: Network) -> None:
    with on_hosts(network, (2, 2), sums_for_ever, heartbeat=2.0) as world:
        for rank in range(4):
            world.await_file(f"ready-{rank}")
        kill_together(world, [2, 3])
        survivors = [world.wait(rank) for rank in (0, 1)]
    told = messages_of(survivors, RankFailedError)
    assert all("with ranks 2, 3 has been silent" in text for text in told), "\n".join(told)
    assert [outcome.error.ranks for outcome in survivors] == [(2, 3), (2, 3)]  # type: ignore[union-attr]


def test_a_killed_rank_is_named_on_all_hosts(network: Network) -> None:
    with on_hosts(network, (2, 2), sums_for_ever, heartbeat=4.0) as world:
        for rank in range(4):
            world.await_file(f"ready-{rank}")
        world.signal(3, signal.SIGKILL)
        survivors = [world.wait(rank) for rank in range(3)]
    for text in messages_of(survivors, RankFailedError):
        assert re.search(r"rank 3 on host \S+ died", text), text
    assert [outcome.error.ranks for outcome in survivors] == [(3,)] * 3  # type: ignore[union-attr]


def messages_for_ever() -> None:
    """Large messages cross between the first rank and the last; the other waits for one in vain."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    tensor, received = torch.ones(1_000_000), torch.zeros(1_000_000)
    leave_note(f"ready-{rank}")
    if 0 < rank < last:
        dist.recv(received, last)
    while True:
        works = [dist.isend(tensor, last - rank), dist.irecv(received, last - rank)]
        for work in works:
            work.wait()
        assert torch.equal(received, tensor)
        leave_note(f"moving-{rank}")


def test_a_rank_killed_amid_messages_is_named(network: Network) -> None:
    with on_hosts(network, (1, 2), messages_for_ever, heartbeat=4.0) as world:
        for note in ("ready-1", "moving-0"):
            world.await_file(note)
        world.signal(2, signal.SIGKILL)
        survivors = [world.wait(rank) for rank in (0, 1)]
    for text in messages_of(survivors, RankFailedError):
        assert re.search(r"rank 2 on host \S+ died", text), text
    assert [outcome.error.ranks for outcome in survivors] == [(2,)] * 2  # type: ignore[union-attr]


def be_cut_off() -> None:
    dist.all_reduce(torch.ones(1))
    leave_note(f"ready-{dist.get_rank()}")
    raise EOFError(str(until_it_fails()))


def test_a_cut_between_two_hosts_that_the_coordinator_reaches_is_noticed_by_the_bound(
    network: Network,
) -> None:
    """These two wait for each other; the time-out is a minute."""
    with on_hosts(network, (1, 1, 1), be_cut_off, heartbeat=2.0) as world:
        for rank in range(3):
            world.await_file(f"ready-{rank}")
        network.cut_between(1, 2)
        try:
            outcomes = [world.wait(rank, 30.0) for rank in range(3)]
        finally:
            network.restore_between(1, 2)
    for text in messages_of(outcomes, EOFError):
        assert re.search(r"with rank [12] has been silent for 2 s", text), text


SLOW_SECONDS, SLOW_LINK = 4.0, "tbf rate 50mbit burst 64kb latency 50ms"
SLOW_BYTES = 32_000_000  # at least five seconds


def send_slowly() -> None:
    """Rank 0 sends what its link needs longer for than the heartbeat bound."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(SLOW_BYTES, dtype=torch.uint8), 1)
    else:
        dist.recv(received := torch.zeros(SLOW_BYTES, dtype=torch.uint8), 0)
        assert received.all()


def test_a_host_is_not_silent_while_a_message_comes_for_longer_than_the_heartbeat_bound(
    network: Network,
) -> None:
    for host in (0, 1):
        network.shape(host, SLOW_LINK)
    try:
        with on_hosts(network, (1, 1), send_slowly, heartbeat=SLOW_SECONDS) as world:
            results(world.finish())
    finally:
        for host in (0, 1):
            network.unshape(host)


def come_late(rank: int) -> Any:
    group, me = dist.new_group(), dist.get_rank()
    group.set_timeout(3.0)  # type: ignore[union-attr]
    leave_note(f"comes-{me}")
    if me == rank:
        await_note("go on")
        return None
    for other in range(dist.get_world_size()):
        await_note(f"comes-{other}")
    try:
        dist.all_reduce(torch.ones(1), group=group)
    finally:
        leave_note(f"ended-{me}")


def test_a_time_out_tells_where_the_ranks_of_all_hosts_are(network: Network) -> None:
    with on_hosts(network, (2, 2), come_late, 3) as world:
        for rank in range(3):
            world.await_file(f"ended-{rank}")
        with open(world.path("go on"), "w"):
            pass
        told = messages_of(world.finish()[:3], DistBackendError)
    for text in told:
        assert "all_reduce(SUM, float32, 1 element)" in text
        assert "rank 3 has called nothing yet" in text
        assert "rank 2 is in operation 1, all_reduce(SUM, float32, 1 element), for" in text
        assert "in await_note" in text
        assert "in come_late" in text
        assert re.search(r"rank 3( on host \S+)? had not arrived \(the timeout is 3 s\)", text), text


def check_sums() -> list[int]:
    """All operations of what is left find each other; the hosts' members, which say that."""
    group = dist.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    for length in (1, 100_000):
        total = torch.full((length,), float(rank))
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((length,), size * (size - 1) / 2))
    subgroup = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.all_reduce(one := torch.ones(1), group=subgroup)
        assert one.item() == 2
    hosts = group.communicator.engine.hosts
    return [len(ranks) for ranks in hosts.members] if hosts is not None else [size]


def go_on_twice(first: list[int], second: list[int]) -> list[list[int]]:
    """Shrink after these ranks have been killed, and after those; the numbers are those at the beginning."""
    me, shapes = dist.get_rank(), []
    for victims in (first, second):
        dist.all_reduce(torch.ones(1))
        leave_note(f"ready-{victims}-{me}")
        error = until_it_fails()
        assert isinstance(error, RankFailedError)
        assert error.ranks
        world = dist.group.WORLD
        assert world is not None
        new = world.shrink()
        assert len(new.lost_ranks) == len(victims)
        shapes.append(check_sums())
    return shapes


@pytest.mark.parametrize(
    ("layout", "first", "second", "shapes"),
    [
        ((1, 2, 3), [2], [3, 4, 5], [[1, 1, 3], [1, 1]]),  # a rank, then a whole host
        ((2, 2), [2], [3], [[2, 1], [2]]),  # the rank that watches for its host, then the last of that host
    ],
)
def test_survivors_of_kill_9_shrink_and_go_on_over_the_hosts_that_are_left(
    network: Network, layout: Layout, first: list[int], second: list[int], shapes: list[list[int]]
) -> None:
    alive = set(range(sum(layout)))
    with on_hosts(network, layout, go_on_twice, first, second, heartbeat=2.0) as world:
        for victims in (first, second):
            for rank in alive:
                world.await_file(f"ready-{victims}-{rank}")
            kill_together(world, victims)
            alive -= set(victims)
        ended = world.finish()
    assert [ended[rank].result() for rank in sorted(alive)] == [shapes] * len(alive)


def lose_the_store() -> None:
    """Rank 0, whose process serves the store, is killed; what the others are told, and what shrink() says."""
    dist.all_reduce(torch.ones(1))
    leave_note(f"ready-{dist.get_rank()}")
    told = str(until_it_fails())
    with pytest.raises(dist.DistNetworkError) as refused:
        dist.group.WORLD.shrink()  # type: ignore[union-attr]
    raise EOFError(f"{told}\n---\n{refused.value}")  # there is nobody any more to end well with


def test_when_the_host_of_the_store_is_lost_all_are_told_and_nobody_shrinks(network: Network) -> None:
    with on_hosts(network, (1, 2), lose_the_store, heartbeat=2.0) as world:
        for rank in range(3):
            world.await_file(f"ready-{rank}")
        world.signal(0, signal.SIGKILL)
        survivors = world.finish()[1:]
    for text in messages_of(survivors, EOFError):
        aborted, refused = text.split("\n---\n")
        assert re.search(r"rank 0 on host \S+ died|with rank 0 has been silent for 2 s", aborted), aborted
        assert "cannot be shrunk, because its store is gone or out of reach" in refused


def go_on_without_the_store() -> None:
    """Rank 0 serves the store until all have met; then everything but meeting goes on without."""
    rank, size = dist.get_rank(), dist.get_world_size()
    leave_note(f"met-{rank}")
    await_note("store is gone")
    for number in range(3):
        dist.all_reduce(total := torch.full((100_000,), float(number)))
        assert (total == number * size).all()
    everybody_to_everybody()  # also between ranks that had nothing to say to each other before
    leave_note(f"ready-{rank}")
    error = until_it_fails()
    assert isinstance(error, RankFailedError)
    raise EOFError(f"{error.ranks} {error}")  # the end of a rank is in the store


def test_when_the_store_is_lost_after_the_ranks_have_met_everything_between_them_goes_on(
    network: Network,
) -> None:
    with on_hosts(network, (1, 2, 1), go_on_without_the_store, heartbeat=2.0, server=True) as world:
        for rank in range(4):
            world.await_file(f"met-{rank}")
        os.kill(int(Path(world.path("server")).read_text()), signal.SIGKILL)
        with open(world.path("store is gone"), "w"):
            pass
        for rank in range(4):
            world.await_file(f"ready-{rank}")
        world.signal(3, signal.SIGKILL)
        survivors = [world.wait(rank) for rank in range(3)]
    for text in messages_of(survivors, EOFError):
        assert text.startswith("(3,)"), text
        assert "with rank 3 has been silent for 2 s" in text, text
