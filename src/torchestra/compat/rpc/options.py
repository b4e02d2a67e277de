"""As ``torch.distributed.rpc.options``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torchestra.errors import InvalidArgumentTypeError
from torchestra.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from torchestra.rpc.options import RpcBackendOptions

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """:class:`torchestra.rpc.RpcBackendOptions` by torch's arguments.

    ``_transports`` and ``_channels`` would choose TensorPipe's transports and channels, and have no effect.

    Raises:
        InvalidArgumentTypeError: the time-out is a timedelta, which torch does not take here.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        if isinstance(rpc_timeout, timedelta):
            raise InvalidArgumentTypeError(
                f"incompatible constructor arguments: rpc_timeout must be in seconds, got {rpc_timeout!r}"
            )
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
        )
