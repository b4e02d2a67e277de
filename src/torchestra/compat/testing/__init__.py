"""What tests take from PyTorch's own helpers for distributed tests.

That is, from ``torch.testing._internal.common_distributed``, ``.distributed.multi_threaded_pg`` and
``.distributed.fake_pg``.
"""

from __future__ import annotations

from torchestra.compat.testing.cases import (
    MultiProcessTestCase,
    MultiThreadedTestCase,
    TestCase,
)
from torchestra.compat.testing.conditions import (
    DistTestCases,
    at_least_x_gpu,
    import_transformers_or_skip,
    nccl_skip_if_lt_x_gpu,
    require_n_gpus_for_nccl_backend,
    requires_nccl_version,
    skip_if_rocm_multiprocess,
    skip_if_win32,
)
from torchestra.compat.testing.surroundings import (
    TIMEOUT_DEFAULT,
    TIMEOUT_OVERRIDE,
    captured_output,
    cleanup_temp_dir,
    create_device,
    create_tcp_store,
    get_timeout,
    init_multigpu_helper,
    initialize_temp_directories,
    run_subtests,
    simple_sparse_reduce_tests,
    verify_ddp_error_logged,
    with_dist_debug_levels,
    with_nccl_blocking_wait,
)
from torchestra.store import FakeStore
from torchestra.testing import (
    TEST_SKIPS,
    TestSkip,
    requires_gloo,
    requires_mpi,
    requires_nccl,
    requires_ucc,
    requires_world_size,
    skip_if_lt_x_gpu,
    skip_if_no_gpu,
    skip_if_odd_worldsize,
    skip_if_small_worldsize,
    spawn_threads_and_init_comms,
)

skip_if_rocm = skip_if_rocm_multiprocess

__all__ = [
    "TEST_SKIPS",
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "DistTestCases",
    "FakeStore",
    "MultiProcessTestCase",
    "MultiThreadedTestCase",
    "TestCase",
    "TestSkip",
    "at_least_x_gpu",
    "captured_output",
    "cleanup_temp_dir",
    "create_device",
    "create_tcp_store",
    "get_timeout",
    "import_transformers_or_skip",
    "init_multigpu_helper",
    "initialize_temp_directories",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
    "requires_gloo",
    "requires_mpi",
    "requires_nccl",
    "requires_nccl_version",
    "requires_ucc",
    "requires_world_size",
    "run_subtests",
    "simple_sparse_reduce_tests",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_odd_worldsize",
    "skip_if_rocm",
    "skip_if_rocm_multiprocess",
    "skip_if_small_worldsize",
    "skip_if_win32",
    "spawn_threads_and_init_comms",
    "verify_ddp_error_logged",
    "with_dist_debug_levels",
    "with_nccl_blocking_wait",
]
