"""Giving functions of torch another body, so that modules which imported them before run it too.

A module that has executed ``from torch.distributed import new_group`` holds the function itself: a new value
of the name would not reach it. So the function's code is replaced. The function stays the same object with
the same signature, and the replacement receives the original function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

_PLACE = "what is called in its place"
_redirected: set[str] = set()


def _body(*args: Any, **kwargs: Any) -> Any:
    # Runs with the globals of the function it is put into, so the function it calls is a constant of its own.
    called: Any = "what is called in its place"
    return called(*args, **kwargs)


def redirect(function: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the body of a module's function, or of the one within its decorators.

    Args:
        function: the function to redirect; doing so again changes nothing.
        make: gets the original function, and returns the one to call in its place.
    """
    changed: Any = inspect.unwrap(function)
    name = f"{changed.__module__}.{changed.__qualname__}"
    if name in _redirected:
        return
    signature = inspect.signature(changed)
    original = FunctionType(
        changed.__code__, changed.__globals__, changed.__name__, changed.__defaults__, changed.__closure__
    )
    original.__kwdefaults__ = changed.__kwdefaults__
    replacement = make(original)
    code = _body.__code__
    constants = tuple(replacement if constant == _PLACE else constant for constant in code.co_consts)
    # torch.compile decides by the file whether it traces a function.
    changed.__code__ = code.replace(
        co_consts=constants,
        co_name=changed.__name__,
        co_filename=changed.__code__.co_filename,
        co_firstlineno=changed.__code__.co_firstlineno,
    )
    changed.__defaults__ = changed.__kwdefaults__ = None
    changed.__signature__ = signature
    _redirected.add(name)
