"""The checks of the methods in torch's C++ form, which take lists: their phrases are torch's.

Each raises InvalidArgumentError (a RuntimeError and ValueError) before anything is sent, or, if a value is
not a tensor at all, InvalidArgumentTypeError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from torchestra.arguments.annotations import check_integer
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, shown


def refuse(name: str, why: str) -> NoReturn:
    """Raise InvalidArgumentError."""
    raise InvalidArgumentError(f"{name}: {why}")


def _refuse_type(name: str, parameter: str, expected: str, value: object) -> NoReturn:
    raise InvalidArgumentTypeError(
        f"{name}: incompatible function arguments: expected {expected} as `{parameter}`, got {shown(value)}"
    )


def splits_or_none(splits: Sequence[int] | None) -> Sequence[int] | None:
    """Return split sizes; None for empty ones, which also stand for equal ranges."""
    return None if isinstance(splits, (list, tuple)) and not splits else splits


def as_list(value: object, parameter: str, name: str) -> list[torch.Tensor]:
    """Return a tensor, or a list of tensors, as a list."""
    tensors = [value] if isinstance(value, torch.Tensor) else value
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(each, torch.Tensor) for each in tensors):
        _refuse_type(name, parameter, "a tensor or a list of tensors", value)
    return list(tensors)


def as_lists(value: object, parameter: str, name: str) -> list[list[torch.Tensor]]:
    """Return a list of tensors, or a list of lists of them, as a list of lists; an empty list stays empty."""
    if not isinstance(value, (list, tuple)):
        _refuse_type(name, parameter, "a list of lists of tensors", value)
    if value and all(isinstance(each, torch.Tensor) for each in value):
        return [as_list(value, parameter, name)]
    if not all(isinstance(each, (list, tuple)) for each in value):
        raise InvalidArgumentTypeError(
            f"{name}: incompatible function arguments: requires list of tensors, or list of lists of tensors,"
            f" got {shown(value)} as `{parameter}`"
        )
    return [as_list(each, parameter, name) for each in value]


def several(value: object, parameter: str, name: str) -> list[torch.Tensor]:
    """Return a list of tensors; refuse a single tensor."""
    if isinstance(value, torch.Tensor):
        raise InvalidArgumentTypeError(
            f"{name}: incompatible function arguments: requires list of tensors as `{parameter}`, got a"
            " Tensor"
        )
    return as_list(value, parameter, name)


def check_single(tensors: Sequence[object], what: str, name: str) -> None:
    """Refuse a list that does not have exactly one tensor."""
    if len(tensors) != 1:
        refuse(name, f"requires a single-element {what}, got {len(tensors)} tensors")


def check_some(tensors: Sequence[object], name: str, what: str = "tensor") -> None:
    """Refuse an empty list."""
    if not tensors:
        refuse(name, f"requires non-empty {what} list")


def check_root(root: object, size: int, name: str) -> int:
    """Refuse a root that the group does not have."""
    root = check_integer(root, "root", name)
    if not 0 <= root < size:
        refuse(name, f"invalid root rank: {shown(root)}; the group has ranks 0 to {size - 1}")
    return root


def check_peer(rank: object, size: int, parameter: str, name: str) -> int:
    """Refuse a rank to send to or receive from that the group does not have."""
    rank = check_integer(rank, parameter, name)
    if not 0 <= rank < size:
        refuse(name, f"`{parameter}`: invalid rank: {shown(rank)}; the group has ranks 0 to {size - 1}")
    return rank


def check_root_tensor(index: object, tensors: Sequence[torch.Tensor], name: str) -> int:
    """Refuse a root tensor that the list does not have."""
    index = check_integer(index, "rootTensor", name)
    if not 0 <= index < len(tensors):
        there = f"there are {len(tensors)} tensors, and `rootTensor` says which"
        refuse(name, f"invalid root tensor: {shown(index)}; {there}")
    return index


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, str, torch.layout]:
    return tensor.dtype, tensor.device.type, tensor.layout


def _type(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device.type}"


def check_dense(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Refuse tensors that are not dense."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            what = f"only supports dense tensors, as input and output, got one with layout {tensor.layout}"
            refuse(name, what)


def _check_layout(tensor: torch.Tensor, like: torch.Tensor, name: str, index: int) -> None:
    if tensor.layout != like.layout:
        expected, got = like.layout, tensor.layout
        refuse(name, f"invalid tensor layout at index {index} (expected {expected}, got {got})")


def check_same_type(tensor: torch.Tensor, like: torch.Tensor, name: str, index: int = 0) -> None:
    """Refuse a tensor, at some place of a list, that differs from ``like`` in dtype, device or layout."""
    if _kind(tensor) != _kind(like):
        what = f"invalid tensor type at index {index} (expected {_type(like)}, got {_type(tensor)})"
        refuse(name, f"{what}; a call's tensors, input and output, must be alike")


def check_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, name: str) -> None:
    """Refuse tensors that differ from ``like`` in dtype, device, layout or shape."""
    for index, tensor in enumerate(tensors):
        _check_layout(tensor, like, name, index)
        check_same_type(tensor, like, name, index)
        if tensor.shape != like.shape:
            expected, got = tuple(like.shape), tuple(tensor.shape)
            refuse(name, f"invalid tensor size at index {index} (expected {expected}, got {got})")


def check_same_dtypes(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Refuse tensors of several dtypes, devices or layouts, or that are not dense."""
    like = tensors[0]
    dtype, layout, device = like.dtype, like.layout, like.device
    for index, tensor in enumerate(tensors):
        if tensor.dtype is dtype and tensor.layout is layout is torch.strided and tensor.device == device:
            continue
        _check_layout(tensor, like, name, index)
        if _kind(tensor) != _kind(like):
            types = f"tensor 0 is {_type(like)}, tensor {index} is {_type(tensor)}"
            refuse(name, f"tensors must all have the same type: {types}")
    if layout is not torch.strided:
        refuse(name, f"unsupported layout {layout}")


def check_rooted(
    lists: Sequence[Sequence[torch.Tensor]],
    like: torch.Tensor,
    is_root: bool,
    size: int,
    role: str,
    name: str,
) -> list[torch.Tensor] | None:
    """Return the root's list of ``gather`` outputs or ``scatter`` inputs; None on the other ranks."""
    if not is_root:
        if lists:
            refuse(name, f"requires empty {role} on non-root, got {len(lists)} lists")
        return None
    if len(lists) != 1:
        expected = f"requires a single-element {role} list containing a list with {size} tensors"
        refuse(name, f"{expected}, got {len(lists)} lists")
    if len(lists[0]) != size:
        expected = f"{role.capitalize()} list size should be {size}, same as size of the process group"
        refuse(name, f"Incorrect {role} list size {len(lists[0])}. {expected}.")
    check_alike(lists[0], like, name)
    return list(lists[0])


def check_pairs(
    outputs: Sequence[object], tensors: Sequence[object], name: str, what: str = "outputs"
) -> None:
    """Refuse lists of inputs and outputs that are empty or differ in length."""
    check_some(tensors, name, "input tensor")
    if len(outputs) != len(tensors):
        got = f"got {len(tensors)} inputs and {len(outputs)} {what}"
        refuse(name, f"requires input/output tensor lists to have the same length, {got}")


def check_gather_lists(
    outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], size: int, name: str
) -> None:
    """Refuse lists that ``allgather`` cannot fill: each of n lists needs n tensors per rank, all alike."""
    check_pairs(outputs, tensors, name, "lists of outputs")
    for index, row in enumerate(outputs):
        if len(row) != len(tensors) * size:
            lengths = f"(expected length {len(tensors) * size}, got {len(row)})"
            refuse(name, f"invalid output tensor list at index {index} {lengths}")
    for row in (tensors, *outputs):
        check_alike(row, tensors[0], name)
    check_dense(tensors, name)


def check_coalesced_lists(
    outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], size: int, name: str
) -> None:
    """Refuse lists that ``allgather_coalesced`` cannot fill: one for each rank, each like the inputs."""
    check_some(tensors, name, "input tensor")
    if len(outputs) != size:
        refuse(name, f"output lists should be equal to world size, {size}, got {len(outputs)}")
    check_dense(tensors, name)
    for row in outputs:
        if len(row) != len(tensors):
            refuse(name, f"invalid output size: (expected length {len(tensors)}, got {len(row)})")
        for index, (output, tensor) in enumerate(zip(row, tensors, strict=True)):
            if output.shape != tensor.shape:
                lengths = f"(expected length {tuple(tensor.shape)}, got {tuple(output.shape)})"
                refuse(name, f"invalid size of output tensor at index {index} {lengths}")
            check_same_type(output, tensor, name, index)


def check_pieces(whole: torch.Tensor, piece: torch.Tensor, size: int, name: str) -> None:
    """Refuse two tensors of which the first is not ``size`` times the second."""
    check_dense([piece], name)
    check_same_type(whole, piece, name)
    if whole.numel() != piece.numel() * size:
        lengths = f"(expected {piece.numel()} elements times {size} ranks, got {whole.numel()})"
        refuse(name, f"invalid tensor size at index 0 {lengths}, of input and output")


def check_reduce_scatter_lists(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], size: int, name: str
) -> None:
    """Refuse all but one output, and one list with an input of its dtype for each rank."""
    if len(outputs) != 1 or len(inputs) != 1:
        got = f"got {len(outputs)}, with {len(inputs)} lists of inputs"
        refuse(name, f"reduce_scatter only supports 1 output, {got}")
    if len(inputs[0]) != size:
        refuse(name, f"invalid input tensor list size, must be world size, {size}, got {len(inputs[0])}")
    check_dense(outputs, name)
    for index, tensor in enumerate(inputs[0]):
        check_same_type(tensor, outputs[0], name, index)


def check_exchange(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], size: int, name: str
) -> None:
    """Refuse lists for ``alltoall`` that are not one tensor per rank each, or whose dtypes differ."""
    for tensors, role in ((inputs, "input"), (outputs, "output")):
        if len(tensors) != size:
            expected = f"its length should be equal to world size, {size}, got {len(tensors)}"
            refuse(name, f"invalid {role} tensor list: {expected}")
    check_dense([*inputs, *outputs], name)
    for index, tensor in enumerate([*inputs, *outputs]):
        check_same_type(tensor, inputs[0], name, index)
