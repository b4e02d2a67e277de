"""Hooks that average as DistributedDataParallel does, in full or in half precision."""

from __future__ import annotations

from typing import Any

import torch

from torchestra.collectives.functions import all_reduce
from torchestra.nn.parallel.comm_hooks.interface import BuiltinCommHookType, CommHook, GradBucket
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.world.init import AnyGroup, member_group

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]


def member(group: AnyGroup | None) -> ProcessGroup:
    """Return the group that a hook was given (None: the default group); this rank must be in it."""
    return member_group(group, "communication hook")


def average(group: ProcessGroup, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Begin to replace the tensor by its average over the ranks; the future holds the tensor.

    Half types are added up in float32, so that a sum cannot overflow where the average does not.
    """
    work = all_reduce(tensor, ReduceOp.AVG, group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def allreduce_hook(process_group: AnyGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as without a hook; a hook to start from, or to compare others with.

    Args:
        process_group: the hook's state; None: the default group.
        bucket: this rank's gradients.
    """
    return average(member(process_group), bucket.buffer())


def fp16_compress_hook(
    process_group: AnyGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in float16: half the bytes of float32, 11 bits of precision, numbers up to 65,504.

    Larger gradients become infinite; bfloat16 has no such limit, and 8 bits of precision.
    """
    return average_in(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: AnyGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in bfloat16: half the bytes of float32, 8 bits of precision, float32's range."""
    return average_in(torch.bfloat16, process_group, bucket)


BUILTIN_HOOKS: dict[BuiltinCommHookType, CommHook] = {
    BuiltinCommHookType.ALLREDUCE: allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: fp16_compress_hook,
}


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that passes ``hook`` the gradients in float16, and casts its result back."""
    return _in(torch.float16, hook)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that passes ``hook`` the gradients in bfloat16, and casts its result back."""
    return _in(torch.bfloat16, hook)


def average_in(
    dtype: torch.dtype, process_group: AnyGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in this dtype."""
    buffer = bucket.buffer()
    future = average(member(process_group), buffer.to(dtype))
    return future.then(lambda averaged: buffer.copy_(averaged.value()))


def _in(dtype: torch.dtype, hook: CommHook) -> CommHook:
    def wrapped(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))

        def restore(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            buffer.copy_(future.value())
            bucket.set_buffer(buffer)
            return buffer

        return hook(state, bucket).then(restore)

    return wrapped
