"""The numbers of the remote calls."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
UNSET_RPC_TIMEOUT: float = -1.0  # the time-out that the worker has, see get_rpc_timeout()
DEFAULT_SHUTDOWN_TIMEOUT: float = 0.0  # none
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_MAX_WORKER_THREADS: int = 1024
