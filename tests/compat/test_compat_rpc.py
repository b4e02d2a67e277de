"""Remote calls by torch's private names, as programs and tests written for torch.distributed.rpc use them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import torchestra.compat as dist
from torchestra.compat import rpc, testing
from torchestra.compat.autograd import _get_debug_info
from torchestra.compat.rpc import api, backend_registry, internal
from torchestra.compat.testing import dist_init, worker_name
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.store import HashStore
from torchestra.testing import spawn_threads_and_init_comms


def add(first: Any, second: Any) -> Any:
    return first + second


def fail() -> None:
    raise ValueError("on purpose")


class PicklesItself:
    """As programs do that want their parts to be pickled as parts of calls are."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __getstate__(self) -> Any:
        return internal._internal_rpc_pickler.serialize(internal.PythonUDF(add, self.parts, None))

    def __setstate__(self, state: Any) -> None:
        self.parts = internal._internal_rpc_pickler.deserialize(*state).args


def sum_of_parts(value: PicklesItself) -> Any:
    return sum(part.to_here() if isinstance(part, rpc.RRef) else part for part in value.parts)


class AnotherPickler(internal._InternalRPCPickler):
    used = 0

    def serialize(self, obj: object) -> Any:
        AnotherPickler.used += 1
        return super().serialize(obj)


def as_workers(fn: Any, size: int = 2) -> None:
    """Call a function on each of some threads that are workers."""

    @spawn_threads_and_init_comms(world_size=size)
    def on_each() -> None:
        here = current_thread_rank()
        assert here is not None
        options = rpc.TensorPipeRpcBackendOptions()
        options.store = dist.PrefixStore("compat-rpc", dist.distributed_c10d._get_default_store())
        rpc.init_rpc(worker_name(here.rank), None, here.rank, size, options)
        fn(here.rank)
        dist.barrier()
        rpc.shutdown()

    on_each()


def call(rank: int) -> None:
    peer = worker_name(1 - rank)
    with api._wait_all():
        futures = [rpc.rpc_async(peer, add, (torch.ones(2), number)) for number in range(5)]
        assert api._thread_local_var.future_list == futures
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="on purpose"), api._wait_all():
        rpc.rpc_async(peer, fail)
    assert rpc.rpc_sync(peer, sum_of_parts, (PicklesItself(1, rpc.RRef(torch.ones(1)), 3),)) == 5
    assert rpc.remote(peer, add, (1, 2)).to_here() == 3
    with pytest.raises(RuntimeError, match="only within a call"):
        internal.serialize(rpc.RRef(1))
    assert api._to_worker_info(1 - rank) == rpc.get_worker_info(peer)


def test_calls_and_what_they_carry() -> None:
    as_workers(call)


def ask(rank: int) -> None:
    agent = rpc._get_current_rpc_agent()
    assert isinstance(agent, rpc.TensorPipeAgent)
    assert [info.id for info in agent.get_worker_infos()] == [0, 1, 2]
    assert agent.get_worker_info().id == rank
    assert agent.get_worker_info("worker2").id == 2
    info, agents = rpc._rref_context_get_debug_info(), agent.get_debug_info()
    assert info["num_users"] == "0"
    assert agents["agent.thread_pool_size"] == "16"
    assert not info.keys() & agents.keys()
    assert rpc._get_debug_info().keys() == info.keys() | agents.keys() | _get_debug_info().keys()
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(3)
    assert rpc.get_rpc_timeout() == 3
    rpc._set_rpc_timeout(before)
    assert api._all_gather(rank) == {"worker0": 0, "worker1": 1, "worker2": 2}
    some = ["worker0", "worker2"]
    if rank != 1:
        assert api._all_gather(rank, some) == {"worker0": 0, "worker2": 2}
    api._barrier([f"worker{rank}"])
    api._wait_all_workers()


def test_what_a_worker_knows() -> None:
    as_workers(ask, 3)


def leak(rank: int) -> None:
    kept = rpc.remote(worker_name(1 - rank), torch.ones, (1,))
    kept.to_here()
    api._delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(RuntimeError, match="after deletion"):
        kept.to_here()


def test_references_are_dropped() -> None:
    as_workers(leak)


def use_another_pickler(rank: int) -> None:
    if rank == 0:
        with api._use_rpc_pickler(AnotherPickler()):
            assert rpc.rpc_sync("worker1", add, (torch.ones(1), 2)) == 3
            with pytest.raises(ValueError, match="on purpose"):
                rpc.rpc_sync("worker1", fail)
        assert AnotherPickler.used == 2
        assert api._default_pickler is internal._internal_rpc_pickler


def test_a_pickler_of_ones_own_is_used() -> None:
    as_workers(use_another_pickler)


def test_what_cannot_begin() -> None:
    with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
        rpc.init_rpc("me", backend="TENSORPIPE")
    with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
        rpc.init_rpc("me", rpc_backend_options={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("me", rpc_backend_options=rpc.RpcBackendOptions())
    with pytest.raises(TypeError, match="must be a `TensorPipeRpcBackendOptions`"):
        rpc.init_rpc("me", rpc.BackendType.TENSORPIPE, 0, 1, rpc.RpcBackendOptions())
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=timedelta(1))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.shutdown()


def test_a_backend_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "_known", dict(backend_registry._known))
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    made = []

    class Options(rpc.RpcBackendOptions):
        pass

    def init(**told: Any) -> None:
        made.append(told)

    backend = backend_registry.register_backend("own", lambda timeout, method, **more: Options(), init)
    assert backend_registry.backend_registered("own")
    with pytest.raises(RuntimeError, match="RPC backend own: already registered"):
        backend_registry.register_backend("own", Options, init)
    store = HashStore()
    rpc._init_rpc_backend(backend, store, "me", 0, 1, Options())
    assert made[0]["store"] is store
    assert made[0]["name"] == "me"


def test_names_in_profiles() -> None:
    key = internal._build_rpc_profiling_key(internal.RPCExecMode.ASYNC, "add", "worker0", "worker1")
    assert key == "rpc_async#add(worker0 -> worker1)"


class TestWithWorkers(testing.MultiProcessTestCase, testing.TensorPipeRpcAgentTestFixture):
    """A test case as those of torch's remote calls are."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @dist_init
    def test_ranks_are_workers(self) -> None:
        testing.initialize_pg(self.file_init_method, self.rank, self.world_size)
        peer = 1 - self.rank
        rref = rpc.remote(worker_name(peer), torch.add, args=(torch.ones(1), 1))
        assert rref.to_here() == 2
        testing.wait_until_pending_futures_and_users_flushed()
        testing.wait_until_owners_and_forks_on_rank(1, 1, rank=peer)
        with pytest.raises(ValueError, match="Timed out waiting"):
            testing.wait_until_owners_and_forks_on_rank(5, 5, rank=peer, timeout=0)
        dist.barrier()

    @dist_init(setup_rpc=False)
    def test_a_worker_that_is_gone(self) -> None:
        rpc.init_rpc(
            worker_name(self.rank), self.rpc_backend, self.rank, self.world_size, self.rpc_backend_options
        )
        if self.rank == 0:
            self.assertIn("worker1", testing.wait_until_node_failure(1, self.get_shutdown_error_regex()))
        rpc.shutdown(graceful=False)

    @dist_init(setup_rpc=False)
    def test_a_leak_is_told(self) -> None:
        rpc.init_rpc(
            worker_name(self.rank), self.rpc_backend, self.rank, self.world_size, self.rpc_backend_options
        )
        kept = rpc.remote(worker_name(1 - self.rank), torch.ones, (1,))
        kept.to_here()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "_delete_all_user_and_unforked_owner_rrefs", lambda: None)
            with pytest.raises(RuntimeError, match="Leaking RRef"):
                rpc.shutdown()
