"""Keeps torch.compile from tracing the code around a module, which it could not make faster."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function, and everything it calls.

    Does the same as torch.compiler.disable, but does not import the compiler, which takes seconds, in
    programs that have not done so.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(function))
        return (disabled[0] if disabled else function)(*arguments, **options)

    return cast(_Function, call)
