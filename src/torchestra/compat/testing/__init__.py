"""The helpers that tests import from PyTorch's own helpers for distributed tests.

That is, from ``torch.testing._internal.common_distributed``, ``.dist_utils``,
``.distributed.multi_threaded_pg``, ``.distributed.fake_pg`` and ``.distributed.rpc``.
"""

from __future__ import annotations

from torchestra.compat.testing import cases, conditions, environment, rpc_cases
from torchestra.compat.testing.cases import *  # noqa: F403
from torchestra.compat.testing.conditions import *  # noqa: F403
from torchestra.compat.testing.conditions import skip_if_rocm_multiprocess
from torchestra.compat.testing.environment import *  # noqa: F403
from torchestra.compat.testing.rpc_cases import *  # noqa: F403
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
    "FakeStore",
    "TestSkip",
    "requires_gloo",
    "requires_mpi",
    "requires_nccl",
    "requires_ucc",
    "requires_world_size",
    "skip_if_lt_x_gpu",
    "skip_if_no_gpu",
    "skip_if_odd_worldsize",
    "skip_if_rocm",
    "skip_if_small_worldsize",
    "spawn_threads_and_init_comms",
]
__all__ += cases.__all__
__all__ += conditions.__all__
__all__ += rpc_cases.__all__
__all__ += environment.__all__
