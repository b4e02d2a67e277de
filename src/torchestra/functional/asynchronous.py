"""The tensor that a functional collective returns: its first use waits for the collective."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torchestra.functional.operators import ops


class AsyncCollectiveTensor(torch.Tensor):
    """A tensor whose contents a collective is still writing.

    Shape and strides are known at once, and views of it are of the same kind and do not wait. Any other use
    waits first, on the thread that uses it, and raises the collective's errors there.

    Attributes:
        elem: the plain tensor.
        completed: whether it has been waited for through this object.
    """

    elem: torch.Tensor
    completed: bool

    __slots__ = ["completed", "elem"]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> AsyncCollectiveTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,
            requires_grad=elem.requires_grad,
        )
        assert isinstance(made, AsyncCollectiveTensor)
        made.elem = elem
        made.completed = False
        return made

    def trigger_wait(self) -> torch.Tensor:
        """Wait, unless that was done through this object; return the plain tensor."""
        if not self.completed:
            self.elem = ops.wait_tensor(self.elem)
            self.completed = True
        return self.elem

    def wait(self) -> torch.Tensor:
        """Wait; return the plain tensor."""
        return ops.wait_tensor(self.elem)  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """Return the values, as nested lists."""
        return self.trigger_wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values, as a numpy array that shares the tensor's memory."""
        return self.trigger_wait().numpy(force=force)

    def data_ptr(self) -> int:
        """Return the address of the elements, once they are there."""
        return self.trigger_wait().data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.trigger_wait(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.trigger_wait().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AsyncCollectiveTensor({self.trigger_wait()!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], meta: None, outer_size: Any, outer_stride: Any
    ) -> AsyncCollectiveTensor:
        return AsyncCollectiveTensor(inner_tensors["elem"])

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> torch.Tensor | None:
        return self.trigger_wait() if expected_type is torch.Tensor else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        use = AsyncCollectiveTensor._inner if _is_view(func) else AsyncCollectiveTensor.trigger_wait
        plain = [_mapped(use, AsyncCollectiveTensor, each) for each in args]
        named = {name: _mapped(use, AsyncCollectiveTensor, each) for name, each in (kwargs or {}).items()}
        result = func(*plain, **named)
        return _mapped(AsyncCollectiveTensor, torch.Tensor, result) if _is_view(func) else result

    def _inner(self) -> torch.Tensor:
        return self.elem


def _mapped(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """Map an operator's argument or result, in which tensors stand alone or in a list."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, kind, each) for each in value)
    return value


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operator returns views of its first argument, and reads no element."""
    if func is ops.wait_tensor.default:
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return False  # it calls others, which may do anything
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write


class _Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(tensor.detach())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def awaited_later(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a functional collective returns for the output of its operator.

    While a program is traced, or a mode intercepts operators, that is the result of ``wait_tensor``, so that
    the wait is recorded; a compiler moves it to where it is due. The same if the output is not plain.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.wait_tensor(tensor)  # type: ignore[no-any-return]
    if type(tensor) is not torch.Tensor or tensor.is_meta or _get_current_dispatch_mode() is not None:
        return ops.wait_tensor(tensor)  # type: ignore[no-any-return]
    if tensor.requires_grad:
        return _Wrapped.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return AsyncCollectiveTensor(tensor)
