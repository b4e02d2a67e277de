"""Computes in a lower precision than the one in which parameters are kept and updated.

During forward a parameter's data is a copy in ``param_dtype``. When its gradient is ready, a hook restores
the parameter's own data and casts the gradient to its dtype, before the reducer sees it; parameters that get
no gradient are restored at the end of backward. So buckets, averages, optimizers and ``state_dict`` are not
affected.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchestra.nn.parallel.comm_hooks.default_hooks import average_in
from torchestra.nn.parallel.comm_hooks.interface import CommHook, GradBucket
from torchestra.nn.parallel.outputs import tensors_in
from torchestra.process_group import ProcessGroup


@dataclass
class MixedPrecision:
    """The dtypes that DistributedDataParallel computes and averages in. Only floating-point tensors are cast.

    Attributes:
        param_dtype: of parameters and inputs in forward and backward; None: not cast.
        reduce_dtype: of gradients while they are averaged; None: ``param_dtype``, or not cast.
        buffer_dtype: of buffers, from construction on; None: not cast.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class LowPrecision:
    """Puts a module's parameters into a lower precision and back.

    Args:
        config: the dtypes.
        module: its buffers are cast now, its parameters in every forward.
        ignored: the names of parameters and buffers that are not cast.
    """

    def __init__(self, config: MixedPrecision, module: torch.nn.Module, ignored: Collection[str]) -> None:
        self._dtype = config.param_dtype
        self._parameters: list[Any] = []
        for name, buffer in module.named_buffers():
            if name not in ignored and config.buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)
        if self._dtype is None:
            return
        for name, parameter in module.named_parameters():
            if name in ignored or not parameter.is_floating_point():
                continue
            if hasattr(parameter, "_fp_param"):
                _raise(parameter)  # a step of another wrapper may have failed in between
            self._parameters.append(parameter)
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = parameter.data.to(self._dtype)  # type: ignore[attr-defined]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_raise)

    def lower(self, inputs: Any) -> Any:
        """Lower the parameters before a forward; return the inputs, lowered too."""
        if self._dtype is None:
            return inputs
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            low = parameter._mp_param = parameter._fp_param.to(self._dtype)
            parameter.data = low
            if gradient is not None:
                parameter.grad = gradient.to(self._dtype)
        return tree_map(self._cast, inputs)

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self._dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def after(self, outputs: Any) -> None:
        """Restore the parameters at the end of this forward's backward, or now if it has none."""
        found = [each for each in tensors_in(outputs) if each.grad_fn is not None]
        if not found:
            self.restore()
        for output in found:
            output.register_hook(self._raise_at_the_end)

    def _raise_at_the_end(self, _: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.restore)

    def restore(self) -> None:
        """Restore the own data of all parameters."""
        for parameter in self._parameters:
            _raise(parameter)


def _raise(parameter: Any) -> None:
    if parameter.dtype is parameter._fp_param.dtype:
        return
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter._fp_param
    if gradient is not None:
        parameter.grad = gradient.to(parameter.dtype)


def reduce_in(dtype: torch.dtype) -> CommHook:
    """Return a hook that averages floating-point gradients in this dtype. Its state is the group."""

    def hook(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        return average_in(dtype if buffer.is_floating_point() else buffer.dtype, group, bucket)

    return hook
