"""Makes a RemoteModule callable by TorchScript, with methods typed like its interface's ``forward``.

A script cannot make a remote call, but it can call Python (``torch.jit.ignore``). So ``forward`` begins its
call and ends it in Python. ``forward_async`` begins it on the caller's thread, whose autograd context counts,
and has ``torch.jit.fork`` end it on another thread, which makes a future of the right type.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from torchestra.errors import InvalidArgumentError

NOT_PICKLED = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"

TargetFuture = Future[Any]
"""Says where calls go. A script module cannot hold Python objects, but a finished future can hold any."""

Begin = Callable[[Any, tuple[Any, ...]], Future[Any]]
"""Begins a call, given the target and the arguments."""

_SOURCE = """
def forward_async(self, {typed}) -> _Future[_Result]:
    if not torch.jit.is_scripting():
        return _begin(self._target_future.value(), ({names}))
    return torch.jit.fork(_end, self._target_future, _begin_for_script(self._target_future, {names}))

def forward(self, {typed}) -> _Result:
    return _end(self._target_future, _begin_for_script(self._target_future, {names}))

def _begin_for_script(_target_future: _TargetFuture, {typed}) -> int:
    return _keep(_begin(_target_future.value(), ({names})))

def _end(_target_future: _TargetFuture, _number: int) -> _Result:
    return _begun.pop(_number).wait()

def __getstate__(self) -> int:
    raise RuntimeError({not_pickled!r})

def __setstate__(self, state: int) -> None:
    raise RuntimeError({not_pickled!r})
"""
_METHODS = ("forward_async", "forward", "__getstate__", "__setstate__")
_NOT_SENT = "Passing a script RemoteModule over RPC is not supported."

_numbers = itertools.count()
_begun: dict[int, Future[Any]] = {}


def target_future(target: Any) -> TargetFuture:
    """Return a completed future that holds the target of calls: a reference to the module, and its device."""
    future: TargetFuture = Future()
    future.set_result(target)
    return future


def _keep(call: Future[Any]) -> int:
    """Keep a call that was begun until it is ended; return its number."""
    number = next(_numbers)
    _begun[number] = call
    return number


@functools.cache
def scripted_methods(interface: type, begin: Begin) -> dict[str, Callable[..., Any]]:
    """Make the methods of a module that is called by an interface; they use its attribute ``_target_future``.

    Args:
        interface: a class made by ``torch.jit.interface``, with a method ``forward``.

    Raises:
        InvalidArgumentError: it is not an interface, or has no ``forward``.
    """
    forward = getattr(interface, "forward", None)
    if not getattr(interface, "__torch_script_interface__", False) or forward is None:
        raise InvalidArgumentError(
            "Expect a TorchScript class interface decorated by @torch.jit.interface, with a method forward;"
            f" got {interface!r}"
        )
    hints = typing.get_type_hints(forward)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    namespace: dict[str, Any] = {
        "__name__": __name__,
        "torch": torch,
        "_Future": Future,
        "_TargetFuture": TargetFuture,
        "_Result": hints.get("return", torch.Tensor),
        "_begin": begin,
        "_begun": _begun,
        "_keep": _keep,
    }
    typed = []
    for index, parameter in enumerate(parameters):
        namespace[f"_Type{index}"] = hints.get(parameter.name, torch.Tensor)
        text = f"{parameter.name}: _Type{index}"
        if parameter.default is not parameter.empty:
            namespace[f"_default{index}"] = parameter.default
            text += f" = _default{index}"
        typed.append(text)
    source = _SOURCE.format(
        typed=", ".join(typed),
        names="".join(f"{parameter.name}, " for parameter in parameters),
        not_pickled=f"{NOT_PICKLED}. {_NOT_SENT}",
    )
    # TorchScript compiles the source text.
    file = f"<methods of a RemoteModule by {interface.__module__}.{interface.__qualname__}, {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    for name in ("_begin_for_script", "_end"):
        namespace[name] = torch.jit.ignore(namespace[name])
    return {name: torch.jit.export(namespace[name]) for name in _METHODS}
