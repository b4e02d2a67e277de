"""The functions of distributed autograd: context, backward, get_gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import torch

from torchestra.autograd.contexts import Context, contexts_of
from torchestra.errors import InvalidArgumentTypeError, RpcError
from torchestra.rpc.current import agent_or_none, current_agent
from torchestra.rpc.thread_state import thread_state


class context:
    """A distributed autograd context. A ``with`` statement gets its number.

    It records this thread's calls to other workers, and the calls that these make in turn. At the end, also
    after an error, it is released on all of them.

    Raises:
        RpcError: this rank is not a worker, or the thread is in a context already.
    """

    def __enter__(self) -> int:
        self._context = new_context()
        return self._context.context_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        release_context(self._context.context_id)


def new_context() -> Context:
    """Return a new context, in which this thread is until it is released.

    Raises:
        RpcError: this rank is not a worker, or the thread is in a context already.
    """
    contexts = contexts_of(current_agent())
    before = _context_of_thread()
    if before is not None:
        raise RpcError(
            f"Already have an autograd context id for this thread: {before.context_id}. A context cannot be"
            " within another one"
        )
    context = thread_state.scope = contexts.new()
    return context


def release_context(context_id: int) -> None:
    """End a context on all workers that know it; if this thread is in it, it leaves it."""
    scope = cast("Context | None", thread_state.scope)
    if scope is not None and scope.context_id == context_id:
        scope.contexts.release(context_id)
        thread_state.scope = None
    elif (agent := agent_or_none()) is not None:
        contexts_of(agent).release(context_id)


def _context_of_thread() -> Context | None:
    scope = cast("Context | None", thread_state.scope)
    return None if scope is None or scope.released else scope


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of some scalars, on all workers that took part.

    They are added to those of the context, which :func:`get_gradients` returns, on each worker for its own
    parameters. No parameter's ``.grad`` changes. Every node of autograd runs once, however many messages lead
    to it. Passes within one context that begin on one worker run one after the other.

    Args:
        context_id: the number of the context.
        roots: tensors with one element, with a graph.
        retain_graph: keep the graph for further passes. If False, the messages so far take no part in these.

    Raises:
        InvalidArgumentTypeError: an argument is of another type.
        RpcError: there is no such context on this worker.
        BackwardError: a root is not as described, or an error happened in the pass, on any worker; the
            message names the worker and has the traceback, and the cause is the error itself where it can be
            rebuilt.
        WorkerFailedError: a worker has failed or left.
        RpcTimeoutError: a worker has waited for another one longer than the timeout of calls.
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
    contexts_of(current_agent()).backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of this worker's parameters in a context, by parameter.

    Raises:
        RpcError: there is no such context on this worker.
    """
    return contexts_of(current_agent()).get(context_id).gradients.all()


def current_context() -> Context:
    """Return the context that this thread is in.

    Raises:
        RpcError: this thread is in none.
    """
    context_of_thread = _context_of_thread()
    if context_of_thread is None:
        raise RpcError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using:"
            " `with torchestra.autograd.context() as context_id`"
        )
    return context_of_thread


def is_available() -> bool:
    """Return whether distributed autograd can be used here: always."""
    return True


def debug_info() -> dict[str, Any]:
    """Return how many contexts and running backward passes this worker has, by torch.distributed's names."""
    return {name: str(count) for name, count in contexts_of(current_agent()).counts().items()}
