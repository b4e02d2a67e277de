"""The table of torch.distributed's modules without code of their own here: their names, and the modules of
torchestra that these come from. docs/compat.md lists them.
"""

from __future__ import annotations

from torchestra.system.module_aliases import AliasFinder, AliasTable

__all__ = ["ALIASES", "install"]

_MESH = {"torchestra.device_mesh": "*"}
_FUNCTIONAL_OPTIMIZERS = "torchestra.compat.functional_optimizers"
_HOOKS = "algorithms.ddp_comm_hooks"
_OUR_HOOKS = "torchestra.nn.parallel.comm_hooks"
_SPECIFICATIONS = "ChunkShardingSpec EnumerableShardingSpec ShardingSpec"
_AVERAGING = "algorithms.model_averaging"

_BELOW_COMPAT: AliasTable = {
    "_functional_collectives": {"torchestra.functional": "* _expand_group=expand_group RANK_TYPES=Group"},
    "_shard": {},
    "_shard.metadata": {"torchestra.sharded": "ShardMetadata"},
    "_shard.sharding_spec": {"torchestra.sharded": _SPECIFICATIONS + " ShardMetadata"},
    "_shard.sharding_spec.api": {"torchestra.sharded": "EnumerableShardingSpec ShardingSpec"},
    "_shard.sharding_spec.chunk_sharding_spec": {"torchestra.sharded": "ChunkShardingSpec"},
    "_shard.sharded_tensor": {"torchestra.sharded": "*"},
    "_shard.sharded_tensor.api": {"torchestra.sharded": "Shard ShardedTensor ShardedTensorMetadata"},
    "_spmd": {},
    "_spmd.comm_tensor": {"torchestra.functional.comm_tensor": "CommTensor _wait_comm=wait_comm"},
    "_tensor": _MESH,
    "algorithms": {"torchestra.algorithms.join": "*", "torchestra.compat.algorithms": "join"},
    "algorithms.join": {"torchestra.algorithms.join": "* _JoinConfig=JoinConfig"},
    _HOOKS: {
        _OUR_HOOKS: "*",
        f"torchestra.compat.{_HOOKS}": "debugging=debugging_hooks default=default_hooks"
        " optimizer_overlap=optimizer_overlap_hooks powerSGD=powerSGD_hook quantization=quantization_hooks",
    },
    f"{_HOOKS}.ddp_zero_hook": {f"{_OUR_HOOKS}.ddp_zero_hook": "*"},
    f"{_HOOKS}.debugging_hooks": {f"{_OUR_HOOKS}.debugging_hooks": "*"},
    f"{_HOOKS}.default_hooks": {f"{_OUR_HOOKS}.default_hooks": "*"},
    f"{_HOOKS}.optimizer_overlap_hooks": {
        f"{_OUR_HOOKS}.optimizer_overlap_hooks": "_OptimizerHookState=OptimizerHookState"
        " _hook_then_optimizer=hook_then_optimizer"
    },
    f"{_HOOKS}.post_localSGD_hook": {f"{_OUR_HOOKS}.post_localSGD_hook": "*"},
    f"{_HOOKS}.powerSGD_hook": {f"{_OUR_HOOKS}.powerSGD_hook": "*"},
    f"{_HOOKS}.quantization_hooks": {f"{_OUR_HOOKS}.quantization_hooks": "*"},
    _AVERAGING: {},
    f"{_AVERAGING}.averagers": {f"torchestra.{_AVERAGING}.averagers": "*"},
    f"{_AVERAGING}.hierarchical_model_averager": {
        f"torchestra.{_AVERAGING}.hierarchical_model_averager": "*"
    },
    f"{_AVERAGING}.utils": {f"torchestra.{_AVERAGING}.parameters": "*"},
    "constants": {"torchestra.compat.distributed_c10d": "default_pg_timeout"},
    "device_mesh": {**_MESH, "torchestra.device_mesh.torch_names": "_MeshEnv _mesh_resources"},
    "nn": {"torchestra.compat.nn.functional": "*", "torchestra.nn": "RemoteModule"},
    "nn.api": {},
    "nn.api.remote_module": {
        "torchestra.nn.remote_module": "RemoteModule _RemoteModule=RemoteModule"
        " _REMOTE_MODULE_PICKLED_ATTRIBUTES=PICKLED_ATTRIBUTES"
    },
    "nn.functional": {
        "torchestra.nn.functional": "_all_gather_base=all_gather_into_tensor all_gather all_reduce all_to_all"
        " all_to_all_single broadcast gather reduce reduce_scatter scatter"
    },
    "optim": {
        "torchestra.compat.optim.apply_optimizer_in_backward": "*",
        "torchestra.optim": "DistributedOptimizer PostLocalSGDOptimizer ZeroRedundancyOptimizer",
        _FUNCTIONAL_OPTIMIZERS: "*",
    },
    "optim.apply_optimizer_in_backward": {
        "torchestra.optim": "_apply_optimizer_in_backward=apply_optimizer_in_backward"
        " _get_in_backward_optimizers=get_in_backward_optimizers"
    },
    "optim.functional_adadelta": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalAdadelta"},
    "optim.functional_adagrad": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalAdagrad"},
    "optim.functional_adam": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalAdam"},
    "optim.functional_adamax": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalAdamax"},
    "optim.functional_adamw": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalAdamW"},
    "optim.functional_rmsprop": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalRMSprop"},
    "optim.functional_rprop": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalRprop"},
    "optim.functional_sgd": {_FUNCTIONAL_OPTIMIZERS: "_FunctionalSGD"},
    "optim.optimizer": {"torchestra.optim": "DistributedOptimizer"},
    "optim.post_localSGD_optimizer": {"torchestra.optim": "PostLocalSGDOptimizer"},
    "optim.utils": {_FUNCTIONAL_OPTIMIZERS: "*"},
    "optim.zero_redundancy_optimizer": {
        "torchestra.optim": "ZeroRedundancyOptimizer",
        "torchestra.compat.reducing": "_broadcast_object",
    },
    "profiler_legacy": {"torchestra.rpc.profiling": "profile"},
    "rpc.server_process_global_profiler": {
        "torchestra.rpc.profiling": "_server_process_global_profile=server_process_profile"
    },
    "utils": {
        "torchestra.compat.reducing": "_sync_module_states _verify_param_shape_across_processes",
    },
}

ALIASES: AliasTable = {f"torchestra.compat.{path}": sources for path, sources in _BELOW_COMPAT.items()}


def install() -> None:
    """Let ``import`` find these modules."""
    AliasFinder(ALIASES).install()
