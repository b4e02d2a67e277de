"""Functions and modules of torch.jit in messages: functions are sent by name, modules as they are."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch._jit_internal import _qualified_name
from torch.jit._script import RecursiveScriptModule
from torch.jit._state import _python_cu

from torchestra.errors import RpcError
from torchestra.rpc.messages import register_reducer


def _reduce_function(function: Any) -> Any:
    return _function, (_qualified_name(function),)


def _function(name: str) -> Any:
    function = _python_cu.find_function(name)
    if function is None:
        raise AttributeError(f"no script function {name!r} has been compiled here")
    return function


def _reduce_module(module: torch.jit.ScriptModule) -> Any:
    file = io.BytesIO()
    try:
        torch.jit.save(module, file)
    except torch.jit.Error as error:  # raised by the module's own __getstate__
        raise RpcError(f"a script module cannot be sent: {error}") from error
    return _module, (file.getvalue(),)


def _module(text: bytes) -> Any:
    return torch.jit.load(io.BytesIO(text))


def register() -> None:
    """Make calls of this process send functions and modules this way."""
    register_reducer(torch.jit.ScriptFunction, _reduce_function)
    register_reducer(RecursiveScriptModule, _reduce_module)
