"""Communication hooks: a program's own way to average a bucket of gradients."""

from __future__ import annotations

import enum
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torchestra.errors import (
    CollectiveTimeoutError,
    GradientReductionError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
)
from torchestra.nn.parallel.buckets import views_of

CommHook = Callable[[Any, "GradBucket"], "torch.futures.Future[torch.Tensor]"]
"""``hook(state, bucket)`` returns a future of a tensor with the averages, laid out as the bucket's buffer."""


class GradBucket:
    """Gradients of some parameters, one after the other in one tensor, as a communication hook gets them.

    They are this rank's gradients, not divided by the number of ranks.
    """

    __slots__ = ("_buffer", "_index", "_is_last", "_parameters")

    def __init__(
        self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """Return its position in the order of reduction. Buckets may change after the first step."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the gradients in one dimension; for a parameter with sparse gradients, its gradient."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter: views of the buffer."""
        if self._buffer.layout is not torch.strided:
            return [self._buffer]
        return views_of(self._buffer, self._parameters)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of these gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether it is the last bucket of this backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Make :meth:`buffer` and :meth:`gradients` return this tensor, and views of it, from now on."""
        self._buffer = buffer

    def __repr__(self) -> str:
        last = ", the last" if self._is_last else ""
        return f"<GradBucket {self._index}{last}: {len(self._parameters)} parameters, {self._buffer.dtype}>"


def put_averages(bucket: GradBucket, averaged: torch.Tensor) -> None:
    """Copy the averages into the bucket, unless the hook has put them there."""
    if averaged.data_ptr() != bucket.buffer().data_ptr():
        bucket.buffer().copy_(averaged.view(-1))


class HookedModule(Protocol):
    """The part of a DistributedDataParallel that a hook may use."""

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let a hook average."""

    def _buckets_are_final(self) -> bool:
        """Return whether the buckets will be the same in all further steps."""

    def _rebuild_too(self, optimizer: Any) -> None:
        """Rebuild an optimizer too when the wrapper is rebuilt."""


class BuiltinCommHookType(enum.Enum):
    """Hooks that need no state: plain averaging, and averaging in float16."""

    ALLREDUCE = 0
    FP16_COMPRESS = 1


def check_comm_hook(hook: object) -> None:
    """Refuse anything that cannot be a communication hook.

    Raises:
        InvalidArgumentTypeError: it cannot be called.
        InvalidArgumentError: it does not take a state and a bucket, or is annotated otherwise.
    """
    if not callable(hook):
        raise InvalidArgumentTypeError(f"Communication hook must be callable. Got {hook!r}")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError):
        signature = inspect.signature(hook)
    taken = list(signature.parameters.values())
    bucket = signature.parameters.get("bucket") or (taken[1] if len(taken) > 1 else None)
    if bucket is None and not any(each.kind is each.VAR_POSITIONAL for each in taken):
        raise InvalidArgumentError(
            f"Communication hook: must take a state and a bucket, but {hook!r} takes {signature}"
        )
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, Any, GradBucket):
        raise InvalidArgumentError(
            "Communication hook: bucket annotation should be dist.GradBucket."
            f" Got {bucket.annotation!r} (torchestra.GradBucket is meant)"
        )
    returned = signature.return_annotation
    future = torch.futures.Future
    if returned not in (inspect.Signature.empty, Any, future, future[torch.Tensor]):
        raise InvalidArgumentError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
            f" Got {returned!r}"
        )


def run_comm_hook(hook: CommHook, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call a hook.

    Raises:
        GradientReductionError: the hook has not returned a future.
    """
    future = hook(state, bucket)
    # `then` returns an instance of the base class only.
    if not isinstance(future, torch._C.Future):
        raise GradientReductionError(
            "DDP communication hook's callback must return a torch.futures.Future object, but got"
            f" {type(future).__name__}"
        )
    return future


def await_future(future: torch.futures.Future[Any], timeout_s: float) -> Any:
    """Wait for a future; return its value, or raise its error.

    Raises:
        CollectiveTimeoutError: it is not done in time.
    """
    # Future.wait() cannot be interrupted, and has no timeout.
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        deadline = time.monotonic() + timeout_s
        while not done.wait(0.05):
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"the future of a communication hook is not done after {timeout_s:.1f} s"
                )
    return future.wait()


def wait_for_hook(
    future: torch.futures.Future[torch.Tensor], expected: torch.Tensor, timeout_s: float
) -> torch.Tensor:
    """Wait for a hook's future, and check its value.

    Args:
        expected: a tensor with the layout and number of elements that the value must have.

    Raises:
        CollectiveTimeoutError: the future is not done in time.
        GradientReductionError: the value is not such a tensor.
    """
    result: object = await_future(future, timeout_s)
    if not isinstance(result, torch.Tensor):
        raise GradientReductionError(
            f"the future of a communication hook must hold a tensor, got {type(result).__name__}; after"
            " an operation of a group, take it from the list: future.then(lambda done: done.value()[0])"
        )
    if result.layout is not expected.layout or result.numel() != expected.numel():
        raise GradientReductionError(
            f"the future of a communication hook must hold {expected.numel()} elements with layout"
            f" {expected.layout}, like the bucket's buffer, got {result.numel()} with {result.layout}"
        )
    return result
