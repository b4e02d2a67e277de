"""The names, including private ones, that programs expect of the backend of a torch group."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, NamedTuple

import torch

from torchestra.arguments.annotations import checked
from torchestra.arguments.options import GroupOptions
from torchestra.communicator.communicator import Communicator
from torchestra.engine.local import moves
from torchestra.errors import InvalidArgumentError, shown


class Device(NamedTuple):
    """Stand for a network device of torch's Gloo group; nothing depends on it."""

    hostname: str
    interface: str


def _kind_of(device: torch.device | str, name: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InvalidArgumentError(f"{name}: `device`: {str(error).splitlines()[0]}") from None


class BackendNames:
    """Serve the names of a group's CPU backend; here the backend is the group itself."""

    _Options: ClassVar[type[GroupOptions]] = GroupOptions
    communicator: Communicator

    def _get_backend(self, device: Any = None) -> Any:
        """Return the group, whichever the device."""
        return self

    @checked
    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        """Return whether :meth:`allocate_tensor` takes a device: the CPU."""
        return _kind_of(device, "supports_tensor_alloc") == "cpu"

    @checked
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return an uninitialised tensor in memory that the ranks share; if that is full, in ordinary memory.

        Operations on it copy less. Concerns this rank only.

        Raises:
            InvalidArgumentError: ``size`` is negative, or the device is not the CPU.
        """
        if size < 0 or _kind_of(device, "allocate_tensor") != "cpu":
            raise InvalidArgumentError(
                f"allocate_tensor: `size` must be 0 or more and `device` the CPU, got {shown(size)} and"
                f" {shown(device)}"
            )
        with contextlib.suppress(InvalidArgumentError):  # the memory is full
            if moves(dtype):
                return self.communicator.engine.empty((size,), dtype)
        try:
            return torch.empty(size, dtype=dtype)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"allocate_tensor: there is no memory for {shown(size)} elements of {dtype}"
            ) from error

    @staticmethod
    def create_device(hostname: str = "", interface: str = "", lazy_init: bool = False) -> Device:
        """Return an object for ``GroupOptions.devices``, where it has no effect."""
        return Device(hostname, interface)
