"""What torch has at a group's backend, private names among it, which much code uses."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torchestra.arguments.options import GroupOptions


class Device(NamedTuple):
    """What stands for a network device of torch's Gloo group, where nothing depends on one."""

    hostname: str
    interface: str


class BackendNames:
    """What torch finds at a group's backend for the CPU, which here is the group itself."""

    _Options: ClassVar[type[GroupOptions]] = GroupOptions

    def _get_backend(self, device: Any = None) -> Any:
        """The group: it serves every device that it serves at all."""
        return self

    @staticmethod
    def create_device(hostname: str = "", interface: str = "", lazy_init: bool = False) -> Device:
        """Something to put into ``GroupOptions.devices``, where it has no effect."""
        return Device(hostname, interface)
