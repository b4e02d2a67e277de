"""Keeps torch.compile from tracing code that moves bytes, which it could not make faster, and fails at."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

_Callable = TypeVar("_Callable")

_FRAMES = torch._C._dynamo.eval_frame
_REASON = "it moves bytes, and changes its arguments; torchestra.functional has collectives that are traced"
_SKIPPED = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.SKIP)


def untraced(given: _Callable, inlined: Callable[..., Any] | None = None) -> _Callable:
    """Keep torch.compile from tracing a function, or the methods of a class, and all that they call.

    Where a compiled function calls one, the graph breaks, and it runs as it is. Does the same as
    torch.compiler.disable, but costs no call, and does not import the compiler, which takes seconds.

    Args:
        inlined: a function that is traced there in place of a function.

    Returns:
        What was given. Base classes are not changed.
    """
    for function in vars(given).values() if isinstance(given, type) else (given,):
        if isinstance(function, (classmethod, staticmethod)):
            function = function.__func__
        if isinstance(function, FunctionType):
            _untrace(function, inlined)
    return given


def _untrace(function: Any, inlined: Callable[..., Any] | None) -> None:
    # Torch looks at the attributes where it traces a caller, at the strategy where other code calls.
    if inlined is None:
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = _REASON
    else:
        function._torchdynamo_inline = inlined
    _FRAMES.set_code_exec_strategy(function.__code__, _SKIPPED)
