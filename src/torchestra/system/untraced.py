"""Keeps torch.compile from tracing code that moves bytes, which it could not make faster, and fails at."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

_Callable = TypeVar("_Callable")

_FRAMES = torch._C._dynamo.eval_frame
_REASON = "it moves bytes, and changes its arguments; torchestra.functional has collectives that are traced"
_SKIPPED = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.SKIP)


def untraced(traced: _Callable) -> _Callable:
    """Keep torch.compile from tracing a function, or the methods of a class, and all that they call.

    Where a compiled function calls one, the graph breaks, and it runs as it is. Does the same as
    torch.compiler.disable, but costs no call, and does not import the compiler, which takes seconds.

    Returns:
        What was given. Base classes are not changed.
    """
    for function in vars(traced).values() if isinstance(traced, type) else (traced,):
        if isinstance(function, (classmethod, staticmethod)):
            function = function.__func__
        if isinstance(function, FunctionType):
            _untrace(function)
    return traced


def _untrace(function: Any) -> None:
    # Torch looks at the first where it traces a caller, and at the other where C++ or untraced code calls.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _REASON
    _FRAMES.set_code_exec_strategy(function.__code__, _SKIPPED)
