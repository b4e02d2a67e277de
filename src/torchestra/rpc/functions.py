"""Marks of functions: how calls of them are executed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
MARK = "_wrapped_async_rpc_function"


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


def is_async(fn: object) -> bool:
    """Return whether a function, or a bound method of it, is marked by :func:`async_execution`."""
    return hasattr(fn, MARK)
