"""The names, including private ones, that programs expect of the backend of a torch group."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torchestra.arguments.options import GroupOptions


class Device(NamedTuple):
    """Stand for a network device of torch's Gloo group; nothing depends on it."""

    hostname: str
    interface: str


class BackendNames:
    """Serve the names of a group's CPU backend; here the backend is the group itself."""

    _Options: ClassVar[type[GroupOptions]] = GroupOptions

    def _get_backend(self, device: Any = None) -> Any:
        """Return the group, whichever the device."""
        return self

    @staticmethod
    def create_device(hostname: str = "", interface: str = "", lazy_init: bool = False) -> Device:
        """Return an object for ``GroupOptions.devices``, where it has no effect."""
        return Device(hostname, interface)
