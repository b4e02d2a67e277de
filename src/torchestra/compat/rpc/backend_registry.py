"""As ``torch.distributed.rpc.backend_registry``: TENSORPIPE is torchestra's own engine."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from torchestra.compat.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from torchestra.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from torchestra.errors import InvalidArgumentTypeError, RpcError
from torchestra.rpc import starting
from torchestra.store import Store

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """The functions that make a backend's options and agents."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init(
    store: Store | None, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> None:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise InvalidArgumentTypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    rpc_backend_options.store = store
    starting.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options)


_known = {"TENSORPIPE": BackendValue(_options, _init)}


def _enum() -> Any:
    make: Any = enum.Enum
    return make("BackendType", _known)


BackendType: Any = _enum()


def backend_registered(backend_name: str) -> bool:
    """Return whether there is a backend of that name."""
    return backend_name in _known


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Register a backend; return its member of :data:`BackendType`, which becomes a new enum.

    Raises:
        RpcError: there is already one of that name.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    _known[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _enum()
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return the options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a backend's agent."""
    return backend.value.init_backend_handler(*args, **kwargs)
