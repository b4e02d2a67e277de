"""What a function can say about how it is to be called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["async_execution", "is_async"]

F = TypeVar("F", bound=Callable[..., Any])
MARK = "_wrapped_async_rpc_function"
_TAKES_AGENT = "_torchestra_takes_agent"


def async_execution(fn: F) -> F:
    """Mark a function that returns a ``torch.futures.Future``: the caller gets the future's value.

    No thread of the worker waits for the future. With ``@staticmethod`` and ``@classmethod`` this must be
    the inner decorator, with ``torch.jit.script`` the outer one.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper  # type: ignore[return-value]


def takes_agent(fn: F) -> F:
    """Mark a function of the package: the agent that performs a call of it passes itself first.

    So what workers tell each other needs no global to find the worker that has been told.
    """
    setattr(fn, _TAKES_AGENT, True)
    return fn


def is_given_agent(fn: object) -> bool:
    """Whether a function is marked by :func:`takes_agent`."""
    return getattr(fn, _TAKES_AGENT, None) is True


def is_async(fn: object) -> bool:
    """Whether a function, or a bound method of it, is marked."""
    return hasattr(fn, MARK)
