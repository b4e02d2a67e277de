"""A world of torchestra is torch.distributed's too, and the other way round."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_worlds
from small_transformer import train, transformer
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DistributedSampler

import torchestra as dist
import worlds
from torchestra.engine.multihost.host_discovery import may_span_hosts
from torchestra.engine.multihost.host_id import HOST_VARIABLE
from torchestra.interop import adopt, autoload, inner_group, use
from torchestra.interop.torch_distributed import TorchestraGroup
from torchestra.interop.torch_distributed.rendezvous import joined_store
from torchestra.interop.torch_distributed.torch_store import AdoptedStore
from torchestra.store import Store


def native(_: Store, rank: int, size: int, fn: Any, *args: Any) -> Any:
    """Call a function in a world that torchestra has made, from a store that all find."""
    store = dist.FileStore(os.path.join(os.environ["WORLD_DIRECTORY"], "ours"), size)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    result = fn(*args)
    dist.destroy_process_group()
    return result


def use_both_libraries() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = adopt()
    assert adopt() is group is distributed.group.WORLD
    assert inner_group() is dist.group.WORLD
    assert (distributed.get_rank(), distributed.get_world_size()) == (rank, size)
    assert distributed.get_backend() == "torchestra"
    tensor = torch.ones(3)
    distributed.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * size] * 3
    part = distributed.new_group([0, 1])
    if rank < 2:
        distributed.all_reduce(tensor, group=part)
        assert tensor.tolist() == [2 * size * size] * 3
    assert list(DistributedSampler(range(2 * size), shuffle=False)) == [rank, rank + size]
    gathered: list[Any] = [None] * size
    distributed.all_gather_object(gathered, rank)
    assert gathered == list(range(size))


def save_as_all_ranks() -> None:
    """A checkpoint has a file from every rank, where one without torch.distributed has one of one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh)
    losses = torch.tensor(train(fully_shard(model, mesh=mesh), rank, size))
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    torch.testing.assert_close(losses, torch.tensor(train(transformer())))
    whole = torch.arange(12.0).reshape(6, 2)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    path = os.path.join(os.environ["WORLD_DIRECTORY"], "saved")
    checkpoint.save({"rows": rows}, checkpoint_id=path)
    assert len([name for name in os.listdir(path) if name.endswith(".distcp")]) == size
    loaded = {"rows": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])}
    checkpoint.load(loaded, checkpoint_id=path)
    assert torch.equal(loaded["rows"].full_tensor(), whole)


def adopt_and_use() -> None:
    use_both_libraries()
    save_as_all_ranks()
    distributed.destroy_process_group()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # torchestra's world goes on
    assert tensor == dist.get_world_size()
    again = adopt()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="destroyed"):
        distributed.all_reduce(tensor)
    store = dist.FileStore(os.path.join(os.environ["WORLD_DIRECTORY"], "again"), 2)
    rank, size = again.rank(), again.size()
    dist.init_process_group(store=store, rank=rank, world_size=size, then=adopt)
    assert distributed.group.WORLD is not again
    distributed.all_reduce(tensor)
    assert tensor == size * size


@pytest.mark.parametrize("hosts", [1, 2])
def test_torchs_world_is_made_of_torchestras(hosts: int) -> None:
    worlds.run("processes", 2, on_hosts, hosts, adopt_and_use, init=False)


def on_hosts(store: Store, rank: int, size: int, hosts: int, fn: Any) -> Any:
    torch_worlds.pretend_hosts(rank, size, hosts)
    return native(store, rank, size, fn)


def adopt_under_the_switch() -> None:
    autoload.turn_on_switch()
    adopt()
    assert distributed.get_backend() == "gloo"
    other = distributed.new_group(backend="gloo")
    assert isinstance(other, TorchestraGroup)
    distributed.monitored_barrier()


def test_what_is_adopted_under_the_switch_is_named_gloo() -> None:
    worlds.run("processes", 2, native, adopt_under_the_switch, init=False)


def shrink_what_is_adopted() -> None:
    adopt()
    worlds.store_barrier()
    if dist.get_rank() == 1:
        return
    dist.group.WORLD.shrink([1])
    adopt()
    tensor = torch.ones(1)
    distributed.all_reduce(tensor)
    assert tensor == 2 == distributed.get_world_size()


def test_what_was_shrunk_is_adopted_again() -> None:
    worlds.run("processes", 3, native, shrink_what_is_adopted, init=False)


def reconfigure_what_is_adopted(store: Store, rank: int, size: int) -> None:
    dist.init_process_group(enable_reconfigure=True, timeout=worlds.OP_SECONDS)
    store.set(f"handle/{rank}", dist.group.WORLD.get_reconfigure_handle())
    handles = [store.get(f"handle/{each}").decode() for each in range(size)]
    dist.group.WORLD.reconfigure(1, handles)
    adopt()
    assert distributed.get_world_size() == size
    tensor = torch.ones(1)
    distributed.all_reduce(tensor)
    assert tensor == 3
    if rank == 1:
        return
    dist.group.WORLD.reconfigure(2, handles[2:] + handles[:1])
    distributed.all_reduce(tensor)
    assert tensor == 6
    assert (distributed.get_rank(), distributed.get_world_size()) == (rank == 0, 2)
    assert distributed.get_process_group_ranks(distributed.group.WORLD) == [0, 1]


def test_what_is_adopted_follows_when_it_is_reconfigured() -> None:
    worlds.run("processes", 3, reconfigure_what_is_adopted, init=False)


def use_torchs_world(ours: bool) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    group = use()
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert (isinstance(distributed.group.WORLD, TorchestraGroup)) == ours
    if ours:
        assert group.communicator is inner_group().communicator
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    distributed.all_reduce(tensor)
    pair = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=pair)
    assert tensor.tolist() == [2 * size * size] * 2
    with pytest.raises(ValueError, match="has a default group already"):
        use()
    with pytest.raises(ValueError, match="has a default group already"):
        adopt()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    distributed.all_reduce(tensor)  # torch's world goes on
    assert tensor.tolist() == [2 * size**3] * 2


@pytest.mark.parametrize(("backend", "ours"), [("torchestra", True), ("gloo", False)])
def test_torchestras_world_is_made_of_torchs(backend: str, ours: bool) -> None:
    torch_worlds.run(2, use_torchs_world, ours, backend=backend)


def be_refused() -> None:
    with pytest.raises(ValueError, match="run ranks as processes"):
        adopt()


def test_where_the_ranks_are_is_not_looked_for_over_a_store_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's file may be on a disk that several hosts share, and its TCPStore is anybody's."""
    monkeypatch.delenv(HOST_VARIABLE, raising=False)

    def is_looked_for(store: Any) -> bool:
        return may_span_hosts(joined_store(c10d.PrefixStore("a", c10d.PrefixStore("b", store))), 2)

    assert not is_looked_for(AdoptedStore(dist.FileStore(tmp_path / "ours", 1)))
    assert not is_looked_for(c10d.HashStore())
    assert is_looked_for(c10d.FileStore(str(tmp_path / "torchs"), 1))
    monkeypatch.setenv(HOST_VARIABLE, "another")
    assert is_looked_for(AdoptedStore(dist.FileStore(tmp_path / "ours too", 1)))


@pytest.mark.parametrize("prefixes", [(), ("a",), ("a", "b/", "c"), ("",), ("", "a")])
def test_a_store_of_ours_within_torchs_is_used_itself(prefixes: tuple[str, ...]) -> None:
    """Torch's would be polled. The keys are those that torch's prefix stores would use."""
    ours = dist.HashStore()
    torchs: Any = AdoptedStore(ours)
    for prefix in prefixes:
        torchs = c10d.PrefixStore(prefix, torchs)
    joined = joined_store(torchs)
    assert isinstance(joined, (dist.PrefixStore, dist.HashStore))
    torchs.set("from torch", "1")
    joined.set("from us", "2")
    assert joined.get("from torch") == b"1"
    assert torchs.get("from us") == b"2"
    assert ours.num_keys() == 2


def test_ranks_that_are_threads_are_refused() -> None:
    worlds.run("threads", 2, be_refused)


def test_there_must_be_a_world() -> None:
    with pytest.raises(ValueError, match=r"call torchestra\.init_process_group"):
        adopt()
    for function in (use, inner_group):
        with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
            function()
