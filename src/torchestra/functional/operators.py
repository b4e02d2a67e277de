"""The functional collectives as torch operators: ``torch.ops.torchestra.*``.

Every operator returns new tensors, at once; ``wait_tensor`` returns its argument when its contents are there.
An operator knows its group by name, so that graphs hold nothing but strings and numbers, and finds it when it
runs. Those that end in ``_`` work in place; they are for Inductor.

``wait_tensor`` says truthfully that it returns what it is given. In a functional graph, though, its result is
a tensor of its own: the one that may be read. So it has a functionalization and a derivative of its own
making, which torch does not make for operators that return views.

Fake kernels give shapes alone. They check what can be checked without a group, so that a mistake shows
while a program is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torchestra.communicator import multi_tensor, work_registry
from torchestra.communicator.work import Work
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
    """The reduce operation of a name in lower case, as operators take it.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    op = _REDUCTIONS.get(name)
    if op is None:
        raise InvalidArgumentError(
            f"unknown reduce operation {name!r}; functional collectives know {', '.join(_REDUCTIONS)}"
        )
    return op


def _define(schema: str, kernel: Kernel, fake: Kernel) -> None:
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")

    def fake_kernel(*arguments: Any) -> Any:
        lower_collectives()
        return fake(*arguments)

    torch.library.register_fake(f"torchestra::{name}", fake_kernel, lib=_library)


def _group(name: str, size: int | None = None) -> ProcessGroup:
    group = current_world().group(name)
    if size is not None and group.size() != size:
        raise InvalidArgumentError(
            f"this operation was compiled for a group of {size} ranks, and group {name!r} has {group.size()}"
            " now: call torch.compiler.reset() after another world was made"
        )
    return group


def _expect(output: torch.Tensor, work: Work | None, group: ProcessGroup, what: str) -> torch.Tensor:
    assert work is not None
    work_registry.expect(
        output, work, group, f"{what} on {tuple(output.shape)} of group {group.group_name!r}"
    )
    return output


# -- shapes


def _like(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _reduced_like(tensor: torch.Tensor, reduce_op: str, *_: Any) -> torch.Tensor:
    reduction(reduce_op)
    return _like(tensor)


def _gathered(tensor: torch.Tensor, group_size: int, *_: Any) -> torch.Tensor:
    first, rest = (tensor.shape[0], tensor.shape[1:]) if tensor.dim() else (1, ())
    return tensor.new_empty((first * group_size, *rest))


def _scattered(tensor: torch.Tensor, reduce_op: str, group_size: int, *_: Any) -> torch.Tensor:
    reduction(reduce_op)
    if not tensor.dim() or tensor.shape[0] % group_size:
        raise InvalidShapeError(
            f"reduce_scatter_tensor: input dimension 0 of shape {tuple(tensor.shape)} must be a multiple of"
            f" group_size {group_size}"
        )
    return tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:]))


def _exchanged(tensor: torch.Tensor, output_splits: Sequence[int] | None, *_: Any) -> torch.Tensor:
    if output_splits is None:
        return tensor.new_empty(tensor.shape)
    for length in output_splits:
        torch._check(length >= 0, lambda: f"output_split_sizes must not be negative, got {output_splits}")
    return tensor.new_empty((sum(output_splits), *tensor.shape[1:]))


def _nothing(*_: Any) -> None:
    return None


def _each(fake: Kernel) -> Kernel:
    return lambda tensors, *arguments: [fake(tensor, *arguments) for tensor in tensors]


# -- kernels


def _all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    output = tensor.clone(memory_format=torch.contiguous_format)
    _all_reduce_(output, reduce_op, group_name)
    return output


def _all_reduce_(tensor: torch.Tensor, reduce_op: str, group_name: str) -> None:
    group = _group(group_name)
    work_registry.wait_for(tensor)
    work = group.communicator.all_reduce(tensor, reduction(reduce_op), async_op=True)
    _expect(tensor, work, group, "all_reduce")


def _all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], reduce_op: str, group_name: str
) -> list[torch.Tensor]:
    group, op = _group(group_name), reduction(reduce_op)
    outputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    work = multi_tensor.all_reduce_coalesced(group.communicator, outputs, op, async_op=True)
    return [_expect(output, work, group, "all_reduce_coalesced") for output in outputs]


def _broadcast(tensor: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    output = tensor.clone(memory_format=torch.contiguous_format)
    _broadcast_(output, src, group_name)
    return output


def _broadcast_(tensor: torch.Tensor, src: int, group_name: str) -> None:
    group = _group(group_name)
    work_registry.wait_for(tensor)
    if not 0 <= src < group.size():
        raise InvalidArgumentError(
            f"broadcast: src is {src}, but the group has ranks 0 to {group.size() - 1}"
        )
    _expect(tensor, group.communicator.broadcast(tensor, src, async_op=True), group, "broadcast")


def _all_gather_into_tensor(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    group = _group(group_name, group_size)
    output = _gathered(tensor, group_size)
    work = group.communicator.all_gather_into_tensor(output, tensor, async_op=True)
    return _expect(output, work, group, "all_gather_into_tensor")


def _all_gather_into_tensor_coalesced(
    tensors: Sequence[torch.Tensor], group_size: int, group_name: str
) -> list[torch.Tensor]:
    group = _group(group_name, group_size)
    outputs = [_gathered(tensor, group_size) for tensor in tensors]
    work = multi_tensor.all_gather_into_tensor_coalesced(group.communicator, outputs, tensors, async_op=True)
    return [_expect(output, work, group, "all_gather_into_tensor_coalesced") for output in outputs]


def _reduce_scatter_tensor(
    tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: str
) -> torch.Tensor:
    group = _group(group_name, group_size)
    output = _scattered(tensor, reduce_op, group_size)
    work = group.communicator.reduce_scatter_tensor(output, tensor, reduction(reduce_op), async_op=True)
    return _expect(output, work, group, "reduce_scatter_tensor")


def _reduce_scatter_tensor_coalesced(
    tensors: Sequence[torch.Tensor], reduce_op: str, group_size: int, group_name: str
) -> list[torch.Tensor]:
    group, op = _group(group_name, group_size), reduction(reduce_op)
    outputs = [_scattered(tensor, reduce_op, group_size) for tensor in tensors]
    work = multi_tensor.reduce_scatter_tensor_coalesced(
        group.communicator, outputs, tensors, op, async_op=True
    )
    return [_expect(output, work, group, "reduce_scatter_tensor_coalesced") for output in outputs]


def _all_to_all_single(
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group_name: str,
) -> torch.Tensor:
    group = _group(group_name)
    output = _exchanged(tensor, output_splits)
    work = group.communicator.all_to_all_single(output, tensor, output_splits, input_splits, async_op=True)
    return _expect(output, work, group, "all_to_all_single")


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    work_registry.wait_for(tensor)
    return tensor


_OPERATORS: tuple[tuple[str, Kernel, Kernel], ...] = (
    ("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", _all_reduce, _reduced_like),
    (
        "all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> ()",
        _all_reduce_,
        _nothing,
    ),
    (
        "all_reduce_coalesced(Tensor[] inputs, str reduce_op, str group_name) -> Tensor[]",
        _all_reduce_coalesced,
        _each(_reduced_like),
    ),
    ("broadcast(Tensor input, int src, str group_name) -> Tensor", _broadcast, _like),
    (
        "broadcast_(Tensor(a!) input, int src, str group_name) -> ()",
        _broadcast_,
        _nothing,
    ),
    (
        "all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor",
        _all_gather_into_tensor,
        _gathered,
    ),
    (
        "all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, str group_name) -> Tensor[]",
        _all_gather_into_tensor_coalesced,
        _each(_gathered),
    ),
    (
        "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor",
        _reduce_scatter_tensor,
        _scattered,
    ),
    (
        "reduce_scatter_tensor_coalesced"
        "(Tensor[] inputs, str reduce_op, int group_size, str group_name) -> Tensor[]",
        _reduce_scatter_tensor_coalesced,
        _each(_scattered),
    ),
    (
        "all_to_all_single(Tensor input, SymInt[]? output_split_sizes, SymInt[]? input_split_sizes,"
        " str group_name) -> Tensor",
        _all_to_all_single,
        _exchanged,
    ),
    ("wait_tensor(Tensor(a) input) -> Tensor(a)", _wait_tensor, torch.empty_like),
)

for _schema, _kernel, _fake in _OPERATORS:
    _define(_schema, _kernel, _fake)

ops = torch.ops.torchestra
"""The operators, as they appear in graphs."""

# A collective whose result nobody uses takes place all the same: the other ranks are in it too.
torch.fx.node.has_side_effect(ops.wait_tensor.default)


# -- derivatives: what a collective does to values, its transpose does to gradients


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
