"""Groups over a store on replicas, whose primary ends meanwhile: join, grow, new_group, init_rpc."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra import rpc
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.store import PrefixStore, ReplicatedStore, StoreReplica
from torchestra.world.registry import thread_rank

SOON = 30.0


@contextlib.contextmanager
def three_replicas() -> Iterator[tuple[list[StoreReplica], list[str]]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    served = [StoreReplica(index, addresses, listen_fd=each.detach()) for index, each in enumerate(sockets)]
    try:
        yield served, addresses
    finally:
        for replica in served:
            replica.close()


class Ranks:
    """Two members and a joiner as threads; ``at`` names the moment at which the primary ends."""

    def __init__(self, at: str, primary: StoreReplica, addresses: list[str]) -> None:
        self._at, self._primary, self._addresses = at, primary, addresses
        self._moments = threading.Barrier(2)
        self.ended: list[Any] = [None, None, None]

    def run(self) -> list[Any]:
        threads = [threading.Thread(target=self._body, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON)
        assert not any(thread.is_alive() for thread in threads)
        return self.ended

    def _body(self, rank: int) -> None:
        store = ReplicatedStore(self._addresses, SOON)
        try:
            with thread_rank(rank, 2, store):
                self.ended[rank] = self._join() if rank == 2 else self._be_member(rank)
        except BaseException as error:
            self.ended[rank] = error
        store.close()

    def _moment(self, name: str, rank: int) -> None:
        """End the primary while the members are here, if this is the moment."""
        self._moments.wait(SOON)
        if rank == 0 and name == self._at:
            self._primary.close()

    def _be_member(self, rank: int) -> tuple[Any, ...]:
        dist.init_process_group(timeout=SOON)
        self._moment("join", rank)
        while not dist.group.WORLD.pending_joiners():
            dist.barrier()
        self._moment("grow", rank)
        dist.group.WORLD.grow(SOON)
        self._moment("new_group", rank)
        found = self._use_groups()
        self._moment("rpc", rank)
        return (*found, self._call(rank))

    def _join(self) -> tuple[Any, ...]:
        dist.join(timeout=SOON)
        return (*self._use_groups(), self._call(2))

    def _use_groups(self) -> tuple[Any, ...]:
        """Make a group in the grown world, and use it."""
        pair = dist.new_group([0, 2])
        total = torch.ones(1)
        if dist.get_rank() != 1:
            dist.all_reduce(total, group=pair)
        members = dist.group.WORLD.member_ids
        dist.barrier()
        dist.destroy_process_group()
        return members, int(total)

    def _call(self, rank: int) -> int:
        """Call the next worker."""
        options = rpc.RpcBackendOptions(store=PrefixStore("rpc", current_thread_rank().store))
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        answer = rpc.rpc_sync(f"worker{(rank + 1) % 3}", pow, (rank + 2, 2))
        rpc.shutdown()
        return int(answer)


@pytest.mark.parametrize("at", ["join", "grow", "new_group", "rpc"])
def test_ranks_join_and_make_groups_while_the_primary_of_their_store_ends(at: str) -> None:
    with three_replicas() as (served, addresses):
        ended = Ranks(at, served[0], addresses).run()
        with pytest.raises(dist.DistNetworkError, match="out of reach"):
            ReplicatedStore(addresses[:1], 0.1)  # it has ended indeed
    assert ended == [((0, 1, 2), 2, 4), ((0, 1, 2), 1, 9), ((0, 1, 2), 2, 16)]
