"""Private functions and constants of torch's distributed_c10d that libraries use."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from torchestra.compat.backends import Backend, get_backend
from torchestra.compat.registry_view import _world
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, shown
from torchestra.process_group import ProcessGroup
from torchestra.types import DEFAULT_TIMEOUT
from torchestra.world.init import AnyGroup, default_group, member_group

__all__ = [
    "PG_WRAPPER_STORE_PREFIX",
    "STORE_BASED_BARRIER_PREFIX",
    "ErrorType",
    "_check_valid_timeout",
    "_device_capability",
    "_get_default_timeout",
    "_get_object_coll_device",
    "_get_pg_default_device",
    "_group_or_default_group",
    "_object_to_tensor",
    "_pg_backend_config",
    "_pg_group_ranks",
    "_pg_map",
    "_pg_names",
    "_pg_to_tag",
    "_tags_to_pg",
    "_tensor_to_object",
]

PG_WRAPPER_STORE_PREFIX = "pg_wrapper"
STORE_BASED_BARRIER_PREFIX = "store_based_barrier_key"


class ErrorType(enum.IntEnum):
    """The kind of error that torch's groups have met."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


class _View(Mapping[Any, Any]):
    """One of the tables of :class:`_World`, computed at every access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _table(self) -> dict[Any, Any]:
        table: dict[Any, Any] = getattr(_world, self._name)
        return table

    def __getitem__(self, key: Any) -> Any:
        return self._table()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())

    def __repr__(self) -> str:
        return repr(self._table())


_pg_map = _View("pg_map")
_pg_names = _View("pg_names")
_pg_group_ranks = _View("pg_group_ranks")
_pg_backend_config = _View("pg_backend_config")
_pg_to_tag = _View("pg_to_tag")
_tags_to_pg = _View("tags_to_pg")


def _group_or_default_group(group: ProcessGroup | None = None) -> ProcessGroup:
    """Return the group, or the default group."""
    return default_group() if group is None else group


def _get_pg_default_device(group: AnyGroup | None = None) -> torch.device:
    """Return the device whose tensors a group is for: the CPU."""
    member_group(group, "_get_pg_default_device")
    return torch.device("cpu")


def _get_object_coll_device(group: AnyGroup | None = None) -> str:
    """Return the kind of device that objects pass through: the CPU."""
    member_group(group, "_get_object_coll_device")
    return "cpu"


def _device_capability(group: AnyGroup | None = None) -> list[str]:
    """Return the kinds of devices whose tensors a group takes."""
    found = member_group(group, "_device_capability")
    return Backend.backend_capability.get(get_backend(found), ["cpu"])


def _get_default_timeout(backend: str) -> timedelta:
    """Return how long operations may take by default."""
    if not isinstance(backend, str):
        raise InvalidArgumentTypeError(f"_get_default_timeout: `backend` must be a str, got {shown(backend)}")
    return DEFAULT_TIMEOUT


def _check_valid_timeout(timeout: Any) -> None:
    """Refuse a time-out that is not a timedelta.

    Raises:
        TypeError: it is not a timedelta.
    """
    if not isinstance(timeout, timedelta):
        raise InvalidArgumentTypeError(
            f"Expected timeout argument to be of type datetime.timedelta, got {timeout}"
        )


def _object_to_tensor(obj: Any, device: Any, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an object's pickle as a tensor of bytes, and its length as a tensor of one element."""
    file = io.BytesIO()
    pickle.Pickler(file).dump(obj)
    data = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8).to(device)
    return data, torch.tensor([data.numel()], dtype=torch.long, device=device)


def _tensor_to_object(tensor: torch.Tensor, tensor_size: Any, group: Any = None) -> Any:
    """Return the object whose pickle the first ``tensor_size`` bytes of a tensor are."""
    size = int(tensor_size)
    if not 0 < size <= tensor.numel():
        raise InvalidArgumentError(f"an object of {size} bytes in a tensor of {tensor.numel()} bytes")
    return pickle.loads(tensor.cpu().numpy().tobytes()[:size])
