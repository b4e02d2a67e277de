"""Remote procedure calls: functions called on other workers, and references to values there.

``init_rpc`` makes a rank a worker, ``rpc_sync``, ``rpc_async`` and ``remote`` call functions, by the names
that torch.distributed.rpc has for them. See docs/rpc.md.
"""

from torchestra.rpc import functions, gathering, leaks
from torchestra.rpc.api import (
    debug_info,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    remote,
    rpc_async,
    rpc_sync,
    set_rpc_timeout,
)
from torchestra.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC, DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from torchestra.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from torchestra.rpc.rref import RRef
from torchestra.rpc.starting import init_rpc, shutdown
from torchestra.rpc.worker_info import WorkerInfo

__all__ = [
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
    "BackendType",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "debug_info",
    "enable_gil_profiling",
    "functions",
    "gathering",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "leaks",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
]


def is_available() -> bool:
    """Return whether RPC can be used here: always."""
    return True
