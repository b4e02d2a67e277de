"""The options of a worker: :class:`RpcBackendOptions`, and the one backend there is."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError
from torchestra.rpc.constants import (
    DEFAULT_HEARTBEAT_SEC,
    DEFAULT_INIT_METHOD,
    DEFAULT_MAX_WORKER_THREADS,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    UNSET_RPC_TIMEOUT,
)
from torchestra.types import timeout_seconds


class BackendType(enum.Enum):
    """How messages are sent; both names mean: in shared memory within a host, by ZeroMQ between hosts."""

    NATIVE = "native"
    TENSORPIPE = NATIVE


@checked_methods
class RpcBackendOptions:
    """Options of :func:`init_rpc`.

    Args:
        rpc_timeout: how long a call may take that is given no time-out of its own; seconds, 0 for no limit.
        init_method: where the workers meet, as for ``init_process_group``.
        num_worker_threads: how many idle threads are kept.
        max_worker_threads: the largest number of threads: calls that come while so many are at work,
            or wait for calls of their own, have to wait.
        device_maps, devices: refused; only CPU tensors are sent.
        store: meet over this store instead of at ``init_method``.
        secret: as for ``init_process_group``.
        address: where this host listens for workers on other hosts, and how they reach it; default: what the
            environment variable TORCHESTRA_RPC_ADDRESS says, else the address of the interface that leads to
            the store's server.
        ports: the first and the last port that it may listen at; default: what TORCHESTRA_RPC_PORTS says
            (``29600-29700``), else any.
        heartbeat_timeout: after how many seconds of silence a worker on another host is given up.

    Raises:
        InvalidArgumentError: a number is out of range, or a device is named.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float | timedelta = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str | None = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        max_worker_threads: int = DEFAULT_MAX_WORKER_THREADS,
        store: Any = None,
        secret: Any = None,
        address: str | None = None,
        ports: tuple[int, int] | None = None,
        heartbeat_timeout: float = DEFAULT_HEARTBEAT_SEC,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        if num_worker_threads < 1 or max_worker_threads < 3:
            raise InvalidArgumentError(
                "num_worker_threads must be at least 1 and max_worker_threads at least 3, got"
                f" {num_worker_threads} and {max_worker_threads}"
            )
        self.num_worker_threads = num_worker_threads
        self.max_worker_threads = max_worker_threads
        self.device_maps: dict[str, Any] = {}
        self.devices: list[Any] = []
        for worker, mapping in (device_maps or {}).items():
            self.set_device_map(worker, mapping)
        self.set_devices(devices or ())
        self.store = store
        self.secret = secret
        self.address = address
        if ports is not None and not 0 < ports[0] <= ports[1] < 65536:
            raise InvalidArgumentError(
                f"ports must be the first and the last, as in (29600, 29700); got {ports}"
            )
        self.ports = ports
        if not heartbeat_timeout > 0:
            raise InvalidArgumentError(f"heartbeat_timeout must be above 0, got {heartbeat_timeout}")
        self.heartbeat_timeout = float(heartbeat_timeout)

    @property
    def rpc_timeout(self) -> float:
        """Return the default time-out of calls, in seconds; 0 for no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float | timedelta) -> None:
        self._rpc_timeout = timeout_seconds(seconds, "RpcBackendOptions", "rpc_timeout")

    @property
    def _agent_class(self) -> Any:
        """Return the class of the worker that ``init_rpc`` makes; None for Agent."""
        return None

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Refuse every map, except one that names the CPU only.

        Raises:
            InvalidArgumentError: the map names another device.
        """
        for device in (*device_map.keys(), *device_map.values()):
            _check_cpu(f"device_maps[{to!r}]", device)

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Refuse every device, except the CPU.

        Raises:
            InvalidArgumentError: another device is named.
        """
        for device in devices:
            _check_cpu("devices", device)


TensorPipeRpcBackendOptions = RpcBackendOptions


def call_timeout(timeout: float | timedelta, name: str) -> float:
    """Return the time-out of a call in seconds, 0 for none; -1, for the worker's default, is left as it is.

    Raises:
        InvalidArgumentError: it is no number, negative or too large.
    """
    if timeout.__class__ in (int, float) and timeout == UNSET_RPC_TIMEOUT:
        return UNSET_RPC_TIMEOUT
    return timeout_seconds(timeout, name)


def _check_cpu(argument: str, device: Any) -> None:
    if str(device) != "cpu":
        raise InvalidArgumentError(
            f"{argument} names device {device!r}, but only CPU tensors are sent: move tensors to the CPU in"
            " the functions that are called, and back"
        )
