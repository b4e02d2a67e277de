"""A tensor that is waited for when it is first used after a collective, also in a traced program.

For programs that call collectives with ``async_op=True`` and are traced by ``make_fx``: the trace gets a node
for the collective where it is called, and a node that waits for it where its result is first used. Operations
in between overlap with it. It follows torch's CommTensor.

It traces the functions of collectives/functions.py, except messages, but no object collectives. All ranks of
the group trace, and later run, together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_innermost_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map_only

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.engine.operations import COLLECTIVES, Collective
from torchestra.types import ReduceOp
from torchestra.world.registry import current_world


class Begun(NamedTuple):
    """A collective that a traced program has begun: the tensors that it fills, and its Work."""

    filled: list[torch.Tensor]
    work: Work


def wait_comm(begun: Begun) -> torch.Tensor | list[torch.Tensor]:
    """Wait, in a traced program, for a collective; return the tensor that it has filled, or all of them."""
    begun.work.wait()
    return begun.filled[0] if len(begun.filled) == 1 else begun.filled


def _begin(method: str, group_name: str, arguments: dict[str, Any]) -> Begun:
    values = dict(arguments)
    if values["op"] is not None:
        values["op"] = ReduceOp(*values["op"])
    communicator = current_world().group(group_name).communicator
    filled = values["output"]
    work = communicator.collective(COLLECTIVES[method], **values, async_op=True)
    assert work is not None
    return Begun(list(filled) if isinstance(filled, (list, tuple)) else [filled], work)


def _node_function(method: str) -> Callable[..., Begun]:
    """Make the function, with its own name, that a traced program calls for an operation."""

    def begin(group_name: str, **arguments: Any) -> Begun:
        return _begin(method, group_name, arguments)

    begin.__name__ = begin.__qualname__ = f"{method}_"
    begin.__doc__ = f"Begin, in a traced program, ``{method}`` on the group of a name."
    return begin


_NODES = {name: _node_function(name) for name, row in COLLECTIVES.items() if row.output is not None}


class _Pending:
    """A collective that has been called, and may have been recorded."""

    def __init__(self, work: Work | None, node: Proxy | None, count: int) -> None:
        self.work = work
        self._node = node
        self._count = count
        self._waited: Any = None

    def wait(self, tensor: torch.Tensor, index: int) -> None:
        """Wait, and record that: from now on ``tensor`` is the tensor at this index of the result."""
        if self.work is not None:
            self.work.wait()
        if self._node is not None:
            tracer = self._node.tracer
            if self._waited is None:
                self._waited = tracer.create_proxy("call_function", wait_comm, (self._node,), {}, "wait_comm")
            result = self._waited if self._count == 1 else self._waited[index]
            with disable_proxy_modes_tracing():
                track_tensor_tree(tensor, result, constant=None, tracer=tracer)  # type: ignore[arg-type]


class CommTensor(torch.Tensor):
    """A tensor for collectives: see the module's text.

    ``CommTensor(tensor)`` shares the tensor's memory; a CommTensor is returned as it is. Until a collective
    has been called on it, tensors computed from it are CommTensors too; afterwards the first use waits, and
    the results are plain tensors.
    """

    _tensor: torch.Tensor
    _pending: _Pending | None
    _index: int
    _communicated: bool

    __slots__ = ["_communicated", "_index", "_pending", "_tensor"]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> CommTensor:
        if isinstance(tensor, CommTensor):
            return tensor
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        assert isinstance(made, CommTensor)
        made._tensor, made._pending, made._index, made._communicated = tensor, None, 0, False
        return made

    @classmethod
    def _is_supported(cls, op_name: str) -> bool:
        """Return whether a node of a traced program that calls a function of this name is a collective."""
        return op_name in {node.__name__ for node in _NODES.values()}

    def wait(self) -> torch.Tensor:
        """Wait for the collective that was called last, if any; return the plain tensor."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait(self._tensor, self._index)
        return self._tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CommTensor({self.wait()!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        communicated = False

        def plain(tensor: CommTensor) -> torch.Tensor:
            nonlocal communicated
            communicated |= tensor._communicated
            return tensor.wait()

        args, kwargs = tree_map_only(CommTensor, plain, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return result if communicated else tree_map_only(torch.Tensor, CommTensor, result)

    @classmethod
    def __torchestra_collective__(
        cls,
        communicator: Communicator,
        row: Collective,
        output: Any,
        input: Any,  # noqa: A002 - the row's word
        op: ReduceOp | None,
        root: int | None,
        splits: tuple[Any, Any],
        async_op: bool,
        timeout_s: float | None,
    ) -> Work | None:
        filled = list(output) if isinstance(output, (list, tuple)) else [] if output is None else [output]
        given = {"output": output, "input": input, "op": op, "root": root, "splits": splits}
        given["timeout_s"] = timeout_s
        plain = tree_map_only(CommTensor, lambda tensor: tensor.wait(), given)
        mode = get_innermost_proxy_mode()
        if mode is None:
            work, node = communicator.collective(row, **plain, async_op=True), None
        else:
            with disable_proxy_modes_tracing():
                work = communicator.collective(row, **plain, async_op=True)
            node = _recorded(mode.tracer, row.name, communicator.name, plain)
        pending = _Pending(work, node, len(filled))
        for index, tensor in enumerate(filled):
            if isinstance(tensor, CommTensor):
                tensor._pending, tensor._index, tensor._communicated = pending, index, True
                if not async_op:
                    tensor.wait()
        assert work is not None
        if async_op:
            return work
        work.wait()
        return None


def _recorded(tracer: Any, method: str, group_name: str, arguments: dict[str, Any]) -> Proxy:
    """Add a node for a collective to the program that is being traced."""

    def proxy_of(tensor: torch.Tensor) -> Any:
        return get_proxy_slot(tensor, tracer, tensor, lambda slot: slot.proxy)

    values = tree_map_only(torch.Tensor, proxy_of, arguments)
    if values["op"] is not None:
        values["op"] = (values["op"].name, values["op"].factor)
    node = tracer.create_proxy("call_function", _NODES[method], (group_name,), values)
    assert isinstance(node, Proxy)
    return node
