"""The argument checks of the collectives: bad input is refused here, before anything is sent."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from torchestra.arguments.annotations import check_integer, is_integer, refuse_type
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.local import moves, reduces
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, shown
from torchestra.tensors.contiguity import (
    contiguity_problem,
    contiguous_address,
    has_no_elements,
    overlapping,
    overlaps_itself,
)
from torchestra.tensors.override import NoElementsError, find_override
from torchestra.types import ReduceOp

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

LARGEST_TAG = (1 << 62) - 1
"""Tags are 64-bit integers; torchestra reserves the negative ones."""

DEVICES = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)
"""The types of devices that tensors can be moved from and to."""


def check_op(op: object, name: str) -> ReduceOp:
    """Refuse a value that is not a reduce operation, and a PREMUL_SUM without its factor."""
    if not isinstance(op, ReduceOp):
        refuse_type(name, "op", "a torchestra.ReduceOp", op)
    if op.name == "PREMUL_SUM" and op.factor is None:
        raise InvalidArgumentError(
            f"{name}: `op`: PREMUL_SUM needs a factor; use ReduceOp.premul_sum(factor)"
        )
    return op


def check_is_tensor(value: object, parameter: str, name: str) -> torch.Tensor:
    """Refuse a value that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentTypeError(
            f"{name}: Invalid function argument. Expected parameter `{parameter}` of type torch.Tensor but"
            f" got {type(value).__name__} instead."
        )
    if value.__class__ is not torch.Tensor:
        find_override(value, name)
    return value


def check_is_list(value: object, parameter: str, name: str) -> list[object]:
    """Refuse a value that is not a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise InvalidArgumentTypeError(
            f"{name}: Invalid function argument. Expected parameter `{parameter}` of type List[torch.Tensor]"
            f" but got {type(value).__name__} instead."
        )
    return list(value)


def check_tensor_list(value: object, parameter: str, name: str) -> list[torch.Tensor]:
    """Refuse a value that is not a list of tensors."""
    found: list[Any] = check_is_list(value, parameter, name)
    for index, each in enumerate(found):
        if each.__class__ is not torch.Tensor:
            check_is_tensor(each, f"{parameter}[{index}]", name)
    return found


def check_tensor(
    tensor: object, parameter: str, name: str, *, written: bool = False, real: bool = True
) -> torch.Tensor:
    """Refuse a value that is not a dense tensor of the CPU, or of CUDA, of a dtype that can be sent.

    Args:
        written: whether the operation writes into it; then its elements must not share memory.
        real: whether it is to be moved; in a fake world any tensor will do.

    It must have memory of its own: see contiguity.py.
    """
    if (
        isinstance(tensor, torch.Tensor)
        and contiguous_address(tensor)
        and tensor.dtype in DTYPE_CODE
        and not tensor.is_quantized
    ):
        return tensor  # the usual case, which needs no further checks
    tensor = check_is_tensor(tensor, parameter, name)
    if not real:
        return tensor
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` has unsupported layout {tensor.layout}:"
            f" {name} only supports dense tensors"
        )
    if tensor.device.type not in DEVICES:
        error = NoElementsError if has_no_elements(tensor) else InvalidArgumentError
        raise error(
            f"{name}: `{parameter}` is on unsupported device type {tensor.device.type}; move it to the CPU"
            f" first"
        )
    if not moves(tensor.dtype):
        raise InvalidArgumentError(f"{name}: `{parameter}` has dtype {tensor.dtype}, which cannot be sent")
    if missing := contiguity_problem(tensor):
        error = NoElementsError if has_no_elements(tensor) else InvalidArgumentError
        raise error(f"{name}: `{parameter}` {missing}")
    if written and tensor.device.type == "cpu" and overlaps_itself(tensor):
        kind = "an expanded" if 0 in tensor.stride() else "an overlapping"
        raise InvalidArgumentError(
            f"{name}: `{parameter}` is {kind} tensor (strides {tensor.stride()}), whose elements share"
            " memory, so it cannot be written; call .clone() first"
        )
    return tensor


def check_reducible(tensor: torch.Tensor, op: ReduceOp, name: str) -> None:
    """Refuse a reduce operation that the dtype does not have."""
    if _is_reducible(tensor.dtype, op.name):
        return
    if tensor.dtype.is_complex:
        raise InvalidArgumentError(
            f"{name}: {name} does not support {op} on complex tensors, which have SUM and AVG only"
        )
    raise InvalidArgumentError(f"{name}: {op.name} is not defined for tensors of dtype {tensor.dtype}")


@functools.cache
def _is_reducible(dtype: torch.dtype, op: str) -> bool:
    return reduces(dtype, ReduceOp(op))


def check_list(
    tensors: object, parameter: str, length: int, name: str, *, written: bool = False, real: bool = True
) -> list[torch.Tensor]:
    """Refuse a value that is not a list of ``length`` tensors, one for each rank."""
    found = check_is_list(tensors, parameter, name)
    if len(found) != length:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` must have one tensor for each of the group's {length} ranks, got"
            f" {len(found)}"
        )
    checked = [
        check_tensor(tensor, f"{parameter}[{index}]", name, written=written, real=real)
        for index, tensor in enumerate(found)
    ]
    if written and real:
        check_apart(checked, parameter, name)
    return checked


def check_apart(tensors: Sequence[torch.Tensor], parameter: str, name: str) -> None:
    """Refuse tensors that are all to be written, but share memory with each other."""
    if (
        index := overlapping([each for each in tensors if each.is_cpu and not has_no_elements(each)])
    ) is not None:
        raise InvalidArgumentError(
            f"{name}: `{parameter}[{index}]` shares memory with a tensor before it in the list, and both"
            " cannot be written; give each result memory of its own"
        )


def check_dtype(tensor: torch.Tensor, dtype: torch.dtype, parameter: str, name: str) -> None:
    """Refuse a tensor whose dtype is not ``dtype``."""
    if tensor.dtype != dtype:
        raise InvalidArgumentError(
            f"{name}: Invalid usage of tensors with different dtypes: `{parameter}` has dtype {tensor.dtype},"
            f" expected {dtype} like the others"
        )


def check_same_dtype(tensors: Sequence[torch.Tensor], dtype: torch.dtype, parameter: str, name: str) -> None:
    """Refuse tensors whose dtype is not ``dtype``."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not dtype:
            check_dtype(tensor, dtype, f"{parameter}[{index}]", name)


def in_reals(*arguments: Any) -> list[Any]:
    """Return tensors, and lists of them, whose elements are only moved; complex ones as pairs of reals.

    So complex tensors may be mixed with tensors of their parts, on one rank and between ranks, as in
    torch.distributed. (Conjugated tensors have no such view; then all stay as they are.) Other values are
    returned unchanged, for the checks that follow.
    """
    lists = [each if isinstance(each, (list, tuple)) else [each] for each in arguments]
    found = [
        each for part in lists for each in part if isinstance(each, torch.Tensor) and each.dtype.is_complex
    ]
    if not found or any(each.is_conj() for each in found):
        return list(arguments)
    return [
        [_in_reals(each) for each in part] if part is given else _in_reals(given)
        for part, given in zip(lists, arguments, strict=True)
    ]


def _in_reals(tensor: object) -> object:
    if isinstance(tensor, torch.Tensor) and tensor.dtype.is_complex:
        return torch.view_as_real(tensor.detach())
    return tensor


def check_rank(rank: object, size: int, parameter: str, name: str) -> int:
    """Refuse a rank that the group does not have."""
    rank = check_integer(rank, parameter, name)
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` is {shown(rank)}, but the group has ranks 0 to {size - 1}"
        )
    return rank


def check_tag(tag: object, name: str) -> int:
    """Refuse a tag that messages of users cannot have."""
    number = check_integer(tag, "tag", name)
    if not 0 <= number <= LARGEST_TAG:
        raise InvalidArgumentError(
            f"{name}: invalid tag: {shown(number)}; `tag` must be an int of 0 to 62 bits"
        )
    return number


def check_integers(values: object, parameter: str, name: str) -> list[int]:
    """Refuse a value that is not a list of ints."""
    if not isinstance(values, (list, tuple)):
        refuse_type(name, parameter, "a list of ints", values)
    if not all(map(is_integer, values)):
        refuse_type(name, parameter, "a list of ints", values)
    return [operator.index(each) for each in values]


def check_own_numel(
    tensors: Sequence[torch.Tensor], rank: int, numel: int, parameter: str, name: str
) -> None:
    """Refuse a list whose entry for this rank does not have as many elements as this rank's tensor."""
    if tensors[rank].numel() != numel:
        raise InvalidArgumentError(
            f"{name}: `{parameter}[{rank}]`, this rank's own, has {tensors[rank].numel()} elements,"
            f" expected {numel}"
        )


def check_rooted_list(
    tensors: object,
    parameter: str,
    is_root: bool,
    role: str,
    like: torch.Tensor,
    size: int,
    name: str,
    *,
    written: bool = False,
    real: bool = True,
) -> list[torch.Tensor] | None:
    """Refuse a list that is missing on the root, present on another rank, or does not match ``like``."""
    if not is_root:
        if tensors is not None and not (isinstance(tensors, (list, tuple)) and not tensors):
            given = check_tensor_list(tensors, parameter, name)
            check_same_dtype(given, like.dtype, parameter, name)
            raise InvalidArgumentError(
                f"{name}: `{parameter}` must not be specified on ranks other than the {role}"
            )
        return None
    if tensors is None:
        raise InvalidArgumentError(f"{name}: `{parameter}` must be specified on the {role} rank")
    checked = check_list(tensors, parameter, size, name, written=written, real=real)
    check_same_dtype(checked, like.dtype, parameter, name)
    for index, tensor in enumerate(checked):
        if tensor.numel() != like.numel():
            raise InvalidArgumentError(
                f"{name}: `{parameter}[{index}]` has {tensor.numel()} elements, expected {like.numel()}"
            )
    return checked


def check_splits(splits: object, parameter: str, tensor: torch.Tensor, size: int, name: str) -> list[int]:
    """Refuse split sizes that are not one non-negative int per rank, or do not add up to the rows.

    None, or an empty list, stands for equal splits; then the number of rows must be a multiple of ``size``. A
    tensor of ints may stand for a list of them.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if isinstance(splits, torch.Tensor) and splits.dim() == 1 and splits.dtype in _INTEGERS:
        splits = splits.tolist()
    if splits is None or (isinstance(splits, (list, tuple)) and not splits):
        if rows % size:
            raise InvalidArgumentError(
                f"{name}: dimension 0 has length {rows}, which the group's {size} ranks do not divide;"
                f" give `{parameter}`"
            )
        return [rows // size] * size
    if not isinstance(splits, (list, tuple)) or len(splits) != size:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` must list one length for each of {size} ranks, got {shown(splits)}"
        )
    if any(not is_integer(part) or part < 0 for part in splits):
        raise InvalidArgumentError(f"{name}: `{parameter}` must be non-negative ints, got {shown(splits)}")
    splits = [operator.index(part) for part in splits]
    if sum(splits) != rows:
        raise InvalidArgumentError(
            f"{name}: `{parameter}` adds up to {shown(sum(splits))}, but dimension 0 has length {rows}"
        )
    return list(splits)
