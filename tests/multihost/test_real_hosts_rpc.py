"""Remote calls between hosts that are really apart: network namespaces, joined by cables that can be cut."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_hosts import Network, needs_hosts, on_hosts

import torchestra as dist
from torchestra import autograd, rpc
from torchestra.errors import WorkerFailedError
from torchestra.rpc.current import current_agent
from worlds import await_note, leave_note, results

pytestmark = needs_hosts()
MASTER = "10.77.0.1"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(2)
    yield made
    made.close()


def begin(**options: Any) -> int:
    rank = dist.get_rank()
    port = [0]
    if rank == 0:
        with socket.create_server((MASTER, 0)) as free:
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    options["init_method"] = f"tcp://{MASTER}:{port[0]}"
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=dist.get_world_size(),
        rpc_backend_options=rpc.RpcBackendOptions(**options),
    )
    return rank


def call_everybody() -> list[int]:
    return call_all(begin())


def call_all(rank: int) -> list[int]:
    large = torch.arange(1 << 20)
    for peer in range(4):
        assert torch.equal(rpc.rpc_sync(peer, torch.add, (large, 1)), large + 1)
        values = torch.full((3,), float(rank), requires_grad=True)
        with autograd.context() as context:
            loss = rpc.rpc_sync(peer, torch.mul, (values, values)).sum()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[values].tolist() == [2.0 * rank] * 3
    kept = rpc.remote((rank + 2) % 4, torch.ones, (2,))
    assert kept.to_here().tolist() == [1, 1]
    del kept
    far = current_agent().router.remote_ranks()
    rpc.shutdown()
    return far


def test_calls_and_gradients_between_two_hosts(network: Network) -> None:
    with on_hosts(network, (2, 2), call_everybody) as world:
        far = results(world.finish())
    assert far == [[2, 3], [2, 3], [0, 1], [0, 1]]


def call_on(worker: int) -> None:
    while True:
        rpc.rpc_sync(worker, torch.add, (torch.ones(1), 1))


def lose_the_other() -> str:
    rank = begin(heartbeat_timeout=2.0)
    rpc.rpc_sync(1 - rank, torch.add, (torch.ones(1), 1))
    leave_note(f"met-{rank}")
    await_note("cut")
    with pytest.raises(WorkerFailedError, match=rf"worker{1 - rank}.*died or is cut off") as caught:
        call_on(1 - rank)
    rpc.shutdown(graceful=False)
    leave_note(f"lost-{rank}")
    await_note("restored")
    return str(caught.value)


def test_a_cable_that_is_cut_is_noticed_on_both_sides(network: Network) -> None:
    # However long the cut lasts, the ranks' group survives it.
    with on_hosts(network, (1, 1), lose_the_other, heartbeat=60.0) as world:
        for rank in range(2):
            world.await_file(f"met-{rank}")
        network.cut(1)
        try:
            open(world.path("cut"), "w").close()
            for rank in range(2):
                world.await_file(f"lost-{rank}")
        finally:
            network.restore(1)
        open(world.path("restored"), "w").close()
        for outcome in world.finish():
            [seconds] = re.findall(r"nothing has been heard of it for (\d+\.\d)", outcome.result())
            assert float(seconds) >= 2.0
