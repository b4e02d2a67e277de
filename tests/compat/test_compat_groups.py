"""Groups by torch's names: backends, tags, what stands for a group that a rank is not in."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import torchestra
import torchestra.compat as dist
import torchestra.compat._functional_collectives as ft_c
from torchestra.compat import distributed_c10d as c10d
from torchestra.compat.testing import MultiThreadedTestCase, spawn_threads_and_init_comms
from torchestra.compat.utils import _sync_module_states, _verify_param_shape_across_processes
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.store import FakeStore, HashStore
from torchestra.world.registry import thread_rank


def test_the_default_group_is_of_the_backend_that_was_asked_for() -> None:
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("gloo")
        assert dist.get_backend() == dist.Backend.GLOO == "gloo"
        assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"
        assert isinstance(dist.group.WORLD, dist.ProcessGroupGloo)
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 1, 3)


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo", None, "threaded"])
def test_names_of_gloo_mean_the_engine(backend: str | None) -> None:
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group(backend)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert torchestra.get_backend() == "threads"


def test_logging_data_name_the_backend_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Gloo's settings, where it was Gloo that was asked for."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def data() -> dict[str, object]:
        return DistributedDataParallel(torch.nn.Linear(1, 1))._get_ddp_logging_data()

    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("gloo")
        known = data()
        assert known["backend_name"] == dist.get_backend() == "gloo"
        assert known["gloo_socket_ifname"] == "lo"
        assert known["gloo_device_transport"] == "N/A"
        assert known["gloo_num_threads"] == 2
        dist.destroy_process_group()
        torchestra.init_process_group()
        known = data()
        assert known["backend_name"] == torchestra.get_backend() == "threads"
        assert not any(name.startswith("gloo") for name in known)


HAS_NCCL = torch.distributed.is_nccl_available()


@pytest.mark.parametrize("backend", ["mpi", "xccl", *([] if HAS_NCCL else ["nccl", "cpu:gloo,cuda:nccl"])])
def test_backends_that_cannot_be_had_are_refused(backend: str) -> None:
    with (
        thread_rank(0, 1, HashStore()),
        pytest.raises(RuntimeError, match="Distributed package doesn't have"),
    ):
        dist.init_process_group(backend)


@pytest.mark.parametrize("backend", ["nonsense", "hccl"])
def test_what_is_no_backend_is_torchs_assertion_error(backend: str) -> None:
    for error in (AssertionError, dist.DistBackendError):
        with thread_rank(0, 1, HashStore()), pytest.raises(error, match=f"Unknown backend type {backend}"):
            dist.init_process_group(backend)


def test_a_mixture_of_engines_is_refused() -> None:
    with (
        thread_rank(0, 1, HashStore()),
        pytest.raises(RuntimeError, match="one engine serves all devices"),
    ):
        dist.init_process_group("cpu:gloo,cuda:fake")


class TestGroupsOfSome(MultiThreadedTestCase):
    """Hold what new_group and its relatives return on each rank."""

    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_a_rank_outside_gets_torchs_value(self) -> None:
        group = dist.new_group([0, 2], backend="gloo")
        inside = dist.get_rank() in (0, 2)
        self.assertEqual(group is not dist.GroupMember.NON_GROUP_MEMBER, inside)
        self.assertEqual(c10d._rank_not_in_group(group), not inside)
        self.assertEqual(dist.get_rank(group), {0: 0, 2: 1}.get(dist.get_rank(), -1))
        dist.destroy_process_group(group)

    def test_with_local_synchronization_a_rank_outside_gets_none(self) -> None:
        group = dist.new_group([1, 3], use_local_synchronization=True)
        self.assertEqual(group is None, dist.get_rank() in (0, 2))
        tagged = c10d._new_group_with_tag([1, 3], pg_tag="bla", use_local_synchronization=True)
        self.assertEqual(tagged is None, dist.get_rank() in (0, 2))

    def test_a_rank_that_is_in_no_part_gets_none(self) -> None:
        part = dist.split_group(split_ranks=[[0, 1], [2]])
        self.assertEqual(-1 if part is None else part.size(), [2, 2, 1, -1][dist.get_rank()])

    def test_subgroups_of_others_are_torchs_value(self) -> None:
        mine, parts = dist.new_subgroups(2)
        own = dist.get_rank() // 2
        assert parts[own] is mine
        assert parts[1 - own] is dist.GroupMember.NON_GROUP_MEMBER
        mine, parts = dist.new_subgroups_by_enumeration([[0, 3], [1]])
        outside = dist.GroupMember.NON_GROUP_MEMBER
        assert [part is not outside for part in parts] == [self.rank in (0, 3), self.rank == 1]
        self.assertEqual(mine is None, self.rank == 2)

    def test_groups_are_found_by_ranks_and_tag(self) -> None:
        tagged = c10d._new_group_with_tag([3, 1, 2, 0], pg_tag="blu")
        for tag in ("blu", "user:blu"):
            assert c10d._find_pg_by_ranks_and_tag(tag, [0, 1, 2, 3]) is tagged
            assert c10d._find_or_create_pg_by_ranks_and_tag(tag, [0, 1, 2, 3], 4) is tagged
        self.assertEqual(c10d._get_group_tag(tagged), "blu")
        world = c10d._get_default_group()
        assert world is dist.group.WORLD
        self.assertTrue(c10d._get_group_tag(world).startswith("ptd:"))
        assert c10d._find_pg_by_ranks_and_tag(c10d._get_group_tag(world), [0, 1, 2, 3]) is world
        assert c10d._find_pg_by_ranks_and_tag("", [0, 1, 2, 3]) is world
        assert c10d._find_pg_by_ranks_and_tag("other", [0, 1]) is None
        self.assertEqual(ft_c._expand_group(tagged), ("blu", [0, 1, 2, 3], 4))

    def test_groups_by_name(self) -> None:
        world = c10d._get_default_group()
        name = c10d._get_process_group_name(world)
        assert c10d._resolve_process_group(name) is world
        assert c10d._get_process_group_store(world) is c10d._get_default_store()
        self.assertEqual(c10d._get_group_size_by_name(name), c10d._get_group_size(None))
        self.assertEqual(c10d._resolve_group_name_by_ranks_and_tag([0, 1, 2, 3], ""), name)
        self.assertEqual(c10d._get_global_rank(world, 2), 2)

    def test_taking_turns(self) -> None:
        groups = [dist.new_group() for _ in range(2)]
        turns = dist._round_robin_process_groups(groups)
        for number in range(4):
            tensor = torch.full((2,), self.rank + number)
            turns.allreduce(tensor).wait()
            self.assertEqual(tensor, torch.full((2,), 6 + 4 * number))

    def test_store_based_barrier(self) -> None:
        store = c10d._get_default_store()
        c10d._store_based_barrier(self.rank, store, "test", 4, timeout=60)
        if self.rank == 0:
            with pytest.raises(dist.DistStoreError, match="Timed out initializing process group in store"):
                c10d._store_based_barrier(0, store, "nobody else", 4, timeout=0.05)

    def test_coalescing(self) -> None:
        tensors = [torch.full((2,), self.rank) for _ in range(3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        self.assertEqual(tensors, [torch.full((2,), 6)] * 3)

    def test_broadcast_coalesced(self) -> None:
        tensors = [torch.full((3,), self.rank + 1.0), torch.full((2, 2), self.rank)]
        c10d._broadcast_coalesced(dist.group.WORLD, tensors, 8, 2)
        self.assertEqual(tensors, [torch.full((3,), 3.0), torch.full((2, 2), 2)])

    def test_states_of_modules(self) -> None:
        module = torch.nn.BatchNorm1d(3)
        with torch.no_grad():
            module.weight.fill_(self.rank)
            module.bias.fill_(self.rank)
        module.running_mean.fill_(self.rank)
        _sync_module_states(module, dist.group.WORLD, 1 << 20, 1, {"bias"})
        state = [module.weight[0], module.bias[0], module.running_mean[0]]
        assert [tensor.item() for tensor in state] == [1, self.rank, 1]
        _sync_module_states(module, dist.group.WORLD, 1 << 20, 2, (), broadcast_buffers=False)
        assert [tensor.item() for tensor in state] == [1, 2, 1]
        _verify_param_shape_across_processes(dist.group.WORLD, list(module.parameters()))
        with pytest.raises(RuntimeError, match="expects same model across all ranks"):
            c10d._verify_params_across_processes(dist.group.WORLD, [torch.empty(self.rank)])

    def test_what_there_is_to_know_of_a_group(self) -> None:
        group = dist.new_group([1, 3], group_desc="odd")
        if self.rank in (1, 3):
            known = c10d._get_pg_config(group)
            name = known.pop("pg_name")
            assert c10d._resolve_process_group(name) is group
            config = {"pg_desc": "odd", "backend_config": "cpu:gloo,cuda:gloo", "pg_size": 2, "ranks": [1, 3]}
            self.assertEqual(known, config)

    def test_premultiplied_sum(self) -> None:
        for factor in (0.5, torch.tensor(0.5)):
            tensor = torch.full((2,), float(self.rank))
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            self.assertEqual(tensor, torch.full((2,), 3.0))


@spawn_threads_and_init_comms(world_size=2)
def test_a_group_that_is_made_directly_takes_gloos_options() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = 30.0
    options._threads = 3
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    group = dist.ProcessGroupGloo(c10d._get_default_store(), dist.get_rank(), 2, options)
    assert group._get_backend(torch.device("cpu")) is group
    assert [device.interface for device in group.options._devices] == ["lo"]
    tensor = torch.ones(1)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor.item() == 2


def test_what_torch_keeps_of_groups_can_be_read() -> None:
    with thread_rank(0, 1, HashStore()):
        assert c10d._world.default_pg is None
        dist.init_process_group("gloo")
        tagged = c10d._new_group_with_tag([0], pg_tag="mine")
        world = c10d._world
        assert world.default_pg is dist.group.WORLD
        assert list(world.pg_names) == list(world.pg_map) == [dist.group.WORLD, tagged]
        assert world.pg_map[tagged][0] == "gloo"
        assert world.pg_group_ranks[tagged] == {0: 0}
        assert world.pg_backend_config[tagged] == "cpu:gloo,cuda:gloo"
        assert world.tags_to_pg["mine"] == [tagged]
        assert world.pg_to_tag[dist.group.WORLD] == c10d._get_group_tag(dist.group.WORLD)
        assert world.group_count == 2
        assert [info["pg_name"] for info in world.pg_config_info] == list(world.pg_names.values())


def test_a_group_is_reconfigured_by_torchs_names() -> None:
    with thread_rank(0, 1, HashStore()):
        dist.init_process_group("gloo", rank=0, world_size=1, enable_reconfigure=True)
        assert c10d._supports_reconfigure()
        handle = c10d._get_reconfigure_handle()
        work = c10d._reconfigure(uuid=7, handles=[handle], timeout=timedelta(seconds=20), hints={"k": "v"})
        assert work.wait()
        with pytest.raises(RuntimeError, match="already used"):
            c10d._reconfigure(7, [handle])
        with pytest.raises(RuntimeError, match="made with its ranks"):
            c10d._get_reconfigure_handle(dist.new_group([0]))
        assert not c10d._supports_reconfigure(dist.ProcessGroup(0, 1))
        dist.destroy_process_group()
