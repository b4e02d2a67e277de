"""As ``torch.distributed.rpc._testing.faulty_agent_backend_registry``: the backend FAULTY_TENSORPIPE."""

from __future__ import annotations

from typing import Any

from torchestra.compat.rpc import backend_registry
from torchestra.compat.rpc._testing.options import FaultyTensorPipeRpcBackendOptions
from torchestra.errors import InvalidArgumentTypeError
from torchestra.store import Store

__all__ = ["FaultyTensorPipeRpcBackendOptions"]


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init(store: Store | None, rpc_backend_options: Any, **worker: Any) -> None:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise InvalidArgumentTypeError(
            f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}"
        )
    backend_registry.init_backend(
        backend_registry.BackendType["TENSORPIPE"],
        store=store,
        rpc_backend_options=rpc_backend_options,
        **worker,
    )


backend_registry.register_backend("FAULTY_TENSORPIPE", _options, _init)
