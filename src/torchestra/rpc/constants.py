"""The numbers of the remote calls."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
"""How long a call may take when nothing else is said, in seconds."""

UNSET_RPC_TIMEOUT: float = -1.0
"""Given as a time-out: the one that the worker has, see :func:`get_rpc_timeout`."""

DEFAULT_SHUTDOWN_TIMEOUT: float = 0.0
"""How long :func:`shutdown` waits for the other workers when nothing else is said; 0: as long as it takes."""

DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_MAX_WORKER_THREADS: int = 1024
DEFAULT_HEARTBEAT_SEC: float = 30.0
