"""A right call of every public function, for two ranks that are threads: what the wrong ones are made from.

:func:`functions` finds the functions themselves, so that a new one must get its right arguments here (or be
named in :data:`NOT_CALLED`, with the reason) before the tests pass.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import tempfile
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import torchestra as dist
from torchestra import functional, rpc
from torchestra.rpc import RRef
from torchestra.store import StoreReplica


@functools.cache
def _replica() -> tuple[StoreReplica, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    return StoreReplica(0, [address], listen_fd=listener.detach()), address


def replica_address() -> str:
    """Return where a store of one replica is served, which this process keeps."""
    return _replica()[1]


NOT_CALLED = {
    "ProcessGroup.become": "the group's makers call it",
    "ProcessGroup.renumber": "the registry calls it",
    "ProcessGroup.create_device": "what it takes has no effect",
    "Work.await_end": "the package calls it",
    "Work.fail": "the package calls it",
    "Work.finish": "the package calls it",
    "Work.finished": "the package calls it",
    "CoalescingManager.append": "the package calls it",
    "RRef.backward": "of its own tests",
}
"""Methods that are public for other parts of the package, or have no arguments to be checked."""

UNCHECKED = {
    "ProcessGroup.to_group_rank.parameter": "for messages",
    "ProcessGroup.to_group_rank.name": "for messages",
    "ProcessGroup.to_global_rank.parameter": "for messages",
    "ProcessGroup.to_global_rank.name": "for messages",
    "DeviceMesh.dimension.name": "for messages",
}
"""Parameters ("function.parameter") that only the package itself passes, and why."""


class Function(NamedTuple):
    """A function to be called wrongly.

    Attributes:
        label: its name; of a method with its class before it.
        call: itself.
        right: maker of right arguments, by name.
        hints: what the parameters are annotated with.
        runs: whether the right call may be made, too: it does not end the group, and needs no other world.
    """

    label: str
    call: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    hints: dict[str, Any]
    runs: bool = True

    @property
    def name(self) -> str:
        return self.call.__name__  # of a name that stands for another, that


def t(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2,))


def other() -> int:
    return 1 - dist.get_rank()


def is_first() -> bool:
    return dist.get_rank() == 0


def nothing() -> None:
    return None


RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "all_gather": lambda: {"tensor_list": [t(), t()], "tensor": t()},
    "all_gather_coalesced": lambda: {
        "output_tensor_lists": [[t()], [t()]],
        "input_tensor_list": [t()],
    },
    "all_gather_into_tensor": lambda: {"output_tensor": t(4), "input_tensor": t()},
    "all_gather_single": lambda: {"output_tensor": t(4), "input_tensor": t()},
    "all_gather_object": lambda: {"object_list": [None, None], "obj": 1},
    "all_reduce": lambda: {"tensor": t()},
    "all_reduce_coalesced": lambda: {"tensors": [t()]},
    "all_to_all": lambda: {"output_tensor_list": [t(), t()], "input_tensor_list": [t(), t()]},
    "all_to_all_single": lambda: {"output": t(4), "input": t(4)},
    "barrier": dict,
    "batch_isend_irecv": lambda: {"p2p_op_list": []},
    "broadcast": lambda: {"tensor": t(), "src": 0},
    "broadcast_object_list": lambda: {"object_list": [1]},
    "coalescing_manager": dict,
    "empty": lambda: {"size": 2},
    "exscan": lambda: {"tensor": t()},
    "flight_record": dict,
    "full": lambda: {"size": [2], "fill_value": 1.0},
    "gather": lambda: {"tensor": t(), "gather_list": [t(), t()] if is_first() else None},
    "gather_object": lambda: {"obj": 1, "object_gather_list": [None, None] if is_first() else None},
    "get_backend": dict,
    "get_backend_config": dict,
    "get_default_backend_for_device": lambda: {"device": "cpu"},
    "get_global_rank": lambda: {"group": dist.group.WORLD, "group_rank": 0},
    "get_group_rank": lambda: {"group": dist.group.WORLD, "global_rank": 0},
    "get_node_local_rank": dict,
    "get_process_group_ranks": dict,
    "get_rank": dict,
    "get_world_size": dict,
    "init_device_mesh": lambda: {"device_type": "cpu", "mesh_shape": (2,)},
    "is_backend_available": lambda: {"backend": "native"},
    "irecv": lambda: {"tensor": t(), "src": other()},
    "isend": lambda: {"tensor": t(), "dst": other()},
    "monitored_barrier": dict,
    "new_group": dict,
    "new_subgroups": lambda: {"group_size": 1},
    "new_subgroups_by_enumeration": lambda: {"ranks_per_subgroup_list": [[0], [1]]},
    "ones": lambda: {"size": 2},
    "record_comm": lambda: {"name": "a layer"},
    "recv": lambda: {"tensor": t(), "src": other()},
    "recv_object_list": lambda: {"object_list": [None], "src": other()},
    "reduce": lambda: {"tensor": t(), "dst": 0},
    "reduce_scatter": lambda: {"output": t(), "input_list": [t(), t()]},
    "reduce_scatter_single": lambda: {"output": t(), "input": t(4)},
    "reduce_scatter_tensor": lambda: {"output": t(), "input": t(4)},
    "scan": lambda: {"tensor": t()},
    "register_rendezvous_handler": lambda: {"scheme": f"of-{os.urandom(8).hex()}", "handler": iter},
    "scatter": lambda: {"tensor": t(), "scatter_list": [t(), t()] if is_first() else None},
    "scatter_object_list": lambda: {
        "scatter_object_output_list": [None],
        "scatter_object_input_list": [1, 2] if is_first() else None,
    },
    "send": lambda: {"tensor": t(), "dst": other()},
    "share_": lambda: {"tensor": t()},
    "share_module_": lambda: {"module": torch.nn.Linear(1, 1)},
    "start_all": lambda: {"plans": []},
    "use_shared_allocator": dict,
    "send_object_list": lambda: {"object_list": [1], "dst": other()},
    "set_pg_timeout": lambda: {"timeout": 30},
    "split_group": lambda: {"split_ranks": [[0], [1]]},
    "supports_complex": lambda: {"reduceOp": dist.ReduceOp.SUM},
    "zeros": lambda: {"size": 2},
    "P2POp": lambda: {"op": dist.isend, "tensor": t(), "peer": other()},
    "ReduceOp": lambda: {"name": "SUM"},
    "ReduceOp.premul_sum": lambda: {"factor": 2.0},
    "GroupOptions": dict,
    "RayOptions": dict,
    "HashStore": dict,
    "FakeStore": dict,
    "RoundRobinGroup": lambda: {"groups": [dist.group.WORLD]},
    # -- the group's methods
    "ProcessGroup.allgather": lambda: {"output_tensors": [[t(), t()]], "input_tensors": [t()]},
    "ProcessGroup.allgather_coalesced": lambda: {"output_lists": [[t()], [t()]], "input_list": [t()]},
    "ProcessGroup.allgather_into_tensor": lambda: {"output": t(4), "input": t()},
    "ProcessGroup.all_gather_single": lambda: {"output": t(4), "input": t()},
    "ProcessGroup.allgather_into_tensor_coalesced": lambda: {"output_lists": [t(4)], "input_list": [t()]},
    "ProcessGroup.all_gather_single_coalesced": lambda: {"output_lists": [t(4)], "input_list": [t()]},
    "ProcessGroup.allreduce": lambda: {"tensors": [t()]},
    "ProcessGroup.allreduce_coalesced": lambda: {"tensors": [t()]},
    "ProcessGroup.alltoall": lambda: {"output_tensors": [t(), t()], "input_tensors": [t(), t()]},
    "ProcessGroup.alltoall_base": lambda: {"output": t(4), "input": t(4)},
    "ProcessGroup.all_to_all_single": lambda: {"output": t(4), "input": t(4)},
    "ProcessGroup.barrier": dict,
    "ProcessGroup.broadcast": lambda: {"tensors": [t()]},
    "ProcessGroup.exscan": lambda: {"tensors": [t()]},
    "ProcessGroup.gather": lambda: {
        "output_tensors": [[t(), t()]] if is_first() else [],
        "input_tensors": [t()],
        "root": 0,
    },
    "ProcessGroup.allocate_tensor": lambda: {"size": 3, "dtype": torch.float32, "device": "cpu"},
    "ProcessGroup.supports_tensor_alloc": lambda: {"device": torch.device("cpu")},
    "ProcessGroup.monitored_barrier": dict,
    "ProcessGroup.scan": lambda: {"tensors": [t()]},
    "ProcessGroup.split_group": lambda: {"ranks": [dist.get_rank()]},
    "ProcessGroup.recv": lambda: {"tensors": [t()], "srcRank": other()},
    "ProcessGroup.recv_anysource": lambda: {"tensors": [t()]},
    "ProcessGroup.reduce": lambda: {"tensors": [t()], "root": 0},
    "ProcessGroup.reduce_scatter": lambda: {"output_tensors": [t()], "input_tensors": [[t(), t()]]},
    "ProcessGroup.reduce_scatter_tensor": lambda: {"output": t(), "input": t(4)},
    "ProcessGroup.reduce_scatter_single": lambda: {"output": t(), "input": t(4)},
    "ProcessGroup.reduce_scatter_tensor_coalesced": lambda: {
        "output_tensors": [t()],
        "input_tensors": [t(4)],
    },
    "ProcessGroup.reduce_scatter_single_coalesced": lambda: {
        "output_tensors": [t()],
        "input_tensors": [t(4)],
    },
    "ProcessGroup.scatter": lambda: {
        "output_tensors": [t()],
        "input_tensors": [[t(), t()]] if is_first() else [],
        "root": 0,
    },
    "ProcessGroup.send": lambda: {"tensors": [t()], "dstRank": other()},
    "ProcessGroup.set_timeout": lambda: {"timeout": 30},
    "ProcessGroup.to_global_rank": lambda: {"group_rank": 0},
    "ProcessGroup.to_group_rank": lambda: {"global_rank": 0},
    # -- meshes
    "DeviceMesh": lambda: {"device_type": "cpu", "mesh": [0, 1]},
    "DeviceMesh.concatenate": lambda: {"meshes": [mesh()["a"]]},
    "DeviceMesh.of_first_ranks": lambda: {"device_type": "cpu", "shape": (2,)},
    "DeviceMesh.from_group": lambda: {"group": dist.group.WORLD, "device_type": "cpu"},
    "DeviceMesh.dimension": lambda: {"mesh_dim": 0},
    "DeviceMesh.flatten": dict,
    "DeviceMesh.get_group": lambda: {"mesh_dim": 0},
    "DeviceMesh.get_local_rank": lambda: {"mesh_dim": 0},
    "DeviceMesh.group_name": lambda: {"mesh_dim": 0},
    "DeviceMesh.size": dict,
    "DeviceMesh.unflatten": lambda: {"dim": 0, "mesh_sizes": [2, 1], "mesh_dim_names": ["c", "d"]},
    "Work.wait": dict,
    # -- functional
    "functional.all_gather_into_tensor_coalesced": lambda: {"self": [t()], "group": dist.group.WORLD},
    "functional.all_gather_single_coalesced": lambda: {"self": [t()], "group": dist.group.WORLD},
    "functional.all_gather_tensor": lambda: {"self": t(), "gather_dim": 0, "group": dist.group.WORLD},
    "functional.all_gather_single": lambda: {"self": t(), "gather_dim": 0, "group": dist.group.WORLD},
    "functional.all_reduce": lambda: {"self": t(), "reduceOp": "sum", "group": dist.group.WORLD},
    "functional.all_reduce_coalesced": lambda: {"self": [t()], "reduceOp": "sum", "group": dist.group.WORLD},
    "functional.all_to_all_single": lambda: {
        "self": t(4),
        "output_split_sizes": [2, 2],
        "input_split_sizes": [2, 2],
        "group": dist.group.WORLD,
    },
    "functional.broadcast": lambda: {"self": t(), "src": 0, "group": dist.group.WORLD},
    "functional.expand_group": lambda: {"group": dist.group.WORLD},
    "functional.find_or_make_group": lambda: {"tag": "ptd:default", "ranks": [0, 1], "size": 2},
    "functional.permute_tensor": lambda: {"self": t(), "src_dst": [1, 0], "group": dist.group.WORLD},
    "functional.reduce_scatter_tensor": lambda: {
        "self": t(4),
        "reduceOp": "sum",
        "scatter_dim": 0,
        "group": dist.group.WORLD,
    },
    "functional.reduce_scatter_tensor_coalesced": lambda: {
        "inputs": [t(4)],
        "reduceOp": "sum",
        "scatter_dim": [0],
        "group": dist.group.WORLD,
    },
    "functional.wait_tensor": lambda: {"tensor": t()},
    # -- remote procedure calls
    "rpc.enable_gil_profiling": lambda: {"flag": True},
    "rpc.get_worker_info": dict,
    "rpc.set_rpc_timeout": lambda: {"seconds": 30},
    "rpc.rpc_sync": lambda: {"to": other(), "func": nothing},
    "rpc.rpc_async": lambda: {"to": other(), "func": nothing},
    "rpc.remote": lambda: {"to": other(), "func": nothing},
    "rpc.RpcBackendOptions": dict,
    "rpc.WorkerInfo": lambda: {"name": "a", "id": 0},
    "RRef": lambda: {"value": 1},
    "RRef.to_here": dict,
    "RRef.remote": dict,
    "RRef.rpc_sync": dict,
    "RRef.rpc_async": dict,
    "RpcBackendOptions.set_device_map": lambda: {"to": "w0", "device_map": {}},
    "RpcBackendOptions.set_devices": lambda: {"devices": []},
}
for _name in (
    "all_gather_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_tensor",
):
    RIGHT[f"functional.{_name}_autograd"] = RIGHT[f"functional.{_name}"]
for _name in ("reduce_scatter_single", "reduce_scatter_single_autograd", "reduce_scatter_single_coalesced"):
    RIGHT[f"functional.{_name}"] = RIGHT[f"functional.{_name.replace('single', 'tensor')}"]

for _name in (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast"),
    *("recv", "reduce_scatter", "reduce_scatter_tensor", "send"),
):
    RIGHT[f"{_name}_init"] = RIGHT[_name]

# Their right calls would end the group, or make a world within this one: only the wrong ones are made.
RIGHT_BUT_NOT_RUN: dict[str, Callable[[], dict[str, Any]]] = {
    "abort_process_group": dict,
    "destroy_process_group": dict,
    "join": lambda: {"store": dist.HashStore(), "timeout": 0.2},
    "shrink_group": lambda: {"ranks_to_exclude": [other()]},
    "init_process_group": lambda: {
        "store": dist.HashStore(),
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "world_size": 2,
        "timeout": 0.2,
    },
    "breakpoint": dict,
    "launch": lambda: {"fn": nothing, "nproc": 1, "kind": "threads"},
    "ProcessGroup": lambda: {"store": dist.HashStore(), "rank": dist.get_rank(), "size": 2, "timeout": 0.2},
    "ProcessGroup.grow": dict,
    "ProcessGroup.merge_remote_group": lambda: {"store": dist.HashStore(), "size": 2, "timeout": 0.2},
    "ProcessGroup.reconfigure": lambda: {"uuid": 1, "handles": [], "timeout": 0.2},
    "ProcessGroup.shrink": dict,
    "ProcessGroup.shrink_when_idle": lambda: {"exclude": [other()]},
    "FlightRecord.save": lambda: {"path": os.path.join(tempfile.gettempdir(), f"flight-{os.getpid()}.json")},
    "FileStore": lambda: {"file_name": os.path.join(tempfile.gettempdir(), f"wrong-{os.getpid()}")},
    "PrefixStore": lambda: {"prefix": "p", "store": dist.HashStore()},
    "ReplicatedStore": lambda: {"addresses": [replica_address()], "timeout": 0.2},
    "TCPStore": lambda: {"host_name": "127.0.0.1", "port": 0, "is_master": True, "timeout": 0.2},
    "rpc.init_rpc": lambda: {"name": "again", "rank": 0, "world_size": 2},
    "rpc.shutdown": dict,
}

# Two ranks must call different ones of these; or what they do depends on what was done to the store before.
MESSAGES = frozenset(
    {
        *("irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"),
        *("ProcessGroup.recv", "ProcessGroup.recv_anysource", "ProcessGroup.send"),
        *(
            f"{store}.{method}"
            for store in ("HashStore", "FileStore", "PrefixStore", "ReplicatedStore", "TCPStore")
            for method in ("delete_key", "queue_pop")
        ),
    }
)

STORE_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "key": lambda: "key",
    "keys": lambda: ["key"],
    "value": lambda: b"1",
    "values": lambda: [b"1"],
    "amount": lambda: 1,
    "expected_value": lambda: b"1",
    "desired_value": lambda: b"1",
    "block": lambda: False,
    "world_size": lambda: 1,
    "timeout": lambda: 5,
    "address": lambda: "127.0.0.1:1",
    "silent": lambda: 5,
}


def mesh() -> dist.DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))


def functions(stores: dict[str, dist.Store], rref: RRef | None) -> Iterator[Function]:
    """Every public function that takes arguments, bound to this rank's objects."""
    for name in dist.__all__:
        value = getattr(dist, name)
        if inspect.isfunction(value) or name in RIGHT or name in RIGHT_BUT_NOT_RUN:
            yield from described(name, value)
    for package in (functional, rpc):
        for name in package.__all__:
            value = getattr(package, name)
            label = f"{package.__name__.rpartition('.')[2]}.{name}"
            if inspect.isfunction(value) or label in RIGHT:
                yield from described(label, value)
    group = dist.group.WORLD
    assert group is not None
    record = dist.flight_record()
    work = dist.Work.finished("work", [])
    objects: list[Any] = [group, mesh(), work, record, rpc.RpcBackendOptions()]
    if rref is not None:
        objects.append(rref)
    for each in objects:
        yield from methods(type(each).__name__, each)
    yield from described("RRef", RRef)
    yield from described("ReduceOp.premul_sum", dist.ReduceOp.premul_sum)
    for name, store in stores.items():
        yield from methods(name, store)


def methods(label: str, owner: object) -> Iterator[Function]:
    for name in dir(type(owner)):
        value = inspect.getattr_static(type(owner), name)
        if not name.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))
        ):
            yield from described(f"{label}.{name}", getattr(owner, name))


def _store_arguments(names: list[str]) -> dict[str, Any]:
    return {name: STORE_ARGUMENTS[name]() for name in names}


def described(label: str, call: Callable[..., Any]) -> Iterator[Function]:
    """The function with its right arguments, unless it takes none."""
    if label in NOT_CALLED:
        return
    signed = call.__init__ if inspect.isclass(call) else call  # type: ignore[misc]
    parameters = [
        each for each in inspect.signature(call).parameters.values() if each.kind is not each.VAR_KEYWORD
    ]
    if not parameters:
        return
    hints = typing.get_type_hints(signed)
    right = RIGHT.get(label) or RIGHT_BUT_NOT_RUN.get(label)
    if right is None and "Store." in label:
        right = partial(_store_arguments, [each.name for each in parameters])
    if right is None:
        raise AssertionError(f"{label} has no right call in right_calls.py")
    wanted = {each.name: hints.get(each.name, Any) for each in parameters}
    runs = label not in RIGHT_BUT_NOT_RUN and label not in MESSAGES
    yield Function(label, call, right, wanted, runs)
