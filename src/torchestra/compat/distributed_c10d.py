"""As ``torch.distributed.distributed_c10d``, and ``torch._C._distributed_c10d``."""

from __future__ import annotations

from torchestra import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    BuiltinCommHookType,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    FakeStore,
    GatherOptions,
    GradBucket,
    QueueEmptyError,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
    abort_process_group,
    destroy_process_group,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_world_size,
    group,
    is_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
    process_group,
    record_comm,
    set_pg_timeout,
    shrink_group,
    supports_complex,
)
from torchestra.collectives import coalescing, functions, objects
from torchestra.collectives.coalescing import *  # noqa: F403
from torchestra.collectives.coalescing import CoalescingManager, coalescing_manager
from torchestra.collectives.functions import *  # noqa: F403
from torchestra.collectives.functions import all_gather_into_tensor, reduce_scatter_tensor
from torchestra.collectives.objects import *  # noqa: F403
from torchestra.communicator.work import WorkResult
from torchestra.compat import backends, debug_level, groups, internals, reducing, registry_view
from torchestra.compat.backends import *  # noqa: F403
from torchestra.compat.control_collectives import _ControlCollectives, _StoreCollectives
from torchestra.compat.debug_level import *  # noqa: F403
from torchestra.compat.groups import *  # noqa: F403
from torchestra.compat.internals import *  # noqa: F403
from torchestra.compat.reducing import *  # noqa: F403
from torchestra.compat.registered import DistributedBackendOptions, ProcessGroup
from torchestra.compat.registry_view import *  # noqa: F403
from torchestra.compat.rendezvous import (
    _create_store_from_options,
    register_rendezvous_handler,
    rendezvous,
)
from torchestra.compat.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from torchestra.nn.parallel import Reducer
from torchestra.process_group.reconfiguring import ReconfigureOptions
from torchestra.types import DEFAULT_TIMEOUT

ProcessGroupGloo = process_group.ProcessGroup
_DEFAULT_PG_TIMEOUT = default_pg_timeout = DEFAULT_TIMEOUT
_GLOO_AVAILABLE = True
_MPI_AVAILABLE = is_mpi_available()
_NCCL_AVAILABLE = is_nccl_available()
_UCC_AVAILABLE = is_ucc_available()
_XCCL_AVAILABLE = is_xccl_available()
_DistributedBackendOptions = DistributedBackendOptions
_CoalescingManager = CoalescingManager
_abort_process_group = abort_process_group
_all_gather_base = all_gather_into_tensor
_coalescing_manager = coalescing_manager
_reduce_scatter_base = reduce_scatter_tensor
_set_pg_timeout = set_pg_timeout
reduce_op = ReduceOp

__all__ = [
    "DEFAULT_TIMEOUT",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "_DEFAULT_PG_TIMEOUT",
    "_GLOO_AVAILABLE",
    "_MPI_AVAILABLE",
    "_NCCL_AVAILABLE",
    "_UCC_AVAILABLE",
    "_XCCL_AVAILABLE",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "BuiltinCommHookType",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FakeStore",
    "FileStore",
    "GatherOptions",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "QueueEmptyError",
    "ReconfigureOptions",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "Reducer",
    "ScatterOptions",
    "Store",
    "TCPStore",
    "Work",
    "WorkResult",
    "_CoalescingManager",
    "_ControlCollectives",
    "_DistributedBackendOptions",
    "_StoreCollectives",
    "_abort_process_group",
    "_all_gather_base",
    "_coalescing_manager",
    "_create_store_from_options",
    "_reduce_scatter_base",
    "_set_pg_timeout",
    "abort_process_group",
    "default_pg_timeout",
    "destroy_process_group",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_world_size",
    "group",
    "is_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "record_comm",
    "reduce_op",
    "register_rendezvous_handler",
    "rendezvous",
    "set_pg_timeout",
    "shrink_group",
    "supports_complex",
]
__all__ += backends.__all__
__all__ += debug_level.__all__
__all__ += groups.__all__
__all__ += internals.__all__
__all__ += reducing.__all__
__all__ += registry_view.__all__
__all__ += coalescing.__all__
__all__ += functions.__all__
__all__ += objects.__all__
