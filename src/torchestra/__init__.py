"""Torchestra: distributed PyTorch in plain Python. ``import torchestra as dist``."""

from torchestra.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    empty,
    full,
    gather,
    ones,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    zeros,
)
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    GroupDestroyedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotInitializedError,
    RankFailedError,
    StoreTimeoutError,
)
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from torchestra.types import ReduceOp
from torchestra.work import Work
from torchestra.world import (
    GroupMember,
    destroy_process_group,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
)

__version__ = "0.1.0"
