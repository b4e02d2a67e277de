"""Every name that code written against torch.distributed is known to import is there after the rename."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "torchestra.compat": """
        AllreduceCoalescedOptions AllreduceOptions Backend.GLOO Backend.MPI Backend.NCCL Backend.UCC
        Backend.UNDEFINED Backend._plugins Backend.backend_list Backend.register_backend
        BackendConfig BroadcastOptions DebugLevel.DETAIL DebugLevel.INFO DebugLevel.OFF DistError
        DistStoreError FileStore GatherOptions GradBucket GroupMember.NON_GROUP_MEMBER
        GroupMember.WORLD HashStore P2POp PrefixStore ProcessGroup ProcessGroupGloo
        ProcessGroupGloo._Options ProcessGroupGloo.create_device ReduceOp.AVG ReduceOp.BAND
        ReduceOp.BOR ReduceOp.BXOR ReduceOp.MAX ReduceOp.MIN ReduceOp.PRODUCT ReduceOp.SUM
        ReduceOptions Reducer ScatterOptions Store TCPStore Work _CoalescingManager
        _DEFAULT_FIRST_BUCKET_BYTES _Work _all_gather_base _broadcast_coalesced _coalescing_manager
        _compute_bucket_assignment_by_size _get_process_group_name _make_nccl_premul_sum
        _rank_not_in_group _reduce_scatter_base _round_robin_process_groups all_gather
        all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
        all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
        broadcast_object_list destroy_process_group gather gather_object get_backend
        get_backend_config get_debug_level get_default_backend_for_device get_global_rank
        get_group_rank get_node_local_rank get_process_group_ranks get_rank get_world_size
        group.WORLD group.WORLD.allgather_into_tensor_coalesced group.WORLD.group_name
        group.WORLD.reduce_scatter_tensor_coalesced init_process_group irecv is_available
        is_backend_available is_gloo_available is_initialized is_mpi_available is_nccl_available
        is_ucc_available is_xccl_available isend monitored_barrier new_group new_subgroups
        new_subgroups_by_enumeration recv recv_object_list reduce reduce_scatter
        reduce_scatter_tensor scatter scatter_object_list send send_object_list set_debug_level
        set_debug_level_from_env shrink_group split_group
    """,
    "torchestra.compat._functional_collectives": """
        AsyncCollectiveTensor _expand_group all_gather_into_tensor_coalesced all_gather_tensor
        all_gather_tensor_autograd all_reduce all_reduce_coalesced all_to_all_single
        all_to_all_single_autograd broadcast permute_tensor reduce_scatter_tensor
        reduce_scatter_tensor_autograd reduce_scatter_tensor_coalesced wait_tensor
    """,
    "torchestra.compat._shard.sharded_tensor": """
        Shard ShardMetadata ShardedTensor init_from_local_shards
    """,
    "torchestra.compat._spmd.comm_tensor": """
        CommTensor CommTensor._is_supported _wait_comm
    """,
    "torchestra.compat._tensor": """
        DeviceMesh init_device_mesh
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks": """
        DDPCommHookType debugging default optimizer_overlap powerSGD quantization
        register_ddp_comm_hook
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.ddp_zero_hook": """
        hook_with_zero_step hook_with_zero_step_interleaved
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.debugging_hooks": """
        noop_hook
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.default_hooks": """
        allreduce_hook bf16_compress_hook bf16_compress_wrapper fp16_compress_hook
        fp16_compress_wrapper
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.optimizer_overlap_hooks": """
        _OptimizerHookState _hook_then_optimizer
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.post_localSGD_hook": """
        PostLocalSGDState post_localSGD_hook
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.powerSGD_hook": """
        PowerSGDState batched_powerSGD_hook powerSGD_hook
    """,
    "torchestra.compat.algorithms.ddp_comm_hooks.quantization_hooks": """
        quantization_perchannel_hook quantization_pertensor_hook
    """,
    "torchestra.compat.algorithms.join": """
        Join Join.notify_join_context JoinHook Joinable
    """,
    "torchestra.compat.algorithms.model_averaging.averagers": """
        ModelAverager PeriodicModelAverager
    """,
    "torchestra.compat.algorithms.model_averaging.hierarchical_model_averager": """
        HierarchicalModelAverager
    """,
    "torchestra.compat.algorithms.model_averaging.utils": """
        average_parameters average_parameters_or_parameter_groups get_params_to_average
    """,
    "torchestra.compat.autograd": """
        DistAutogradContext _current_context _get_debug_info _get_max_id _init _is_valid_context
        _new_context _release_context _retrieve_context backward context get_gradients is_available
    """,
    "torchestra.compat.device_mesh": """
        DeviceMesh init_device_mesh
    """,
    "torchestra.compat.distributed_c10d": """
        AllToAllOptions AllgatherOptions AllreduceOptions BarrierOptions BroadcastOptions
        GatherOptions ProcessGroupGloo ReduceOp ReduceOp.AVG ReduceOp.BAND ReduceOp.BOR
        ReduceOp.BXOR ReduceOp.MAX ReduceOp.MIN ReduceOp.PRODUCT ReduceOp.SUM ReduceOptions
        ReduceScatterOptions ScatterOptions _find_or_create_pg_by_ranks_and_tag
        _find_pg_by_ranks_and_tag _get_default_group _get_default_store _get_group_size_by_name
        _get_group_tag _get_process_group_store _new_group_with_tag _rank_not_in_group
        _register_builtin_comm_hook _register_comm_hook _resolve_process_group _set_pg_timeout
        _store_based_barrier _world.default_pg _world.pg_map _world.pg_names _world.pg_group_ranks
        _world.pg_backend_config _world.group_count _world.pg_to_tag _world.tags_to_pg
        _world.pg_config_info
    """,
    "torchestra.compat.nn": """
        RemoteModule _all_gather_base all_gather all_reduce all_to_all all_to_all_single broadcast
        gather reduce reduce_scatter scatter
    """,
    "torchestra.compat.nn.functional": """
        _all_gather_base all_gather all_reduce all_to_all all_to_all_single broadcast
        gather reduce reduce_scatter scatter
    """,
    "torchestra.compat.nn.api.remote_module": """
        RemoteModule _REMOTE_MODULE_PICKLED_ATTRIBUTES _RemoteModule
    """,
    "torchestra.compat.optim": """
        DistributedOptimizer PostLocalSGDOptimizer ZeroRedundancyOptimizer _FunctionalAdadelta
        _FunctionalAdagrad _FunctionalAdam _FunctionalAdamW _FunctionalAdamax _FunctionalRMSprop
        _FunctionalRprop _FunctionalSGD _apply_optimizer_in_backward _get_in_backward_optimizers
        as_functional_optim
    """,
    "torchestra.compat.optim.functional_adadelta": "_FunctionalAdadelta",
    "torchestra.compat.optim.functional_adagrad": "_FunctionalAdagrad",
    "torchestra.compat.optim.functional_adam": "_FunctionalAdam",
    "torchestra.compat.optim.functional_adamax": "_FunctionalAdamax",
    "torchestra.compat.optim.functional_adamw": "_FunctionalAdamW",
    "torchestra.compat.optim.functional_rmsprop": "_FunctionalRMSprop",
    "torchestra.compat.optim.functional_rprop": "_FunctionalRprop",
    "torchestra.compat.optim.functional_sgd": "_FunctionalSGD",
    "torchestra.compat.optim.optimizer": "DistributedOptimizer",
    "torchestra.compat.optim.utils": """
        as_functional_optim functional_optim_map register_functional_optim
    """,
    "torchestra.compat.optim.post_localSGD_optimizer": """
        PostLocalSGDOptimizer
    """,
    "torchestra.compat.optim.zero_redundancy_optimizer": """
        ZeroRedundancyOptimizer
    """,
    "torchestra.compat.rpc": """
        BackendType.TENSORPIPE PyRRef RRef RpcBackendOptions TensorPipeAgent
        TensorPipeRpcBackendOptions WorkerInfo _delete_all_user_and_unforked_owner_rrefs
        _get_current_rpc_agent _get_debug_info _init_rpc_backend _is_current_rpc_agent_set
        _rref_context_get_debug_info _set_rpc_timeout api backend_registry constants
        enable_gil_profiling functions get_rpc_timeout get_worker_info init_rpc internal is_available
        options remote rpc_async rpc_sync shutdown
    """,
    "torchestra.compat.rpc._testing": """
        FaultyTensorPipeAgent FaultyTensorPipeRpcBackendOptions faulty_agent_backend_registry is_available
    """,
    "torchestra.compat.rpc.api": """
        _all_gather _barrier _default_pickler _delete_all_user_and_unforked_owner_rrefs
        _get_current_rpc_agent _ignore_rref_leak _is_current_rpc_agent_set _require_initialized
        _thread_local_var _to_worker_info _use_rpc_pickler _wait_all _wait_all_workers
        get_worker_info remote rpc_async rpc_sync shutdown
    """,
    "torchestra.compat.rpc.backend_registry": """
        BackendType.TENSORPIPE BackendValue backend_registered construct_rpc_backend_options
        init_backend register_backend
    """,
    "torchestra.compat.rpc.constants": """
        DEFAULT_INIT_METHOD DEFAULT_NUM_WORKER_THREADS DEFAULT_RPC_TIMEOUT_SEC
        DEFAULT_SHUTDOWN_TIMEOUT UNSET_RPC_TIMEOUT
    """,
    "torchestra.compat.rpc.functions": """
        async_execution
    """,
    "torchestra.compat.rpc.internal": """
        PythonUDF RPCExecMode.ASYNC RPCExecMode.REMOTE RPCExecMode.SYNC RemoteException
        _build_rpc_profiling_key _internal_rpc_pickler deserialize serialize
    """,
    "torchestra.compat.rpc.options": """
        TensorPipeRpcBackendOptions
    """,
    "torchestra.compat.testing": """
        DistTestCases FakeStore INIT_METHOD_TEMPLATE MultiProcessTestCase MultiThreadedTestCase TEST_SKIPS
        captured_output cleanup_temp_dir create_device init_multigpu_helper
        initialize_temp_directories nccl_skip_if_lt_x_gpu require_n_gpus_for_nccl_backend
        requires_gloo requires_nccl requires_nccl_version simple_sparse_reduce_tests
        skip_if_lt_x_gpu skip_if_no_gpu skip_if_odd_worldsize skip_if_rocm_multiprocess
        skip_if_small_worldsize spawn_threads_and_init_comms verify_ddp_error_logged
        with_dist_debug_levels with_nccl_blocking_wait RpcAgentTestFixture
        TensorPipeRpcAgentTestFixture dist_init get_function_event initialize_pg noop
        tp_transports wait_until_node_failure wait_until_owners_and_forks_on_rank
        wait_until_pending_futures_and_users_flushed worker_name
    """,
    "torchestra.nn.parallel": """
        DistributedDataParallel DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    """,
}


def has(module: str, dotted: str) -> bool:
    found: object = importlib.import_module(module)
    for part in dotted.split("."):
        if part == "WORLD":  # the default group, None where there is none
            return hasattr(found, part)
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there(module: str) -> None:
    assert [name for name in NAMES[module].split() if not has(module, name)] == []


@pytest.mark.parametrize("module", [name for name in NAMES if ".compat" in name])
def test_every_name_is_offered(module: str) -> None:
    """So that `from ... import *` gets what is public, and a type checker knows all of them."""
    offered = set(importlib.import_module(module).__all__)
    names = {name.partition(".")[0] for name in NAMES[module].split()}
    assert names - offered == set()
