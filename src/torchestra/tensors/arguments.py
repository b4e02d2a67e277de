"""The checks of a collective's arguments, derived from its row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchestra.engine.operations import Collective, Parameter, Shape
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.tensors import checks
from torchestra.types import ReduceOp


class Call(NamedTuple):
    """A call of a collective whose arguments have been checked.

    Attributes:
        inputs: the tensors that it reads, one by one; complex ones as pairs of reals if it only moves them.
        outputs: the tensors that it fills; the same for an operation in place.
        result: the result of its Work: the outputs as they were given.
        dtype: of the tensors.
        splits: rows to each rank, and rows from each; None without splits.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    result: list[Any]
    dtype: torch.dtype
    splits: tuple[list[int], list[int]] | None = None


def check_call(
    row: Collective,
    output: Any,
    input: Any,  # noqa: A002 - the row's word
    op: ReduceOp | None,
    root: int | None,
    splits: tuple[Any, Any],
    rank: int,
    size: int,
    real: bool,
) -> Call:
    """Check a call's arguments; refuse wrong ones.

    Args:
        output, input: a tensor, or one for each rank; None if only the root has them.
        splits: the split sizes of output and input, as given.
        rank, size: the calling rank's number, and the size of its group.
        real: tensors need memory that they can be moved from and to (not so in a fake world).

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was sent, and the group stays usable.
    """
    name = row.name
    if row.reduces:
        op = checks.check_op(op, name)
    if row.output is None or row.input is None:
        return Call([], [], [], torch.uint8)
    if row.in_place:
        tensor = checks.check_tensor(output, row.output.name, name, written=True, real=real)
        if op is not None:
            checks.check_reducible(tensor, op, name)
        return Call([tensor], [tensor], [tensor], tensor.dtype)
    given = output
    if row.moves:
        output, input = checks.in_reals(output, input)  # noqa: A001
    pair = _Given(row.output, output, True), _Given(row.input, input, False)
    if row.root:
        outputs, inputs = _check_rooted(row, *pair, rank == root, size, real)
    else:
        outputs, inputs = _check_pair(row, *pair, op, rank, size, real)
    dtype = (outputs or inputs)[0].dtype
    lengths = None
    if row.splits:
        expected, sent = splits
        to_ranks = checks.check_splits(sent, "input_split_sizes", inputs[0], size, name)
        from_ranks = checks.check_splits(expected, "output_split_sizes", outputs[0], size, name)
        lengths = (to_ranks, from_ranks)
    if row.output.is_list:
        return Call(inputs, outputs, list(given) if outputs else [], dtype, lengths)
    return Call(inputs, outputs, [given], dtype, lengths)


class _Given(NamedTuple):
    """Hold the value given for a parameter, and whether the operation fills it."""

    parameter: Parameter
    value: Any
    written: bool

    def checked(self, name: str, size: int, real: bool) -> list[torch.Tensor]:
        """Return the tensors, one by one."""
        parameter, value, written = self
        if parameter.is_list:
            return checks.check_list(value, parameter.name, size, name, written=written, real=real)
        return [checks.check_tensor(value, parameter.name, name, written=written, real=real)]


def _check_rooted(
    row: Collective, output: _Given, given: _Given, is_root: bool, size: int, real: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Check a tensor of every rank, and the root's list of such tensors."""
    gathers = output.parameter.on_root
    one, listed = (given, output) if gathers else (output, given)
    (tensor,) = one.checked(row.name, size, real)
    parameter, value, written = listed
    role = "destination" if gathers else "source"
    tensors = checks.check_rooted_list(
        value, parameter.name, is_root, role, tensor, size, row.name, written=written, real=real
    )
    return (tensors or [], [tensor]) if gathers else ([tensor], tensors or [])


def _check_pair(
    row: Collective, output: _Given, given: _Given, op: ReduceOp | None, rank: int, size: int, real: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Check the tensors to fill and those to read, each a tensor or one for each rank."""
    name = row.name
    outputs = output.checked(name, size, real)
    if op is not None:
        checks.check_reducible(outputs[0], op, name)
    inputs = given.checked(name, size, real)
    dtype = (outputs if row.reduces else inputs)[0].dtype
    for parameter, tensors in ((given.parameter, inputs), (output.parameter, outputs)):
        if parameter.is_list:
            checks.check_same_dtype(tensors, dtype, parameter.name, name)
        else:
            checks.check_dtype(tensors[0], dtype, parameter.name, name)
    if row.shape is Shape.OWN:
        listed, of_all, own = (given, inputs, outputs) if row.reduces else (output, outputs, inputs)
        checks.check_own_numel(of_all, rank, own[0].numel(), listed.parameter.name, name)
    elif row.shape is Shape.OUTPUT_IS_WHOLE:
        _check_whole(outputs[0], output.parameter.name, inputs[0], "input", size, name)
    elif row.shape is Shape.INPUT_IS_WHOLE:
        _check_whole(inputs[0], given.parameter.name, outputs[0], "output", size, name)
    return outputs, inputs


def _check_whole(
    whole: torch.Tensor, parameter: str, piece: torch.Tensor, role: str, size: int, name: str
) -> None:
    if whole.numel() != piece.numel() * size:
        raise InvalidArgumentError(
            f"{name}: {parameter} has {whole.numel()} elements, expected the {role}'s {piece.numel()} times"
            f" the group's {size} ranks"
        )


def check_in_place_list(
    row: Collective, tensors: Sequence[torch.Tensor], op: ReduceOp | None, *, real: bool
) -> Call:
    """Check a list of tensors for one operation in place on all; refuse other values, and other dtypes."""
    if op is not None:
        checks.check_op(op, row.name)
    given = list(tensors)  # which another thread may change
    for index, tensor in enumerate(given):
        checks.check_tensor(tensor, f"tensors[{index}]", row.name, written=True, real=real)
        if op is not None:
            checks.check_reducible(tensor, op, row.name)
        if tensor.dtype != given[0].dtype:  # the kernel would take elements of one for those of the other
            raise InvalidArgumentTypeError(
                f"{row.name}: `tensors[{index}]` must be {tensors[0].dtype}, as `tensors[0]` is, got"
                f" {tensor.dtype}"
            )
    return Call(given, given, given, given[0].dtype)


def pieces(
    call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the tensors that go to and come from each rank; two of one shape in equal parts stay whole."""
    if call.splits is None:
        return inputs, outputs
    sent, expected = call.splits
    if sent == expected and len({*sent}) == 1 and inputs[0].shape == outputs[0].shape:
        return inputs, outputs
    return _rows(inputs[0], sent), _rows(outputs[0], expected)


def _rows(tensor: torch.Tensor, splits: list[int]) -> Sequence[torch.Tensor]:
    whole = tensor if tensor.dim() else tensor.view(1)
    return list(torch.split(whole, splits))
