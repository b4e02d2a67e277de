"""torch's other names for methods of a group, private ones among them, which much code uses."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torchestra.arguments.options import GroupOptions
from torchestra.process_group.moving_methods import MovingMethods
from torchestra.process_group.reducing_methods import ReducingMethods


class TorchNames(ReducingMethods, MovingMethods):
    """Each name does what the method does that it stands for."""

    _allgather_base = MovingMethods.allgather_into_tensor
    all_gather_single = MovingMethods.allgather_into_tensor
    all_gather_single_coalesced = MovingMethods.allgather_into_tensor_coalesced
    all_to_all_single = MovingMethods.alltoall_base
    _reduce_scatter_base = ReducingMethods.reduce_scatter_tensor
    reduce_scatter_single = ReducingMethods.reduce_scatter_tensor
    reduce_scatter_single_coalesced = ReducingMethods.reduce_scatter_tensor_coalesced


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
