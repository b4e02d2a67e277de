"""Moving the memory of existing or new tensors to memory that the ranks of a group share.

A tensor is moved by giving the same object other memory (``tensor.data = …``): parameters stay the objects
that optimizers and modules know, with their gradients, hooks and places in graphs. All tensors that share a
storage are moved together, and keep sharing. A tensor outside of the set to be moved would keep the old
memory, and no longer change with the others; the number of a storage's users reveals one, and then nothing is
moved.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from torchestra.arguments.annotations import checked
from torchestra.collectives.shared_tensors import sharing_engine
from torchestra.engine.interface import Engine
from torchestra.engine.layout import align
from torchestra.errors import InvalidArgumentError
from torchestra.tensors import checks
from torchestra.tensors.contiguity import TENSORS, contiguity_problem, span
from torchestra.world.init import AnyGroup

__all__ = ["share_", "share_module_", "use_shared_allocator"]

_ALIGNMENT = 64
"""Alignment in bytes of the moved part of a storage, so that elements of every dtype stay aligned."""

_Module = TypeVar("_Module", bound=torch.nn.Module)


class _Move(NamedTuple):
    """A part of a storage to be moved: the bytes from ``start`` to ``stop``, with these tensors."""

    storage: torch.UntypedStorage
    tensors: list[torch.Tensor]
    start: int
    stop: int


@checked
def share_(tensor: torch.Tensor, group: AnyGroup | None = None) -> torch.Tensor:
    """Move a tensor to memory that the ranks of a group share; any rank may call it alone.

    Collectives of this group then make no intermediate copies, as for :func:`torchestra.empty`. The elements
    are copied once. The tensor, which may be a leaf or a Parameter, stays the same object with the same
    shape, strides and place in graphs. A tensor that is already in shared memory does not change.

    It stays valid after the group is destroyed, and its memory is free when nothing refers to it any more. It
    cannot be resized. A copy of it, pickled or not, has ordinary memory. A process that is forked sees the
    same memory, not a copy.

    Returns:
        The tensor.

    Raises:
        InvalidArgumentError: nothing was moved, because this rank is not in the group, the group's memory is
            full, the tensor is not a dense one of the CPU with memory of its own, or something else uses its
            memory: a view, a NumPy array, a process.
    """
    _move({"tensor": tensor}, sharing_engine(group, "share_"), "share_")
    return tensor


@checked
def share_module_(module: _Module, group: AnyGroup | None = None) -> _Module:
    """Move a module's parameters, buffers and gradients as :func:`share_` does; all of them, or none.

    Tensors that share memory, like tied weights, go on sharing it. Call it before anything refers to parts of
    them: for example, before taking a state dict or building a graph.

    Returns:
        The module.

    Raises:
        InvalidArgumentError: as of :func:`share_`; names the tensor.
    """
    name = "share_module_"
    tensors: dict[str, torch.Tensor] = {}
    for key, parameter in module.named_parameters():
        tensors[key] = parameter
        if parameter.grad is not None:
            tensors[f"{key}.grad"] = parameter.grad
    tensors.update(module.named_buffers())
    _move(tensors, sharing_engine(group, name), name)
    return module


class use_shared_allocator(TorchFunctionMode):
    """A context in which tensors that the calling thread makes lie in memory that the group's ranks share.

    ``with dist.use_shared_allocator(): model = Net()``. These are the tensors of torch's functions that make
    new ones (``empty``, ``zeros``, ``rand``, ``tensor``, ``arange``, ``…_like``, ``new_…``, ``clone``, …), so
    also a module's parameters; but not results of computations, gradients, tensors loaded from files, or made
    by ``torch.Tensor(2, 3)``. All tensors are as after :func:`share_`. Every function of torch is slower in
    the context, so use it for set-up only.

    When the group's memory is full, tensors have ordinary memory, and a warning says so, once.
    """

    @checked
    def __init__(self, group: AnyGroup | None = None) -> None:
        super().__init__()
        self._engine = sharing_engine(group, "use_shared_allocator")
        self._warned = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and move the tensor that it has made."""
        given = dict(kwargs or {})
        made = func(*args, **given)
        if func in _MAKERS and given.get("out") is None and isinstance(made, torch.Tensor):
            self._move(made, keep=func not in _UNINITIALISED)
        return made

    def _move(self, tensor: torch.Tensor, *, keep: bool) -> None:
        if _problem(tensor, self._engine) != "":
            return
        try:
            _move({"tensor": tensor}, self._engine, "use_shared_allocator", keep=keep)
        except InvalidArgumentError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"{error}: tensors have ordinary memory", RuntimeWarning, stacklevel=4)


def _named(owner: object, names: str) -> set[Any]:
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


_UNINITIALISED = _named(torch, "empty empty_like empty_strided empty_permuted") | _named(
    torch.Tensor, "new_empty new_empty_strided"
)
_MAKERS = (
    _UNINITIALISED
    | _named(torch, "zeros zeros_like ones ones_like full full_like rand rand_like randn randn_like randint")
    | _named(torch, "randint_like randperm normal tensor scalar_tensor arange linspace logspace eye clone")
    | _named(torch.Tensor, "new_zeros new_ones new_full new_tensor clone")
)
"""Functions that return a tensor with memory of its own, and which of them leave it uninitialised."""


def _move(tensors: Mapping[str, torch.Tensor], engine: Engine, name: str, *, keep: bool = True) -> None:
    """Move tensors, given by their names for errors; all or none.

    Args:
        keep: whether to keep their elements.
    """
    if engine.is_fake or engine.delegates:
        return  # these engines have no shared memory to prefer
    moves = _planned(tensors, engine, name)
    lengths = [align(move.stop - move.start, _ALIGNMENT) for move in moves]
    blocks = [engine.empty((length,), torch.uint8) for length in lengths]
    for move, block in zip(moves, blocks, strict=True):
        if keep:
            old = torch.empty(0, dtype=torch.uint8).set_(move.storage)[move.start : move.stop]
            block[: old.numel()].copy_(old)
        for tensor in move.tensors:
            offset = tensor.storage_offset() - move.start // tensor.itemsize
            tensor.data = block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)


def _planned(tensors: Mapping[str, torch.Tensor], engine: Engine, name: str) -> list[_Move]:
    """Check all tensors, and return the moves to make."""
    found: dict[int, _Move] = {}
    labels: dict[int, str] = {}
    for label, tensor in tensors.items():
        problem = _problem(checks.check_is_tensor(tensor, label, name), engine)
        if problem:
            raise InvalidArgumentError(f"{name}: `{label}` {problem}")
        if problem is None:
            continue
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.itemsize // _ALIGNMENT * _ALIGNMENT
        stop = int(tensor.storage_offset() + span(tensor)) * tensor.itemsize
        _, known, first, last = found.get(storage._cdata, (storage, [], start, stop))
        if all(tensor is not each for each in known):
            known.append(tensor)
        found[storage._cdata] = _Move(storage, known, min(first, start), max(last, stop))
        labels.setdefault(storage._cdata, label)
    for key, move in found.items():
        if _others(move):
            gc.collect()
        if others := _others(move):
            raise InvalidArgumentError(
                f"{name}: `{labels[key]}` shares its memory with something else, which would stay behind"
                f" ({others} more users: views and other tensors, a state dict, what autograd has saved,"
                " operations under way); call this before there is anything of the kind, or after it is gone"
            )
    return list(found.values())


def _others(move: _Move) -> int:
    """Return how many users a storage has besides the tensors to be moved and this object."""
    users: int = torch._C._storage_Use_Count(move.storage._cdata)
    return users - len(move.tensors) - 1


def _problem(tensor: torch.Tensor, engine: Engine) -> str | None:
    """Return why a tensor cannot be moved, as the rest of a sentence; "" if it can, None if it need not."""
    if tensor.__class__ not in TENSORS:
        return (
            contiguity_problem(tensor) or f"is a {type(tensor).__name__}; give the tensors that it is made of"
        )
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        return f"is not a dense tensor of the CPU, but has layout {tensor.layout} on {tensor.device}"
    if missing := contiguity_problem(tensor):
        return missing
    if not tensor.numel() or engine.is_in_heap(tensor.data_ptr()):
        return None
    if tensor.is_conj() or tensor.is_neg():
        return "is conjugated or negated only when it is read; call .resolve_conj().resolve_neg() first"
    if tensor.untyped_storage().is_shared():
        return "is in memory that other processes may use (share_memory_()), and would leave them behind"
    if not tensor.untyped_storage().resizable():
        return "is in memory that something else uses, like a NumPy array or another group; give its .clone()"
    return ""
