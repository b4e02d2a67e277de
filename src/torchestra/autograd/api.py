"""context, backward, get_gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from torchestra.autograd.contexts import Context
from torchestra.errors import BackwardError, InvalidArgumentTypeError, RpcError
from torchestra.rpc.current import agent_or_none, current_agent
from torchestra.rpc.thread_state import here

_POLL_SECONDS = 0.1


class context:
    """A distributed autograd context, as the value of a ``with`` statement its number.

    What this thread calls within it on other workers is recorded, and what they call in turn. At the end,
    also after an error, it is released on all of them.

    Raises:
        RpcError: this rank is no worker, or the thread is in a context already.
    """

    def __enter__(self) -> int:
        self._context = new_context()
        return self._context.number

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        release_context(self._context.number)


def new_context() -> Context:
    """A context that this thread is in from now on, until it is released.

    Raises:
        RpcError: this rank is no worker, or the thread is in a context already.
    """
    agent = current_agent()
    if here.context is not None and not here.context.released:
        raise RpcError(
            f"Already have an autograd context id for this thread: {here.context.number}. A context cannot be"
            " within another one"
        )
    here.context = agent.contexts.new()
    return here.context


def release_context(number: int) -> None:
    """End a context on all workers that know it; also this thread's being in it."""
    if here.context is not None and here.context.number == number:
        here.context.contexts.release(number)
        here.context = None
        return
    agent = agent_or_none()
    if agent is not None:
        agent.contexts.release(number)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of some scalars, on all workers that have taken part in them.

    They are added to those of the context: :func:`get_gradients` has them, on each worker those of its own
    parameters. ``.grad`` of no parameter changes. Every node of autograd runs once, whatever number of
    messages lead to it. Passes within one context that begin on one worker run one after the other.

    Args:
        context_id: the number of the context.
        roots: tensors with one element, with a graph.
        retain_graph: keep the graph for further passes. If not, the messages so far take no part in these.

    Raises:
        InvalidArgumentTypeError: an argument is of another type.
        RpcError: there is no such context on this worker.
        BackwardError: a root is not as described, or an error happened in the pass, on any worker; the
            message names the worker and has the traceback, the cause is the error itself where it can be
            rebuilt.
        WorkerFailedError: a worker is gone.
        RpcTimeoutError: a worker has waited for another one longer than calls may take.
    """
    if (
        isinstance(context_id, bool)
        or not isinstance(context_id, int)
        or not isinstance(roots, (list, tuple))
        or not all(isinstance(root, torch.Tensor) for root in roots)
    ):
        raise InvalidArgumentTypeError(
            "backward(): incompatible function arguments: expected (context_id: int, roots: list of tensors,"
            f" retain_graph: bool = False), got ({context_id!r}, {type(roots).__name__} ...)"
        )
    found = current_agent().contexts.get(context_id)
    _check_roots(roots)
    if torch._C._autograd._profiler_enabled():
        with torch.autograd.profiler.record_function("torch::distributed::autograd::backward"):
            _run(found, roots, retain_graph)
    else:
        _run(found, roots, retain_graph)


def _run(found: Context, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
    key = found.contexts.new_pass()
    while not found.turn.acquire(timeout=_POLL_SECONDS):
        pass
    try:
        part = found.take_part(key, bool(retain_graph), key[0])
        if part is None:
            raise found.contexts.not_found(found.number)
        part.run_at_origin(roots)
    finally:
        found.turn.release()


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise BackwardError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not root.requires_grad:
            raise BackwardError(f"requires_grad not set on root {number}")
        if root.numel() != 1:
            raise BackwardError(
                f"Root {number} is not a scalar, all roots need to be scalar; its shape is"
                f" {tuple(root.shape)}"
            )
        if root.grad_fn is None:
            raise BackwardError(f"Root {number} does not have a valid gradient function.")


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this worker's parameters in a context, by parameter.

    Raises:
        RpcError: there is no such context on this worker.
    """
    return current_agent().contexts.get(context_id).gradients.all()


def current_context() -> Context:
    """The context that this thread is in.

    Raises:
        RpcError: it is in none.
    """
    if here.context is None or here.context.released:
        raise RpcError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using:"
            " `with torchestra.autograd.context() as context_id`"
        )
    return here.context


def is_available() -> bool:
    """Whether distributed autograd can be used here: always."""
    return True


def debug_info() -> dict[str, Any]:
    """How many contexts and running backward passes this worker has, by torch.distributed's names."""
    return {name: str(number) for name, number in current_agent().contexts.counts().items()}
