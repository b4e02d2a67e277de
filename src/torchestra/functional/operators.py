"""The functional collectives as torch operators: ``torch.ops.torchestra.*``.

They are derived from those rows of the table of operations that name one. Every operator returns new tensors
at once; ``wait_tensor`` returns its argument when its contents are there. An operator gets its group's name,
so that graphs hold only strings and numbers, and looks it up when it runs. Those that end in ``_`` work in
place; they are for Inductor.

``wait_tensor`` declares that it returns its argument. In a functional graph, though, its result is a tensor
of its own: the one that may be read. So this file defines its functionalization and its derivative, which
torch does not make for operators that return views.

Fake kernels compute only shapes. They check everything that can be checked without a group, so that tracing a
program reveals a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torchestra.communicator import multi_tensor, work_registry
from torchestra.communicator.work import Work
from torchestra.engine.operations import COLLECTIVES, Collective, Shape
from torchestra.errors import InvalidArgumentError, InvalidShapeError
from torchestra.functional.inductor import lower_collectives
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.world.registry import current_world

_library = torch.library.Library("torchestra", "DEF")
_REDUCTIONS: dict[str, ReduceOp] = {
    name.lower(): getattr(ReduceOp, name) for name in ReduceOp._NAMES if name != "PREMUL_SUM"
}
_DIFFERENTIABLE = ("sum", "avg")

Kernel = Callable[..., Any]


def reduction(name: str) -> ReduceOp:
    """Return the reduce operation of a name in lower case, as operators take it.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    op = _REDUCTIONS.get(name)
    if op is None:
        raise InvalidArgumentError(
            f"unknown reduce operation {name!r}; functional collectives know {', '.join(_REDUCTIONS)}"
        )
    return op


def _expect(outputs: Sequence[torch.Tensor], work: Work | None, group: ProcessGroup, name: str) -> None:
    assert work is not None
    for output in outputs:
        description = f"{name} on {tuple(output.shape)} of group {group.group_name!r}"
        work_registry.expect(output, work, group, description)


# -- fake kernels: shapes


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _gathered(tensor: torch.Tensor, group_size: int) -> torch.Tensor:
    first, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.dim() else (1, ())
    return tensor.new_empty((first * group_size, *rest))


def _scattered(tensor: torch.Tensor, group_size: int) -> torch.Tensor:
    if not tensor.dim() or tensor.shape[0] % group_size:
        raise InvalidShapeError(
            f"reduce_scatter_tensor: input dimension 0 of shape {tuple(tensor.shape)} must be a multiple of"
            f" group_size {group_size}"
        )
    return tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:]))


def _exchanged(tensor: torch.Tensor, output_splits: Sequence[int] | None, _: Any) -> torch.Tensor:
    if output_splits is None:
        return tensor.new_empty(tensor.shape)
    for length in output_splits:
        torch._check(length >= 0, lambda: f"output_split_sizes must not be negative, got {output_splits}")
    return tensor.new_empty((sum(output_splits), *tensor.shape[1:]))


_OUTPUTS: dict[Shape, Kernel] = {
    Shape.ALIKE: _like,
    Shape.OUTPUT_IS_WHOLE: _gathered,
    Shape.INPUT_IS_WHOLE: _scattered,
    Shape.ROWS: _exchanged,
}


# -- operators


class _Operator:
    """Define the operators of a row of the table.

    Their arguments are a tensor, or several, then as far as the row has them a reduce operation, a root and
    split sizes, the group's size if the output's depends on it, and the group's name.
    """

    def __init__(self, row: Collective) -> None:
        self._row = row
        self._is_sized = row.shape in (Shape.OUTPUT_IS_WHOLE, Shape.INPUT_IS_WHOLE)

    def define(self) -> None:
        """Define the operator and its forms for several tensors and in place, if the row has them."""
        row, name = self._row, self._row.functional
        parameters = ["str reduce_op"] * row.reduces + [f"int {row.root}"] * bool(row.root)
        if row.splits:
            parameters += ["SymInt[]? output_split_sizes", "SymInt[]? input_split_sizes"]
        parameters += ["int group_size"] * self._is_sized + ["str group_name"]
        rest = ", ".join(parameters)
        define(f"{name}(Tensor input, {rest}) -> Tensor", self._run, self._fake)
        if row.coalesced:
            schema = f"{name}_coalesced(Tensor[] inputs, {rest}) -> Tensor[]"
            define(schema, self._run_coalesced, self._fake_coalesced)
        if row.in_place:
            define(f"{name}_(Tensor(a!) input, {rest}) -> ()", self._run_in_place, lambda *_: None)

    def _fake(self, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if self._row.reduces:
            reduction(arguments[0])
        return self._output(tensor, arguments)

    def _fake_coalesced(self, tensors: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        return [self._fake(tensor, *arguments) for tensor in tensors]

    def _output(self, tensor: torch.Tensor, arguments: Sequence[Any]) -> torch.Tensor:
        used = arguments[-2:-1] if self._is_sized else arguments[:-1] if self._row.splits else ()
        output: torch.Tensor = _OUTPUTS[self._row.shape](tensor, *used)
        return output

    def _group(self, arguments: Sequence[Any]) -> ProcessGroup:
        name = arguments[-1]
        group = current_world().group(name)
        if self._is_sized and group.size() != arguments[-2]:
            raise InvalidArgumentError(
                f"this operation was compiled for a group of {arguments[-2]} ranks, and group {name!r} has"
                f" {group.size()} now: call torch.compiler.reset() after another world was made"
            )
        return group

    def _settings(self, arguments: Sequence[Any], group: ProcessGroup) -> dict[str, Any]:
        """Return a call's arguments other than tensors: reduce operation, root, split sizes."""
        row, settings = self._row, dict[str, Any]()
        if row.reduces:
            settings["op"] = reduction(arguments[0])
        if row.splits:
            settings["splits"] = arguments[:2]
        if row.root:
            root = settings["root"] = arguments[int(row.reduces)]
            if not 0 <= root < group.size():
                raise InvalidArgumentError(
                    f"{row.name}: {row.root} is {root}, but the group has ranks 0 to {group.size() - 1}"
                )
        return settings

    def _run(self, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        output = (
            tensor.clone(memory_format=torch.contiguous_format)
            if self._row.in_place
            else self._output(tensor, arguments)
        )
        self._begin(output, output if self._row.in_place else tensor, arguments)
        return output

    def _run_in_place(self, tensor: torch.Tensor, *arguments: Any) -> None:
        work_registry.wait_for(tensor)
        self._begin(tensor, tensor, arguments)

    def _begin(self, output: torch.Tensor, tensor: torch.Tensor, arguments: Sequence[Any]) -> None:
        group = self._group(arguments)
        settings = self._settings(arguments, group)
        work = group.communicator.collective(self._row, output, tensor, **settings, async_op=True)
        _expect([output], work, group, self._row.name)

    def _run_coalesced(self, tensors: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        group, name = self._group(arguments), f"{self._row.functional}_coalesced"
        settings, communicator = self._settings(arguments, group), group.communicator
        if self._row.in_place:
            outputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
            work = multi_tensor.all_reduce_coalesced(communicator, outputs, **settings, async_op=True)
        else:
            outputs = [self._output(tensor, arguments) for tensor in tensors]
            work = multi_tensor.coalesced(
                communicator, self._row, outputs, tensors, **settings, async_op=True
            )
        _expect(outputs, work, group, name)
        return outputs


def define(schema: str, kernel: Kernel, fake: Kernel) -> None:
    """Define an operator, what it does, and its fake kernel."""
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")

    def fake_kernel(*arguments: Any) -> Any:
        lower_collectives()
        return fake(*arguments)

    torch.library.register_fake(f"torchestra::{name}", fake_kernel, lib=_library)


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    work_registry.wait_for(tensor)
    return tensor


for _row in COLLECTIVES.values():
    if _row.functional:
        _Operator(_row).define()
define("wait_tensor(Tensor(a) input) -> Tensor(a)", _wait_tensor, torch.empty_like)

ops = torch.ops.torchestra
"""The operators, as they appear in graphs."""

# A collective whose result is not used must run anyway: the other ranks take part in it.
torch.fx.node.has_side_effect(ops.wait_tensor.default)


# -- derivatives: gradients go through the transpose of a collective


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def check_differentiable(reduce_op: str) -> None:
    """Refuse a reduction that has no derivative."""
    if reduce_op not in _DIFFERENTIABLE:
        raise InvalidArgumentError(
            f"only the reductions {' and '.join(_DIFFERENTIABLE)} have derivatives here, got {reduce_op!r}"
        )


def _all_reduce_backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    reduce_op, group_name = context.arguments
    check_differentiable(reduce_op)
    return ops.wait_tensor(ops.all_reduce(gradient.contiguous(), reduce_op, group_name)), None, None


def _all_gather_backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    group_size, group_name = context.arguments
    summed = ops.reduce_scatter_tensor(gradient.contiguous(), "sum", group_size, group_name)
    return ops.wait_tensor(summed), None, None


def _reduce_scatter_backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    reduce_op, group_size, group_name = context.arguments
    check_differentiable(reduce_op)
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(gradient.contiguous(), group_size, group_name))
    return gathered if reduce_op == "sum" else gathered / group_size, None, None, None


def _all_to_all_backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    output_splits, input_splits, group_name = context.arguments
    returned = ops.all_to_all_single(gradient.contiguous(), input_splits, output_splits, group_name)
    return ops.wait_tensor(returned), None, None, None


for _name, _backward in (
    ("all_reduce", _all_reduce_backward),
    ("all_gather_into_tensor", _all_gather_backward),
    ("reduce_scatter_tensor", _reduce_scatter_backward),
    ("all_to_all_single", _all_to_all_backward),
):
    torch.library.register_autograd(f"torchestra::{_name}", _backward, setup_context=_keep, lib=_library)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _wait_below_autograd(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _wait_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return ops.wait_tensor.default(tensor)  # type: ignore[no-any-return]


def _wait_with_derivative(tensor: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Wait.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return _wait_below_autograd(tensor)


def _wait_functionalized(tensor: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.functional_tensor import CppFunctionalizeAPI

    functional = CppFunctionalizeAPI()
    with functional.redispatch_to_next():
        result = ops.wait_tensor.default(functional.unwrap_tensors(tensor))
    return cast(torch.Tensor, functional.wrap_tensors(result))


_library.impl("wait_tensor", _wait_with_derivative, "Autograd")
_library.impl("wait_tensor", _wait_functionalized, "Functionalize")
