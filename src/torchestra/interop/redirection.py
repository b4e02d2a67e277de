"""Giving functions of torch another body, so that all who hold them already run it.

A module that has said ``from torch.distributed import new_group`` holds the function itself: a new value of
the name would not reach it. So what is replaced is the function's code. The function stays the same object
with the same signature, and the one that it was is handed to the replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

_PLACE = "what is called in its place"
_redirected: set[str] = set()


def _body(*args: Any, **kwargs: Any) -> Any:
    # Runs with the globals of the function that it is put into, so what it calls is a constant of its own.
    called: Any = "what is called in its place"
    return called(*args, **kwargs)


def redirect(function: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have a function of a module, or the one within its decorators, do something else.

    Args:
        function: what is called; doing it again changes nothing.
        make: is given the function as it was, and returns what is called in its place.
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
    changed.__code__ = code.replace(co_consts=constants, co_name=changed.__name__)
    changed.__defaults__ = changed.__kwdefaults__ = None
    changed.__signature__ = signature
    _redirected.add(name)
