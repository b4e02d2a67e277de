"""torch's functions for buckets of gradients and states of modules and optimizers, with its arguments."""

from __future__ import annotations

import io
from collections.abc import Container, Sequence
from typing import Any

import torch

from torchestra.collectives.objects import broadcast_object_list
from torchestra.nn.parallel import (
    BuiltinCommHookType,
    Reducer,
    compute_bucket_assignment_by_size,
)
from torchestra.nn.parallel.agreement import check_agreement
from torchestra.nn.parallel.buckets import FIRST_BUCKET_BYTES
from torchestra.nn.parallel.coalesced import broadcast_coalesced
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.world.init import get_rank

__all__ = [
    "_DEFAULT_FIRST_BUCKET_BYTES",
    "_broadcast_coalesced",
    "_compute_bucket_assignment_by_size",
    "_make_nccl_premul_sum",
    "_register_builtin_comm_hook",
    "_register_comm_hook",
    "_sync_module_states",
    "_verify_param_shape_across_processes",
    "_verify_params_across_processes",
]

_DEFAULT_FIRST_BUCKET_BYTES = FIRST_BUCKET_BYTES


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[torch.Tensor], buffer_size: int, src: int = 0
) -> None:
    """Replace tensors by those of rank ``src`` of the group, ``buffer_size`` bytes at a time."""
    broadcast_coalesced(tensors, process_group, src, buffer_size)


def _broadcast_object(
    obj: Any, src_rank: int, group: ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Any:
    """Return an object of global rank ``src_rank``, whose tensors are put on a device on the other ranks.

    All ranks of the group must call this; the object counts on the source only, which gets it back. (It is of
    torch's ZeroRedundancyOptimizer.)
    """
    buffer = io.BytesIO()
    if get_rank() == src_rank:
        torch.save(obj, buffer)
    told = [buffer.getvalue()]
    broadcast_object_list(told, src_rank, group)
    if get_rank() == src_rank:
        return obj
    return torch.load(io.BytesIO(told[0]), map_location=device, weights_only=False)


def _compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    bucket_size: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
    logger: Any = None,
) -> tuple[list[list[int]], list[int]]:
    """Return each bucket's indices and size limit. ``logger`` is torch's, and ignored."""
    return compute_bucket_assignment_by_size(tensors, bucket_size, expect_sparse_gradient, tensor_indices)


def _make_nccl_premul_sum(factor: float | torch.Tensor) -> ReduceOp:
    """Return a sum in which this rank's values are multiplied by a factor first."""
    return ReduceOp.premul_sum(float(factor))


def _register_comm_hook(reducer: Reducer, state: Any, comm_hook: Any) -> None:
    """Make a reducer average its buckets by a hook."""
    reducer.register_comm_hook(state, comm_hook)


def _register_builtin_comm_hook(reducer: Reducer, comm_hook_type: BuiltinCommHookType) -> None:
    """Make a reducer average its buckets by a built-in hook."""
    reducer.register_builtin_comm_hook(comm_hook_type)


def _verify_params_across_processes(
    process_group: ProcessGroup, params: Sequence[torch.Tensor], logger: Any = None
) -> None:
    """Compare the parameters' shapes. All ranks of the group must call this.

    Raises:
        InvalidArgumentError: on every rank, if they are not the same on all.
    """
    mine = [
        (f"parameter {index}", f"{str(tensor.dtype)[6:]} {list(tensor.shape)}")
        for index, tensor in enumerate(params)
    ]
    check_agreement(mine, process_group)


_verify_param_shape_across_processes = _verify_params_across_processes


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
