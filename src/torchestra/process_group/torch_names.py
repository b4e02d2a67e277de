"""torch's other names for methods of a group, private ones among them, which much code uses."""

from __future__ import annotations

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
