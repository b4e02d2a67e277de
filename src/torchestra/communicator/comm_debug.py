"""torch's CommDebugMode, a context manager that counts collectives, is told of torchestra's.

It counts the operators of torch.distributed that pass torch's dispatcher. Ours are told in two ways:

* functional collectives pass the dispatcher as operators of torchestra. A mode that is on learns these
  (:func:`add_operators`) before they are called, and counts them by the names of torch's.
* collectives that change their tensors do not pass it. In their place a mode gets an operator that does
  nothing (:func:`count`), which has the name of torch's. While a mode is on, they go the general way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OPERATORS = {
    "all_gather": "allgather_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_reduce": "allreduce_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "broadcast": "broadcast_",
    "gather": "gather_",
    "reduce": "reduce_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "scatter": "scatter_",
}
_inside: ContextVar[bool] = ContextVar("torchestra_counted", default=False)
_MODULE = "torch.distributed.tensor.debug._comm_mode"

modes_on = torch._C._len_torch_dispatch_stack
"""Returns how many dispatch modes of any kind are on in this thread: mostly none, so it is asked first."""


def _modes() -> list[Any]:
    """Return the CommDebugModes that are on in this thread."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return []
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, module.CommDebugMode)]


def is_watched() -> bool:
    """Return whether a CommDebugMode is on in this thread."""
    return bool(_modes())


def add_operators(operators: Any) -> None:
    """Have the modes that are on count functional collectives.

    Args:
        operators: a namespace of operators. Those of the names that torch's functional collectives have are
            counted as these.
    """
    for mode in _modes():
        counted_as: dict[Any, Any] = sys.modules[_MODULE].NATIVE_TO_PY_MAPPING
        for torchs in set(counted_as.values()):
            if (ours := getattr(operators, torchs.__name__, None)) is not None:
                counted_as[ours] = torchs
                mode.comm_registry.add(ours)


class _Operator:
    """An operator of torch.distributed that does nothing, for a mode to be called with."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the operation runs elsewhere."""

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def count(name: str) -> None:
    """Have the modes that are on count a collective of a group, unless it is part of one that is counted.

    Args:
        name: of torch's operator for it, in ``torch.ops.c10d``.
    """
    if _inside.get():
        return
    for mode in _modes():
        mode.__torch_dispatch__(_Operator(name), ())


def count_collective(name: str) -> None:
    """:func:`count` a collective of the table of operations, by its name there."""
    if (operator := _OPERATORS.get(name)) is not None:
        count(operator)


@contextlib.contextmanager
def counted_as(name: str | None) -> Iterator[None]:
    """Have the modes count what the block does as one collective, if it succeeds; or None, not at all."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)
    if name is not None:
        count(name)


def as_one(name: str) -> Callable[[_Function], _Function]:
    """Have the modes count a function's collectives as one, by the name of torch's operator for it."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not modes_on():
                return function(*args, **kwargs)
            with counted_as(name):
                return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate
