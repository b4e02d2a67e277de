"""Hooks around the operations of a group, as ``torch.distributed.ProcessGroup`` has them since torch 2.14.

torch's dispatcher runs those of its own groups. Its calls of a group in Python do not pass it, so
:class:`TorchestraGroup` runs the hooks itself. While a group has hooks, its operations take the general path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchestra.tensors.contiguity import has_no_elements

Hook = Callable[[Any], None]

# Programs choose numbers from 0 for their hooks.
_NAN_CHECK = -1
# torch's names of the operations are those of the methods in capitals, but for these (UNKNOWN: it has none).
_NAMES = {
    "recv_anysource": "RECV",
    "allgather_into_tensor": "ALLGATHER_BASE",
    "reduce_scatter_tensor": "REDUCE_SCATTER_BASE",
    "scan": "UNKNOWN",
    "exscan": "UNKNOWN",
}
# Of those whose names begin so the first argument is the output, and the second, if there is one, the input.
_WITH_OUTPUT = ("allgather", "reduce_scatter", "alltoall", "scatter", "gather", "recv")


class OperationHooks:
    """The hooks of one group, on this rank: false while there are none.

    With ``TORCH_DIST_NAN_CHECK=1`` in the environment each group has one from the start, :func:`refuse_nan`.

    Attributes:
        before, after: the hooks by the numbers that the program has given them. Each is called with one
            argument, torch's ``PreHookArgs`` or ``PostHookArgs``; torch before 2.14 has no such classes, and
            the hook gets an object with the same attributes.
    """

    def __init__(self) -> None:
        self.before: dict[int, Hook] = {}
        self.after: dict[int, Hook] = {}
        if os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1":
            self.before[_NAN_CHECK] = refuse_nan
        self._begun = 0

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def around(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], begin: Callable[[], Any]) -> Any:
        """Begin an operation between the hooks, and return its Work.

        An exception of a hook before it ends the call, and the operation does not begin on this rank.

        Args:
            name: of torchestra's method that runs it.
            args, kwargs: its arguments.
            begin: begins it.
        """
        called = {
            "name": _operation_name(name),
            "async_op": _is_async(name, args, kwargs),
            "op_id": self._begun,
        }
        self._begun += 1
        if self.before:
            outputs, inputs = _tensors(name, args, kwargs)
            root = _root(name, args, kwargs)
            told = _told("PreHookArgs", called, input_tensors=inputs, output_tensors=outputs, root=root)
            for hook in list(self.before.values()):
                hook(told)
        work = begin()
        if self.after:
            told = _told("PostHookArgs", called, work=work)
            for hook in list(self.after.values()):
                hook(told)
        return work


def refuse_nan(told: Any) -> None:
    """Raise RuntimeError if an input of an operation has a NaN: the hook of ``TORCH_DIST_NAN_CHECK=1``."""
    for tensor in told.input_tensors:
        can_have = tensor.is_floating_point() or tensor.is_complex()
        if can_have and not has_no_elements(tensor) and _has_nan(tensor):
            raise RuntimeError(
                f"NaN found in input tensor of shape {tuple(tensor.shape)}; {told.name} has not begun on this"
                " rank (TORCH_DIST_NAN_CHECK is set)"
            )


def _has_nan(tensor: torch.Tensor) -> bool:
    values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
    return bool(torch.isnan(values).any())


def _told(kind: str, *attributes: Any, **more: Any) -> Any:
    told = getattr(c10d, kind, SimpleNamespace)()
    for each in (*attributes, more):
        for name, value in each.items():
            setattr(told, name, value)
    return told


def _operation_name(name: str) -> Any:
    torch_name = _NAMES.get(name, name.upper())
    names = getattr(c10d, "HookOpName", None)
    if names is None:
        return torch_name
    # torch 2.14 has one name for all forms of an operation: ALLGATHER for ALLGATHER_BASE too.
    words = torch_name.split("_")
    known = ("_".join(words[:number]) for number in range(len(words), 0, -1))
    return next((getattr(names, each) for each in known if hasattr(names, each)), names.UNKNOWN)


def _is_message(name: str) -> bool:
    return name in ("send", "recv", "recv_anysource")


def _options(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return next((value for value in (*args, *kwargs.values()) if hasattr(value, "asyncOp")), None)


def _is_async(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return _is_message(name) or getattr(_options(args, kwargs), "asyncOp", True)


def _root(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the root or the other rank of an operation, -1 if it has none."""
    if name in ("send", "recv"):
        return int(args[1])
    given = kwargs.get("root", getattr(_options(args, kwargs), "rootRank", -1))
    return int(given)


def _tensors(
    name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return an operation's outputs and inputs; tensors that it replaces are inputs, as torch has it."""
    words = ["output", "input"] if name.startswith(_WITH_OUTPUT) else ["input"]
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for word, value in [*zip(words, args, strict=False), *kwargs.items()]:
        (outputs if word.startswith("output") else inputs).extend(_flat(value))
    return outputs, inputs


def _flat(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument: itself, of a list, or of a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _flat(each)]
    return []
