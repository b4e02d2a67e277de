"""Parameters with their optimizer's state: what a rank can have of a state while it lacks the rest.

A step changes a parameter by its own gradient, its own part of the optimizer's state and the options of its
group, and by nothing else. So it is with torch's optimizers but LBFGS, if no hook of theirs looks at several
parameters. A rank can then make a step's update of the parameters that it has, and has them as they are
on all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as torch_optimizer

_BY_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    )
    if hasattr(torch.optim, name)  # some are younger than the oldest torch
)


class Unit(NamedTuple):
    """Hold a parameter and its optimizer."""

    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer

    def value(self) -> dict[str, Any]:
        """Return the parameter and its part of the optimizer's state, None if none; in use, not copies."""
        state = self.optimizer.state.get(self.parameter)
        return {"parameter": self.parameter.detach(), "state": None if state is None else dict(state)}

    def load(self, value: dict[str, Any]) -> None:
        """Take over what another rank's :meth:`value` returned; its tensors are kept, but the parameter's."""
        mine = self.parameter.detach()
        if mine.data_ptr() != value["parameter"].data_ptr():
            mine.copy_(value["parameter"])
        if value["state"] is None:
            self.optimizer.state.pop(self.parameter, None)
        else:
            self.optimizer.state[self.parameter] = value["state"]

    @property
    def bytes(self) -> int:
        """Return how many bytes it has."""
        state = self.optimizer.state.get(self.parameter) or {}
        tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
        return sum(each.nbytes for each in (self.parameter, *tensors))


class Units:
    """Know the units of a state, and what else it has.

    Attributes:
        all: the units, in an order that is the same on all ranks.
        digest: tells whether two ranks have the same ones.
    """

    def __init__(self, parts: Mapping[str, Any], units: list[Unit]) -> None:
        self.all = units
        specs = [(str(each.parameter.dtype), tuple(each.parameter.shape)) for each in units]
        self.digest = hashlib.sha256(repr(specs).encode()).hexdigest()
        held = {id(each.parameter) for each in units}
        self._parts = parts
        self._names = {
            name: {inner for inner, each in part.named_parameters() if id(each) in held}
            for name, part in parts.items()
            if isinstance(part, torch.nn.Module)
        }

    @staticmethod
    def of(parts: Mapping[str, Any]) -> Units | None:
        """Return the units of a state's parts; None if an update might change them in another way."""
        optimizers = [each for each in parts.values() if isinstance(each, torch.optim.Optimizer)]
        if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
            return None
        units = []
        for optimizer in optimizers:
            hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
            if type(optimizer) not in _BY_PARAMETER or hooks:
                return None
            units += [Unit(each, optimizer) for group in optimizer.param_groups for each in group["params"]]
        if any(type(each.parameter) not in (torch.Tensor, torch.nn.Parameter) for each in units):
            return None
        if not units or len({id(each.parameter) for each in units}) < len(units):
            return None
        return Units(parts, units)

    def others(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what there is beside the units.

        Args:
            values: of all parts.
        """
        found = {}
        for name, value in values.items():
            if name in self._names:
                found[name] = {inner: each for inner, each in value.items() if inner not in self._names[name]}
            elif isinstance(self._parts[name], torch.optim.Optimizer):
                found[name] = {**value, "state": {}}
            else:
                found[name] = value
        return found

    def needed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an update needs beside the units and their gradients."""
        others = self.others(values)
        updating = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        return {name: others[name] for name, part in self._parts.items() if isinstance(part, updating)}

    def completed(self, others: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of parts: what :meth:`others` or :meth:`needed` gave, and this rank's units."""
        found = dict(others)
        for name, other in others.items():
            if name in self._names:
                found[name] = {**values[name], **other}
            elif isinstance(self._parts[name], torch.optim.Optimizer):
                found[name] = {**other, "state": values[name]["state"]}
        return found
