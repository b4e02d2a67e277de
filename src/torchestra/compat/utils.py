"""As ``torch.distributed.utils``, of which there is what concerns the states of modules."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from torchestra.compat.reducing import _broadcast_coalesced, _verify_params_across_processes
from torchestra.process_group import ProcessGroup

__all__ = ["_sync_module_states", "_verify_param_shape_across_processes"]


def _verify_param_shape_across_processes(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], logger: Any = None
) -> None:
    """Compare the parameters' shapes; ``logger`` is torch's. Must be called by all ranks of the group.

    Raises:
        InvalidArgumentError: on every rank, when they are not the same on all.
    """
    _verify_params_across_processes(process_group, tensors, logger)


def _sync_module_states(
    module: torch.nn.Module,
    process_group: ProcessGroup,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
) -> None:
    """Replace a module's parameters and buffers by those of rank ``src`` of the group."""
    named = [*module.named_parameters(), *(module.named_buffers() if broadcast_buffers else ())]
    states = [tensor.detach() for name, tensor in named if name not in params_and_buffers_to_ignore]
    _broadcast_coalesced(process_group, states, broadcast_bucket_size, src)
