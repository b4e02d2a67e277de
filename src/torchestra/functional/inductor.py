"""Lowerings of the operators for Inductor: a result is written later, and waited for when it is used.

For an operator that it does not know, Inductor takes the outputs as ready and the inputs as free when the
call returns. Neither holds here, so the operators get lowerings, to Inductor's kernels for collectives. A
collective keeps its input, and its output must not be touched, until the wait; all_reduce and broadcast work
in place if the input is not needed any more; a wait changes a buffer and copies nothing. Inductor also keeps
collectives in one order, the graph's, which is the same on all ranks. Messages are in that order, too: ranks'
programs differ then, and two of them must not wait for each other.

Inductor's default passes do not know our operators, and leave a wait where the program has it, which is right
after its collective. :class:`Overlap` moves the two apart, so that the nodes between run meanwhile.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from torchestra.engine.operations import COLLECTIVES
from torchestra.errors import DistError

Lowering = Callable[..., Any]

_ROWS = [row for row in COLLECTIVES.values() if row.functional]
_NAMES = (
    *(row.functional for row in _ROWS),
    *(f"{row.functional}_coalesced" for row in _ROWS if row.coalesced),
)

MESSAGES = ("begin_send", "begin_receive", "end_send", "end_receive")
"""The operators of messages."""

_lowered = False
_lock = threading.Lock()


def lower_collectives() -> None:
    """Register the lowerings with Inductor, if it is loaded.

    The operators' fake kernels call this: a graph is traced with fake tensors after Inductor was loaded
    and before it is lowered. So Inductor, which takes seconds to import, need not be loaded for this.
    """
    global _lowered
    if _lowered or not hasattr(sys.modules.get("torch._inductor.lowering"), "register_lowering"):
        return
    with _lock:
        if not _lowered:
            _register()
            _lowered = True


def _register() -> None:
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    for operator, lower in _lowerings().items():
        add_layout_constraint(operator, constrain_to_fx_strides)
        register_lowering(operator, type_promotion_kind=None)(_called_from_python(lower))
    post_grad.pass_patterns.append(cast(Any, Overlap()))
    passes: Any = post_grad
    passes.reorder_for_locality = _unless_messages(passes.reorder_for_locality)


def _lowerings() -> dict[Any, Lowering]:
    """Return the lowering of each operator: in place if the collective is."""
    ops = torch.ops.torchestra
    lowerings: dict[Any, Lowering] = {ops.wait_tensor: _lower_wait}
    for row in _ROWS:
        operator = getattr(ops, row.functional)
        in_place = (
            partial(_lower_in_place, getattr(ops, f"{row.functional}_").default) if row.in_place else None
        )
        lowerings[operator] = in_place or partial(_lower_out_of_place, operator.default)
        if row.coalesced:
            several = getattr(ops, f"{row.functional}_coalesced")
            out_of_place = partial(_lower_out_of_place, several.default)
            lowerings[several] = partial(_lower_each, in_place) if in_place else out_of_place
    for name in MESSAGES:
        lowerings[getattr(ops, name)] = partial(_lower_out_of_place, getattr(ops, name).default)
    return lowerings


def _unless_messages(reorder: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
    """Return a pass for graphs without messages.

    It would begin collectives later: two ranks of which one has a message before a collective, and the other
    behind it, would wait for each other.
    """

    @functools.wraps(reorder)
    def apply(graph: fx.Graph) -> None:
        if not any(_is_message(node) for node in graph.nodes):
            reorder(graph)

    return apply


def _is_message(node: fx.Node) -> bool:
    """Return whether a node is a message's operator, which its effect has wrapped."""
    if node.target is not torch.ops.higher_order.with_effects:
        return False
    return any(node.args[1] is getattr(torch.ops.torchestra, name).default for name in MESSAGES)


def _called_from_python(lower: Lowering) -> Lowering:
    from torch._inductor.virtualized import V

    def checked(*arguments: Any) -> Any:
        if V.graph.cpp_wrapper:
            raise DistError(
                "Inductor's C++ wrapper would wait for torch.distributed's collectives, not for these:"
                " compile with cpp_wrapper=False"
            )
        return lower(*arguments)

    return checked


def _lower_out_of_place(operator: Any, *arguments: Any) -> Any:
    from torch._inductor import ir

    made = ir._CollectiveKernel.create_out_of_place(operator, *arguments)
    boxed: Callable[[Any], Any] = ir.TensorBox.create
    return [boxed(each) for each in made] if isinstance(made, list) else boxed(made)


def _lower_in_place(operator: Any, tensor: Any, *arguments: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    require_contiguous: Callable[[Any], Any] = ir.ExternKernel.require_contiguous
    buffer = require_contiguous(clone(tensor))
    with V.graph.fake_mode:
        made: Any = ir._CollectiveKernel.process_kernel(operator, buffer, *arguments)
    if not isinstance(made, tuple):  # torch 2.15 names its parts
        made = (None, made.tensor_args, made.non_tensor_args, made.unflatten_args, None)
    _, tensors, others, unflatten, _ = made
    for each in tensors:
        each.realize()
        V.graph.mark_buffer_mutated(each.get_name())
    layout = ir.NoneLayout(device=buffer.get_device())
    ir._CollectiveKernel(layout, operator, tensors, others, unflatten)
    return buffer


def _lower_each(lower: Lowering, tensors: Any, *arguments: Any) -> Any:
    return [lower(tensor, *arguments) for tensor in tensors]


def _lower_wait(tensor: Any) -> Any:
    """Lower a wait, which comes after the messages before it: other ranks may need them to come this far."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    known = len(graph.operations)
    ir._WaitKernel.create_wait(torch.ops.torchestra.wait_tensor.default, tensor)
    for message in getattr(graph, "effectful_ops", {}).values():
        # torch 2.15 keeps what only orders operations apart from what they read.
        apart = not hasattr(graph, "additional_star_deps")
        after = graph.additional_buffer_deps if apart else graph.additional_star_deps
        for operation in graph.operations[known:]:
            after[operation.get_name()].add(message.get_name())
    return tensor


class Overlap:
    """A pass over a graph that moves collectives as early, and waits as late, as arguments and users allow.

    Collectives keep their order. Nothing is moved past a node that changes a tensor. A matrix product that
    Inductor has fused with the addition of a result that is waited for is taken apart again, so that it need
    not wait.
    """

    def apply(self, graph: fx.Graph) -> int:
        """Change the graph; return how many nodes were moved or replaced."""
        return _unfuse_additions(graph) + _hoist_collectives(graph) + _sink_waits(graph)


def _is(node: fx.Node, names: tuple[str, ...]) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(
        target is getattr(torch.ops.torchestra, name).default for name in names
    )


def _is_fence(node: fx.Node) -> bool:
    """Return whether a node may change a tensor: one of another operator, or of an operator on operators."""
    if node.op != "call_function":
        return node.op == "output"
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _unfuse_additions(graph: fx.Graph) -> int:
    aten = torch.ops.aten
    unfused = 0
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        added, first, second = node.args
        if not isinstance(added, fx.Node) or not _is(added, ("wait_tensor",)) or node.kwargs:
            continue
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, (first, second))
            total = graph.call_function(aten.add.Tensor, (product, added))
        product.meta.update(node.meta)
        total.meta.update(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        unfused += 1
    return unfused


def _hoist_collectives(graph: fx.Graph) -> int:
    """Between two collectives, compute first the arguments of the second, and begin it then.

    Other nodes are not delayed any further, because they may keep memory from being freed.
    """
    nodes = list(graph.nodes)
    order: list[fx.Node] = []
    since: list[fx.Node] = []  # the last collective, or fence
    for node in nodes:
        if _is(node, _NAMES):
            needed = _ancestors_among(since, node)
            order += [*(each for each in since if each in needed), node]
            order += [each for each in since if each not in needed]
            since = []
        elif node.op == "placeholder" or _is_fence(node):
            order += [*since, node]
            since = []
        else:
            since.append(node)
    moved = sum(before is not after for before, after in zip(nodes, order, strict=True))
    if moved:
        for node in order[:-1]:
            order[-1].prepend(node)
    return moved


def _ancestors_among(candidates: list[fx.Node], node: fx.Node) -> set[fx.Node]:
    among, found, left = set(candidates), set[fx.Node](), [node]
    while left:
        for each in left.pop().all_input_nodes:
            if each in among and each not in found:
                found.add(each)
                left.append(each)
    return found


def _sink_waits(graph: fx.Graph) -> int:
    moved = 0
    for node in reversed(list(graph.nodes)):
        if not _is(node, ("wait_tensor",)):
            continue
        following = node.next
        while following.op != "output" and following not in node.users and not _is_fence(following):
            following = following.next
        if following is not node.next:
            following.prepend(node)
            moved += 1
    return moved
