"""Hooks for ``DistributedDataParallel.register_comm_hook``: other ways to average gradients.

Each takes a state and a bucket, and returns a future of the bucket's averaged gradients. docs/comm_hooks.md
describes when to use which.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torchestra.errors import InvalidArgumentTypeError
from torchestra.nn.parallel.comm_hooks import debugging_hooks as debugging
from torchestra.nn.parallel.comm_hooks import default_hooks as default
from torchestra.nn.parallel.comm_hooks import powerSGD_hook as powerSGD
from torchestra.nn.parallel.comm_hooks import quantization_hooks as quantization
from torchestra.nn.parallel.comm_hooks.interface import BuiltinCommHookType as BuiltinCommHookType
from torchestra.nn.parallel.comm_hooks.interface import CommHook as CommHook
from torchestra.nn.parallel.comm_hooks.interface import GradBucket as GradBucket
from torchestra.nn.parallel.comm_hooks.interface import HookedModule

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


class _Registration:
    """Registers a hook with a model. (An Enum would take a bare function for one of its methods.)

    Args:
        hook: the hook; its state is a group.
        rank: of the approximation, for a PowerSGD hook, whose state is made from the group and options.
    """

    def __init__(self, hook: Callable[..., Any], rank: int | None = None) -> None:
        self._hook = hook
        self._rank = rank

    def __call__(self, model: HookedModule, state: Any = None, **options: Any) -> None:
        if self._rank is not None:
            state = powerSGD.PowerSGDState(state, matrix_approximation_rank=self._rank, **options)
        elif options:
            raise InvalidArgumentTypeError(f"{self._hook.__name__} takes no options, got {sorted(options)}")
        model.register_comm_hook(state, self._hook)


class DDPCommHookType(Enum):
    """The ready-made hooks by name. ``DDPCommHookType.ALLREDUCE.value(model=..., state=...)`` registers one.

    The state is a group, or None for the default group, for each of them.
    """

    ALLREDUCE = _Registration(default.allreduce_hook)
    FP16_COMPRESS = _Registration(default.fp16_compress_hook)
    BF16_COMPRESS = _Registration(default.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _Registration(quantization.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Registration(quantization.quantization_perchannel_hook)
    POWER_SGD = _Registration(powerSGD.powerSGD_hook, 1)
    POWER_SGD_RANK2 = _Registration(powerSGD.powerSGD_hook, 2)
    BATCHED_POWER_SGD = _Registration(powerSGD.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = _Registration(powerSGD.batched_powerSGD_hook, 2)
    NOOP = _Registration(debugging.noop_hook)


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: HookedModule, state: Any = None) -> None:
    """Register a ready-made hook with a model. All ranks must register the same one.

    Args:
        comm_hook_type: the hook.
        model: the model, which averages by the hook.
        state: a group; None: the default group.
    """
    comm_hook_type.value(model=model, state=state)
