"""Hooks that update parameters with a ZeroRedundancyOptimizer while backward goes on.

Until the model's buckets are final, which takes two steps, or three with a static graph, the hooks average
gradients and nothing is updated; from then on every step updates all parameters before backward returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.comm_hooks.interface import (
    CommHook,
    GradBucket,
    HookedModule,
    put_averages,
    wait_for_hook,
)
from torchestra.optim.overlap import OverlapPlan
from torchestra.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: CommHook, ddp: HookedModule, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Return a hook that averages by ``hook``, and updates parameters when the last gradient was computed.

    Backward's thread updates parameters bucket by bucket, while the group's thread averages later buckets and
    sends updated parameters. For slow communication.

    Args:
        hook: averages the gradients.
        ddp: the model to register the returned hook with.
        zero: updates the model's parameters; constructed with ``overlap_with_ddp=True``.
        shard_buckets: cut buckets, so that the ranks' shares are more equal.

    Raises:
        InvalidArgumentError: ``zero`` was constructed without ``overlap_with_ddp=True``.
    """
    plan, buckets_are_final = _set_up(ddp, zero, shard_buckets)
    waiting: list[tuple[GradBucket, torch.futures.Future[torch.Tensor]]] = []

    def average_then_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not bucket.index():
            waiting.clear()  # of a step that has failed
        averaged = hook(state, bucket)
        if not plan.record(bucket.index(), bucket.parameters(), buckets_are_final()):
            return averaged
        waiting.append((bucket, averaged))
        if bucket.is_last():
            works: list[Work] = []
            complete, waiting[:] = list(waiting), ()
            for each, future in complete:
                timeout_s = zero.process_group.communicator.timeout_s
                put_averages(each, wait_for_hook(future, each.buffer(), timeout_s))
                plan.update(each.index(), each.gradients())
                works += plan.exchange(each.index(), async_op=True)
            for work in works:
                work.wait()
        return averaged

    return average_then_step


def hook_with_zero_step_interleaved(
    hook: CommHook, ddp: HookedModule, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> CommHook:
    """Return a hook that averages by ``hook``, and updates each bucket as soon as it is averaged.

    The group's thread does both, while backward computes further gradients. For fast communication. Arguments
    and errors are those of :func:`hook_with_zero_step`.
    """
    plan, buckets_are_final = _set_up(ddp, zero, shard_buckets)

    def average_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged = hook(state, bucket)
        if not plan.record(bucket.index(), bucket.parameters(), buckets_are_final()):
            return averaged

        def step(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            averages = future.value()
            put_averages(bucket, averages)
            plan.update(bucket.index(), bucket.gradients())
            # As a callback of the bucket's own operation this comes before those that were queued later.
            plan.exchange(bucket.index(), async_op=False)
            return averages

        return averaged.then(step)

    return average_and_step


def _set_up(
    ddp: HookedModule, zero: ZeroRedundancyOptimizer, shard_buckets: bool
) -> tuple[OverlapPlan, Callable[[], bool]]:
    """Return the optimizer's plan, and a function that returns whether the model's buckets are final."""
    if zero.overlap is None:
        raise InvalidArgumentError(
            "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook"
            " properly"
        )
    zero.overlap.shard_buckets = shard_buckets
    ddp._rebuild_too(zero)
    # The model holds the hook, which must not keep it alive.
    model = weakref.ref(ddp)

    def buckets_are_final() -> bool:
        return (wrapper := model()) is not None and wrapper._buckets_are_final()

    return zero.overlap, buckets_are_final
