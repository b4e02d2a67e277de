"""Groups on hosts that are really apart, with MPI between them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launched import by_mpich, in_default_group, launched, why_no_mpich, why_no_openmpi
from real_hosts import Network, needs_hosts
from simulated import SECONDS, Layout
from test_hosts_collectives import every_dtype_moves
from test_hosts_mismatch import mismatches
from test_real_hosts import everything, messages_of, sums_for_ever, train_on_digits
from test_real_hosts_rpc import call_all
from tools.mpich_memory import mpich_memory_removed

import torchestra as dist
from torchestra import rpc
from torchestra.engine.multihost.mpi_bridge import MPIBridge
from torchestra.errors import DistBackendError, RankFailedError
from worlds import await_note, leave_note, results

pytestmark = needs_hosts(why_no_mpich())
_needs_openmpi = pytest.mark.skipif(bool(why_no_openmpi()), reason=why_no_openmpi())


TRUSTED = {"TORCHESTRA_TRUST_NETWORK": "1"}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def everything_over_mpi() -> tuple[list[list[int]], tuple[str, float]]:
    """Return what is done over Gloo too, and messages so large that they take a pipe of their own."""
    engine = dist.group.WORLD.communicator.engine  # type: ignore[union-attr]
    bridge = engine.hierarchy.bridge
    assert bridge is None or isinstance(bridge, MPIBridge)
    members = everything()
    mismatches()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 4:  # these are the same in any layout, and take six ranks seconds
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
            every_dtype_moves()
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
        assert len(call_all(rank)) == 2
    return members, train_on_digits()


@pytest.mark.parametrize(
    ("launcher", "layout", "members"),
    [
        ("mpich", (2, 2), [[0, 1], [2, 3]]),
        ("mpich", (1, 2, 3), [[0], [1, 2], [3, 4, 5]]),
        pytest.param("openmpi", (2, 2), [[0, 1], [2, 3]], marks=_needs_openmpi),
    ],
)
def test_everything_works_between_hosts(
    network: Network, launcher: str, layout: Layout, members: list[list[int]]
) -> None:
    with launched(launcher, network, layout, in_default_group, everything_over_mpi, **TRUSTED) as world:
        found = results(world.finish(limit=100.0))  # six ranks that poll, on a loaded machine of two cores
    assert [each for each, _ in found] == [members] * sum(layout)
    assert len({trained for _, trained in found}) == 1, "the ranks differ"
    assert found[0][1][1] > 0.8


def receive_while_the_sender_waits_otherwise() -> None:
    """Rank 0 sends, and calls into MPI no more before rank 1 has it."""
    rank, data = dist.get_rank(), torch.arange(1 << 18, dtype=torch.int32).view(torch.uint8)
    bridge = dist.group.WORLD.communicator.engine.hierarchy.bridge  # type: ignore[union-attr]
    if rank == 0:
        sending = bridge.begin([], [(1, data)], SECONDS)
        await_note("received")
        assert sending.wait(SECONDS)
    else:
        receiving = bridge.begin([(0, received := torch.zeros_like(data))], [], SECONDS)
        assert receiving.wait(SECONDS)
        assert torch.equal(received, data)
        leave_note("received")


@pytest.mark.parametrize("launcher", ["mpich", pytest.param("openmpi", marks=_needs_openmpi)])
def test_messages_move_while_their_sender_waits_for_something_else(network: Network, launcher: str) -> None:
    """A rank may wait for one of its host, and that for one elsewhere, to which the first has sent."""
    body = in_default_group, receive_while_the_sender_waits_otherwise
    with launched(launcher, network, (1, 1), *body, **TRUSTED) as world:
        results(world.finish())


def test_a_link_that_stays_cut_is_an_error_on_all_ranks_within_the_bound(network: Network) -> None:
    """MPI itself would wait for the other host for ever."""
    body = in_default_group, sums_for_ever
    with launched("mpich", network, (2, 2), *body, TORCHESTRA_HEARTBEAT="2") as world:
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


def test_a_killed_rank_is_named_on_all_hosts(network: Network) -> None:
    with launched("mpich", network, (1, 2), in_default_group, sums_for_ever, **TRUSTED) as world:
        for rank in range(3):
            world.await_file(f"ready-{rank}")
        world.signal(2, signal.SIGKILL)
        survivors = [world.wait(rank) for rank in range(2)]
    assert all(
        re.search(r"rank 2 on host \S+ died", text) for text in messages_of(survivors, RankFailedError)
    )


def meet_without_trust(secrets: list[str]) -> str:
    """Without a variable: nobody who has not proved a secret takes part, though MPI would let him."""
    if secret := secrets[int(os.environ["PMI_RANK"])]:
        os.environ["TORCHESTRA_SECRET"] = secret
    dist.init_process_group(timeout=SECONDS)
    dist.all_reduce(total := torch.ones(70_000))
    assert (total == dist.get_world_size()).all()
    kind = dist.group.WORLD.communicator.engine.hierarchy.bridge.kind  # type: ignore[union-attr]
    dist.destroy_process_group()
    return str(kind)


@pytest.mark.parametrize("secrets", [["", ""], ["ours", "ours"]], ids=["none", "the user's"])
def test_without_a_word_of_trust_mpi_only_brings_the_ranks_together(
    network: Network, secrets: list[str]
) -> None:
    with launched("mpich", network, (1, 1), meet_without_trust, secrets) as world:
        assert results(world.finish()) == ["curve", "curve"]


def test_a_secret_that_only_rank_0_has_is_not_told_to_the_others(network: Network) -> None:
    with launched("mpich", network, (1, 1), meet_without_trust, ["ours", ""]) as world:
        assert "rank 0 has a secret, and rank 1 has none" in world.wait(1).message
        world.signal(0, signal.SIGKILL)


def meet_with_bridges(bridges: list[str]) -> None:
    os.environ["TORCHESTRA_BRIDGE"] = bridges[int(os.environ["PMI_RANK"])]
    os.environ["TORCHESTRA_TRUST_NETWORK"] = "1"
    dist.init_process_group(timeout=SECONDS)


def test_ranks_that_do_not_agree_on_the_bridge_are_told_so(network: Network) -> None:
    with launched("mpich", network, (1, 2), meet_with_bridges, ["mpi", "curve", "gloo"]) as world:
        told = [outcome.message for outcome in world.finish()]
    for text in told:
        assert "uses the bridge" in text
        assert "set TORCHESTRA_TRUST_NETWORK and TORCHESTRA_BRIDGE to the same for all" in text


FAILING = """
import sys
from pathlib import Path

import torch
import torchestra as dist

dist.init_process_group(timeout=60)
dist.barrier()
if dist.get_rank() == 1:
    Path(sys.argv[1]).touch()
    raise ValueError("of rank 1")
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_ends_by_an_exception_ends_the_job(network: Network, tmp_path: Path) -> None:
    """With MPI_Finalize, it would wait for the others, and they for it."""
    raised = tmp_path / "raised"
    [command] = by_mpich(network, (1, 1), tmp_path, ["-c", FAILING, str(raised)])
    with mpich_memory_removed():
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    assert raised.exists(), ended.stderr  # mpiexec may lose the traceback, if the machine is busy enough
