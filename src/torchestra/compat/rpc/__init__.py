"""As ``torch.distributed.rpc``."""

from __future__ import annotations

from typing import Any

from torchestra import autograd
from torchestra import rpc as _rpc
from torchestra.compat.rendezvous import rendezvous
from torchestra.compat.rpc import api, backend_registry, constants, functions, internal, options
from torchestra.compat.rpc.agents import RpcAgent, TensorPipeAgent
from torchestra.compat.rpc.api import *  # noqa: F403
from torchestra.compat.rpc.api import _is_current_rpc_agent_set
from torchestra.compat.rpc.backend_registry import BackendType
from torchestra.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from torchestra.errors import InvalidArgumentTypeError, RpcError
from torchestra.rpc import enable_gil_profiling, is_available
from torchestra.rpc.constants import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from torchestra.rpc.constants import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from torchestra.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC
from torchestra.rpc.constants import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT
from torchestra.rpc.profiling import server_process_profile as _server_process_global_profile
from torchestra.store import Store

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "BackendType",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "_get_debug_info",
    "_init_rpc_backend",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_rpc_timeout",
    "api",
    "backend_registry",
    "constants",
    "enable_gil_profiling",
    "functions",
    "init_rpc",
    "internal",
    "is_available",
    "options",
]
__all__ += api.__all__

_set_rpc_timeout = _rpc.set_rpc_timeout


def _of_options(options: RpcBackendOptions) -> Any:
    """Return the backend that takes options of this class."""
    for backend in backend_registry.BackendType:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(backend))):
            return backend
    raise InvalidArgumentTypeError(f"Could not infer backend for options {options}")


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Call :func:`torchestra.rpc.init_rpc`, with a backend of the registry: TENSORPIPE is our own engine.

    Raises:
        InvalidArgumentTypeError: ``backend`` is no backend, the options are none, or the two do not match.
    """
    # Its enum may be an older one, from before another backend was registered.
    if backend is not None and not isinstance(getattr(backend, "value", None), backend_registry.BackendValue):
        raise InvalidArgumentTypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise InvalidArgumentTypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions"
        )
    if backend is None:
        backend = (
            backend_registry.BackendType["TENSORPIPE"]
            if rpc_backend_options is None
            else _of_options(rpc_backend_options)
        )
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    store = None
    if backend.name != "TENSORPIPE":
        method = rpc_backend_options.init_method or constants.DEFAULT_INIT_METHOD
        store, rank, world_size = next(iter(rendezvous(method, rank, world_size or -1)))
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _init_rpc_backend(
    backend: Any = BackendType["TENSORPIPE"],
    store: Store | None = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Call :func:`init_rpc` over a store.

    Raises:
        RpcError: this rank is a worker already; or the backend is not our own, and has made an agent.
    """
    if _is_current_rpc_agent_set():
        raise RpcError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    if agent is not None:
        api._set_and_start_rpc_agent(agent)


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return the counts of remote references."""
    return {name: count for name, count in _rpc.debug_info().items() if not name.startswith("agent.")}


def _get_debug_info() -> dict[str, str]:
    """Return all counts of this worker."""
    return {**_rpc.debug_info(), **autograd.debug_info()}
