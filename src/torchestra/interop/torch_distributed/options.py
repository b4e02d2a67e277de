"""Torch's option objects and reduce operations, as torchestra's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch._C import _distributed_c10d as c10d

from torchestra.arguments import options as our
from torchestra.arguments.options import OperationOptions
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp

# The values of BXOR and so on; the names are the same. One of ours alone has no value here.
_REDUCTIONS: dict[int, ReduceOp] = {
    int(getattr(c10d.ReduceOp.RedOpType, name)): getattr(ReduceOp, name)
    for name in ReduceOp._NAMES
    if hasattr(c10d.ReduceOp.RedOpType, name) and name != "PREMUL_SUM"
}
_OPTIONS: dict[type, type[OperationOptions]] = {
    getattr(c10d, name): getattr(our, name)
    for name in our.__all__
    if name.endswith("Options") and hasattr(c10d, name)
}


def reduction(op: Any) -> ReduceOp:
    """Return torchestra's reduce operation for torch's.

    Raises:
        InvalidArgumentError: torchestra has no such operation.
    """
    kind: Any = op if isinstance(op, c10d.ReduceOp.RedOpType) else op.op
    if (found := _REDUCTIONS.get(int(kind))) is not None:
        return found
    if kind == c10d.ReduceOp.PREMUL_SUM and kind is not op:
        _, factor = op.__getstate__()
        return ReduceOp.premul_sum(float(factor))
    raise InvalidArgumentError(f"torchestra has no reduce operation {op}")


def convert_argument(value: Any) -> Any:
    """Convert an argument of a method of torch's groups for the same method of torchestra's."""
    kind = _OPTIONS.get(type(value))
    if kind is not None:
        given = {each.name: getattr(value, each.name) for each in fields(kind) if hasattr(value, each.name)}
        if "reduceOp" in given:
            given["reduceOp"] = reduction(given["reduceOp"])
        return kind(**given)
    if isinstance(value, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
        return reduction(value)
    return value
