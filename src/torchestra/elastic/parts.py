"""What a training's state consists of: objects that give tensors and other values, and take them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torchestra.errors import InvalidArgumentTypeError, shown


class Part(Protocol):
    """Gives a nested value of dicts, lists, tuples and tensors, and takes one like it.

    Tensors are the ones in use, not copies, where that can be: what is written into them is loaded.
    """

    def value(self) -> Any:
        """Return the present value."""

    def load(self, value: Any) -> None:
        """Take over a value; its tensors may be those that :meth:`value` returned, with new elements."""


class _ModulePart:
    """A module: all parameters and buffers, those that its state_dict leaves out too, and its extra state."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        return {name: tensor.detach() for name, tensor in named.items()}

    def value(self) -> Any:
        known = {
            name
            for each in (self._module.named_parameters, self._module.named_buffers)
            for name, _ in each(remove_duplicate=False)
        }
        # A state_dict has, beside tensors, what modules return from get_extra_state().
        extra = {name: each for name, each in self._module.state_dict().items() if name not in known}
        return {**self._tensors(), **extra}

    def load(self, value: Any) -> None:
        tensors = self._tensors()
        for name, mine in tensors.items():
            _copy(mine, value[name])
        if extra := {name: each for name, each in value.items() if name not in tensors}:
            self._module.load_state_dict(extra, strict=False)


class _TensorPart:
    """A tensor by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def value(self) -> Any:
        return self._tensor

    def load(self, value: Any) -> None:
        _copy(self._tensor, value)


class _GeneratorPart:
    """A generator of random numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def value(self) -> Any:
        return self._generator.get_state()

    def load(self, value: Any) -> None:
        self._generator.set_state(value)


class _StatefulPart:
    """Anything with state_dict() and load_state_dict()."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def value(self) -> Any:
        return self._thing.state_dict()

    def load(self, value: Any) -> None:
        self._thing.load_state_dict(value)


def _copy(into: torch.Tensor, value: torch.Tensor) -> None:
    if into.data_ptr() != value.data_ptr() or into.shape != value.shape:
        into.copy_(value)


def part_of(name: str, thing: Any) -> Part:
    """Return the part for an object.

    Raises:
        InvalidArgumentTypeError: it has no state.
    """
    if isinstance(thing, torch.nn.Module):
        return _ModulePart(thing)
    if isinstance(thing, torch.Tensor):
        return _TensorPart(thing)
    if isinstance(thing, torch.Generator):
        return _GeneratorPart(thing)
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return _StatefulPart(thing)
    raise InvalidArgumentTypeError(
        f"elastic.State: {name} must be a module, a tensor, a torch.Generator, or something with state_dict()"
        f" and load_state_dict(), got {shown(thing)}"
    )


class TensorSpec(NamedTuple):
    """Stand for a tensor in a nested value: its number, and what it is like."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


def flatten_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a nested value with a :class:`TensorSpec` for each dense tensor, and these tensors."""
    tensors: list[torch.Tensor] = []

    def visit(each: Any) -> Any:
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided:
            tensors.append(each.detach())
            return TensorSpec(len(tensors) - 1, each.dtype, tuple(each.shape), each.device.type)
        return _rebuilt(each, visit)

    return visit(value), tensors


def unflatten_tensors(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the nested value that was :func:`flatten_tensors`, with the tensors themselves."""

    def visit(each: Any) -> Any:
        return tensors[each.number] if isinstance(each, TensorSpec) else _rebuilt(each, visit)

    return visit(skeleton)


def tensor_specs_of(skeleton: Any) -> list[TensorSpec]:
    """Return what stands for the tensors of a skeleton, by number."""
    found: list[TensorSpec] = []

    def visit(each: Any) -> Any:
        if isinstance(each, TensorSpec):
            found.append(each)
            return each
        return _rebuilt(each, visit)

    visit(skeleton)
    return found


def paths_of(skeleton: Any) -> dict[tuple[Any, ...], int]:
    """Return the number of each tensor of a skeleton, by where it is."""
    found: dict[tuple[Any, ...], int] = {}

    def visit(each: Any, path: tuple[Any, ...]) -> None:
        if isinstance(each, TensorSpec):
            found[path] = each.number
        elif isinstance(each, Mapping):
            for key, inner in each.items():
                visit(inner, (*path, key))
        elif type(each) in (list, tuple):
            for index, inner in enumerate(each):
                visit(inner, (*path, index))

    visit(skeleton, ())
    return found


def have_same_tensors(one: Any, other: Any) -> bool:
    """Return whether two skeletons have tensors of the same kinds at the same places."""
    return paths_of(one) == paths_of(other) and tensor_specs_of(one) == tensor_specs_of(other)


def _rebuilt(each: Any, visit: Any) -> Any:
    """Return a container of the same kind with its values visited; anything else as it is."""
    if isinstance(each, dict):
        made = {key: visit(inner) for key, inner in each.items()}
        return made if type(each) is dict else _like(each, made)
    if type(each) in (list, tuple):
        return type(each)(visit(inner) for inner in each)
    return each


def _like(each: dict[Any, Any], made: dict[Any, Any]) -> dict[Any, Any]:
    copy = each.copy()
    copy.update(made)
    return copy
