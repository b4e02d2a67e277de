"""Checks of DistributedDataParallel's arguments, before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchestra.engine.local import moves, reduces
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.process_group import ProcessGroup
from torchestra.sharded.tensor import ShardedTensor
from torchestra.tensors.contiguity import TENSORS, contiguity_problem, has_no_elements
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup, member_group

NAME = "DistributedDataParallel"
_DEVICES = ("cpu", "cuda")


def choose_group(process_group: AnyGroup | None, device_mesh: Any) -> ProcessGroup:
    """Return the given group, the group of a one-dimensional mesh, or the default group.

    Raises:
        InvalidArgumentError: both are given, the mesh has more dimensions, or this rank is not in the group.
    """
    if process_group is not None and device_mesh is not None:
        raise InvalidArgumentError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise InvalidArgumentError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        process_group = device_mesh.get_group(mesh_dim=0)
    return member_group(process_group, f"{NAME}: `process_group`")


def choose_devices(
    device_ids: Sequence[Any] | None, output_device: Any, dim: int, parameters: Sequence[torch.Tensor]
) -> tuple[torch.device | None, torch.device | None]:
    """Return the device to move inputs to (None: do not move them), and the nominal one of outputs.

    Raises:
        InvalidArgumentError: devices are named though the module is not on one GPU, or is on another; or
            there is something to scatter.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise InvalidArgumentError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    if (device_ids or output_device is not None) and {each.type for each in devices} != {"cuda"}:
        raise InvalidArgumentError(
            f"{NAME} device_ids and output_device arguments only work with single-device/multiple-device GPU"
            f" modules or CPU modules, but got device_ids {device_ids}, output_device {output_device}, and"
            f" module parameters {set(map(str, devices))}: leave both None for modules on the CPU"
        )
    device = _cuda(device_ids[0]) if device_ids else None
    if device is not None and devices != {device}:
        raise InvalidArgumentError(
            f"{NAME}: device_ids names {device}, but the module's parameters are on"
            f" {sorted(map(str, devices))}; move the module there first, or leave device_ids None"
        )
    if dim != 0:
        raise InvalidArgumentError(
            f"{NAME}: `dim` must be 0 (a rank has one device, so nothing is scattered), got {dim!r}"
        )
    return device, device if output_device is None else _cuda(output_device)


def _cuda(device: Any) -> torch.device:
    """Return a GPU by its index, or as torch.device names it."""
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return named if named.index is not None else torch.device(named.type, torch.cuda.current_device())


def bucket_limits(
    cap_mb: float | None, cap_mb_list: Sequence[float] | None, first_bytes: int, default_mb: float
) -> list[int]:
    """Return the sizes at which buckets are closed, in bytes; the last holds for all further ones.

    Raises:
        InvalidArgumentError: one is not a positive number.
    """
    names = [("bucket_cap_mb", cap_mb)] if cap_mb is not None else []
    if cap_mb_list is not None:
        names = [("bucket_cap_mb_list", each) for each in cap_mb_list]
    for name, each in names:
        if isinstance(each, bool) or not isinstance(each, (int, float)) or not each > 0:
            raise InvalidArgumentError(f"{NAME}: `{name}` must be a positive number, got {each!r}")
    limits = [int(each * (1 << 20)) for _, each in names if each is not None]
    if cap_mb_list is None:
        cap = limits[0] if limits else int(default_mb * (1 << 20))
        return [min(first_bytes, cap), cap]
    if not limits:
        raise InvalidArgumentError(f"{NAME}: `bucket_cap_mb_list` must have at least one number, got []")
    return limits


def warn_of_check_reduction(check_reduction: bool) -> None:
    """Warn if an argument is given that has no effect."""
    if check_reduction:
        text = "`check_reduction` has no effect: reductions always end, whatever is unused"
        warnings.warn(text, FutureWarning, stacklevel=3)


def check_is_module(module: object) -> None:
    """Refuse anything but a module."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentTypeError(
            f"{NAME}: `module` must be a torch.nn.Module, got {type(module).__name__}"
        )


def ignored_names(module: torch.nn.Module) -> set[str]:
    """Return the names of parameters and buffers to ignore: those the module names, and sharded tensors."""
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    said: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return {*said, *(name for name, tensor in named if isinstance(tensor, ShardedTensor))}


def check_delayed(
    named: Sequence[tuple[str, torch.nn.Parameter]] | None, trigger: torch.nn.Parameter | None
) -> dict[str, torch.Tensor]:
    """Return the parameters that are averaged together later, by name.

    Raises:
        InvalidArgumentError: only one of the two arguments is given.
    """
    if (named is None) != (trigger is None):
        raise InvalidArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    return dict(named or ())


def check_not_all_delayed(
    module: torch.nn.Module, ignored: Collection[str], delayed: Collection[str]
) -> None:
    """Refuse mixed precision where the gradients of all parameters are averaged together later.

    Raises:
        InvalidArgumentError: they are.
    """
    named = module.named_parameters()
    if delayed and not any(each.requires_grad for name, each in named if name not in ignored):
        raise InvalidArgumentError(
            f"{NAME}: `mixed_precision` is for parameters that are not in delay_all_reduce_named_params, and"
            " all are; leave one of the two arguments out"
        )


def check_module(
    module: torch.nn.Module, ignored: Collection[str], group: ProcessGroup, *, may_be_empty: bool = False
) -> None:
    """Refuse modules whose state cannot be sent, or whose gradients cannot be averaged.

    Args:
        ignored: the names of parameters and buffers that are not checked.
        may_be_empty: accept a module of which no parameter requires a gradient.

    Raises:
        InvalidArgumentError: it is one; the message says which parameter or buffer is wrong, and why.
    """
    trained = False
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in ignored:
            continue
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"Modules with uninitialized parameters can't be used with `{NAME}`. `{name}` is not"
                " initialized yet; run a forward pass through the module first"
            )
        if tensor.device.type not in _DEVICES or tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{NAME}: `{name}` is on device {tensor.device} with layout {tensor.layout}, and only dense"
                " tensors on the CPU or a GPU (cuda) are served"
            )
        if not moves(tensor.dtype):
            raise InvalidArgumentError(f"{NAME}: `{name}` has dtype {tensor.dtype}, which cannot be sent")
        # Of other classes a tensor may have its elements elsewhere, as a DTensor has.
        is_looked_at = tensor.__class__ in TENSORS or has_no_elements(tensor)
        if is_looked_at and (problem := contiguity_problem(tensor)):
            raise InvalidArgumentError(f"{NAME}: `{name}` {problem}")
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            trained = True
            if not reduces(tensor.dtype, ReduceOp.AVG):
                raise InvalidArgumentError(
                    f"{NAME}: `{name}` has dtype {tensor.dtype}, whose gradients cannot be averaged"
                )
    if not trained and not may_be_empty:
        raise InvalidArgumentError(
            f"{NAME} is not needed when a module doesn't have any parameter that requires a gradient."
        )
