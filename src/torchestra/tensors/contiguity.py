"""Sort tensors by memory: those that the engine can take, those that are copied first, those without any.

The engine reads and writes memory by its address. A tensor may look like any other and have no memory of its
own (fake, functional, zero and batched tensors, those of wrapper classes), or less than its shape requires
(its storage was resized); :func:`contiguous_address` and :func:`contiguity_problem` keep these from the
engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from torchestra.errors import InvalidArgumentError

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The classes whose tensors have their elements in their own memory; those of other classes may not."""


def contiguous_address(tensor: torch.Tensor) -> int:
    """Return the address of a CPU tensor's elements, if they lie one after the other in its memory; else 0.

    It is not for complex or quantized tensors, which their bits do not fully describe. It is 0 for empty
    tensors, and for classes other than torch's own.
    """
    # Tensors without storage, those of other layouts and of functorch, raise RuntimeError.
    try:
        if (
            tensor.__class__ in TENSORS
            and tensor.is_cpu
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() - tensor.nbytes >= tensor.storage_offset() * tensor.itemsize
        ):
            return tensor.data_ptr()
    except RuntimeError:
        pass
    return 0


def contiguity_problem(tensor: torch.Tensor) -> str:
    """Return why a dense tensor cannot be handed to the engine, as the rest of a sentence; "" if it can."""
    if is_lazy(tensor):
        return "has no memory and no shape yet; run the module that it is a parameter of once"
    if tensor.is_nested:
        return "is a nested tensor; give its .values(), or its parts one by one"
    if tensor.is_quantized:
        return (
            f"has dtype {tensor.dtype}, whose scale and zero point would stay behind; give its .int_repr(),"
            " or .dequantize() it first"
        )
    try:
        storage = tensor.untyped_storage()
        # A fake tensor's storage is on "meta"; torch warns when its address is asked for.
        room, address = storage.nbytes(), tensor.data_ptr() if storage.device == tensor.device else 0
    except RuntimeError:
        return f"has no memory of its own ({_described(tensor)}); give a plain tensor"
    if not tensor.numel():
        return ""
    needed = (tensor.storage_offset() + span(tensor)) * tensor.itemsize
    if room < needed:
        return (
            f"needs {needed} bytes of its storage, which has been freed or resized to {room}; resize it back,"
            " or give another tensor"
        )
    if not address:
        return f"has no memory of its own ({_described(tensor)}); give a plain tensor"
    return ""


def has_no_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape only: a fake tensor, or one of the device "meta"."""
    if tensor.__class__ in TENSORS:
        return tensor.is_meta and not torch._is_functional_tensor(tensor)
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def _described(tensor: torch.Tensor) -> str:
    """Return what kind of tensor without memory this is."""
    if tensor.__class__ not in TENSORS:
        return f"it is a {type(tensor).__name__}"
    if torch._is_functional_tensor(tensor):
        return "it is a functional tensor"
    return "it is a zero tensor, unlike its .clone()" if tensor._is_zerotensor() else "it is not a plain one"


def span(tensor: torch.Tensor) -> int:
    """Return how many elements a nonempty tensor spans in memory, from the first to the last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum([(length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)])


def check_memory(tensor: torch.Tensor) -> None:
    """Refuse to pickle a dense tensor of the CPU that has no memory, or less than it needs.

    Quantized and nested tensors, and those of other classes, define themselves how they are pickled.

    Raises:
        InvalidArgumentError: it lacks memory.
    """
    if (
        tensor.__class__ in TENSORS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and (missing := contiguity_problem(tensor))
    ):
        raise InvalidArgumentError(f"a tensor of shape {tuple(tensor.shape)} {missing}")


def check_storage(storage: torch.UntypedStorage) -> None:
    """Refuse to pickle a storage of the CPU that reports a size, but has no memory.

    Raises:
        InvalidArgumentError: it has no memory.
    """
    if storage.nbytes() and not storage.data_ptr():
        raise InvalidArgumentError(
            f"a storage of {storage.nbytes()} bytes has no memory; give a plain tensor"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as in an expanded one."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if step <= reach:
            marks = torch.zeros(span(tensor), dtype=torch.uint8)
            marks.as_strided(tensor.shape, tensor.stride()).fill_(1)
            return int(marks.count_nonzero()) < tensor.numel()
        reach += step * (length - 1)
    return False


def overlapping(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the index of a tensor that shares memory with an earlier one in the list; None if none does."""
    ranges = sorted(
        (each.data_ptr(), each.data_ptr() + span(each) * each.itemsize, index)
        for index, each in enumerate(tensors)
        if each.numel()
    )
    together: list[int] = []
    first = last = 0
    for start, stop, index in [*ranges, (last, last, -1)]:
        if index >= 0 and start < last:
            together.append(index)
            last = max(last, stop)
            continue
        if len(together) > 1 and (found := _marked_twice(tensors, sorted(together), first, last)) is not None:
            return found
        together, first, last = [index], start, stop
    return None


def _marked_twice(
    tensors: Sequence[torch.Tensor], indices: Sequence[int], first: int, last: int
) -> int | None:
    """Do :func:`overlapping` for tensors within this range of addresses, which may be interleaved."""
    marks = torch.zeros(last - first, dtype=torch.uint8)
    for index in indices:
        tensor = tensors[index]
        unit = tensor.itemsize
        shape, strides = (*tensor.shape, unit), (*(step * unit for step in tensor.stride()), 1)
        mine = marks.as_strided(shape, strides, tensor.data_ptr() - first)
        if bool(mine.any()):
            return index
        mine.fill_(1)
    return None


def make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its memory holds its elements one after the other, else such a copy of it."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def write_back(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy an operation's results from buffers into their tensors; return the tensors."""
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)
    return list(tensors)
