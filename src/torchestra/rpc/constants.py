"""The default time-outs of remote calls."""

from __future__ import annotations

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
"""How long a call may take by default, in seconds."""

UNSET_RPC_TIMEOUT: float = -1.0
"""As a time-out: use the worker's default, see :func:`get_rpc_timeout`."""

DEFAULT_SHUTDOWN_TIMEOUT: float = 0.0
"""How long :func:`shutdown` waits for the other workers by default, in seconds; 0: as long as it takes."""

DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_MAX_WORKER_THREADS: int = 1024
DEFAULT_HEARTBEAT_SEC: float = 30.0
