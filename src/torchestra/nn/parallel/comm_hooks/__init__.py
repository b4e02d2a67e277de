"""Hooks for ``DistributedDataParallel.register_comm_hook``: other ways to average gradients.

Each takes a state and a bucket, and returns a future of the bucket's averaged gradients. docs/comm_hooks.md
tells which is for what.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from torchestra.nn.parallel.comm_hooks import debugging_hooks as debugging
from torchestra.nn.parallel.comm_hooks import default_hooks as default
from torchestra.nn.parallel.comm_hooks import powerSGD_hook as powerSGD
from torchestra.nn.parallel.comm_hooks import quantization_hooks as quantization
from torchestra.nn.parallel.comm_hooks.interface import BuiltinCommHookType as BuiltinCommHookType
from torchestra.nn.parallel.comm_hooks.interface import CommHook, HookedModule
from torchestra.nn.parallel.comm_hooks.interface import GradBucket as GradBucket
from torchestra.world.init import AnyGroup

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


def _plain(hook: CommHook, model: HookedModule, state: Any) -> None:
    model.register_comm_hook(state, hook)


def _low_rank(
    hook: CommHook,
    rank: int,
    model: HookedModule,
    state: AnyGroup | None,
    start_powerSGD_iter: int = 1_000,
) -> None:
    settings = powerSGD.PowerSGDState(
        state, matrix_approximation_rank=rank, start_powerSGD_iter=start_powerSGD_iter
    )
    model.register_comm_hook(settings, hook)


class _Choice:
    """How a kind of hook is registered. (An Enum would take a bare function for one of its methods.)"""

    def __init__(self, register: Callable[..., None]) -> None:
        self._register = register

    def __call__(self, model: HookedModule, state: Any = None, **options: Any) -> None:
        self._register(model=model, state=state, **options)


class DDPCommHookType(Enum):
    """The ready-made hooks by name. ``DDPCommHookType.ALLREDUCE.value(model=..., state=...)`` registers one.

    The state is a group, or None for the default group, for each of them.
    """

    ALLREDUCE = _Choice(partial(_plain, default.allreduce_hook))
    FP16_COMPRESS = _Choice(partial(_plain, default.fp16_compress_hook))
    BF16_COMPRESS = _Choice(partial(_plain, default.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = _Choice(partial(_plain, quantization.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = _Choice(partial(_plain, quantization.quantization_perchannel_hook))
    POWER_SGD = _Choice(partial(_low_rank, powerSGD.powerSGD_hook, 1))
    POWER_SGD_RANK2 = _Choice(partial(_low_rank, powerSGD.powerSGD_hook, 2))
    BATCHED_POWER_SGD = _Choice(partial(_low_rank, powerSGD.batched_powerSGD_hook, 1))
    BATCHED_POWER_SGD_RANK2 = _Choice(partial(_low_rank, powerSGD.batched_powerSGD_hook, 2))
    NOOP = _Choice(partial(_plain, debugging.noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: HookedModule, state: Any = None) -> None:
    """Register a ready-made hook with a model; on every rank the same.

    Args:
        comm_hook_type: which.
        model: where.
        state: a group; None: the default group.
    """
    comm_hook_type.value(model=model, state=state)
