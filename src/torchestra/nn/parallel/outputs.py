"""Finds the tensors in the output of a forward pass, and the parameters that they depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: itself, or in nested lists, tuples, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple, set, frozenset)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name, None))


def requiring_gradients(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output that a backward may begin from."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def unused_parameters(outputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of the parameters that no output depends on, by autograd's graph.

    Computations inside a node, such as the part of a model that reentrant checkpointing recomputes, are
    not in the graph.
    """
    unused = {id(parameter): index for index, parameter in enumerate(parameters)}
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    for output in outputs:
        unused.pop(id(output), None)
    seen = set(pending)
    while pending and unused:
        for node, _ in pending.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                unused.pop(id(node.variable), None)  # type: ignore[attr-defined]
            else:
                pending.append(node)
    return sorted(unused.values())
