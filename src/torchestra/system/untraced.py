"""Keeps torch.compile from tracing code that moves bytes, which it could not make faster, and fails at."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

_Callable = TypeVar("_Callable")


def _find_skip() -> Callable[[CodeType], None]:
    """Return what keeps the compiler from looking at frames of some code, and at those that they call."""
    frames = torch._C._dynamo.eval_frame
    try:
        skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        set_strategy = frames.set_code_exec_strategy
    except AttributeError:  # a version of torch that we do not know
        return lambda code: None
    return lambda code: set_strategy(code, skipped)


_skip = _find_skip()
_REASON = "it moves bytes, and changes its arguments; torchestra.functional has collectives that are traced"


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
    _skip(function.__code__)
