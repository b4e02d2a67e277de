"""Converts the state of an optimizer that is divided between ranks, from the parts to the whole and back.

In a ``state_dict`` parameters are numbers: their positions in the list of all parameters of all groups. A
rank's optimizer counts only its own, so numbers are translated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from torchestra.collectives.objects import gather_object
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.tensors import checks


def collect_states(state: dict[str, Any], to: int, group: ProcessGroup) -> list[dict[str, Any]]:
    """Return the states of all ranks on rank ``to``, an empty list on the others. All ranks must call it."""
    checks.check_rank(to, group.size(), "to", "consolidate_state_dict")
    found: list[Any] = [None] * group.size()
    is_there = group.rank() == to
    gather_object(state, found if is_there else None, group=group, group_dst=to)
    return found if is_there else []


def part_of_state(
    state: dict[str, Any],
    held: Sequence[Sequence[torch.Tensor]],
    share: Sequence[Sequence[torch.Tensor]],
) -> dict[str, Any]:
    """Return the state of some of an optimizer's parameters, as an optimizer of only these would have it.

    Args:
        state: the state_dict of an optimizer, whose parameters are ``held``, by group.
        share: of these, by group, those that are wanted.
    """
    position_of = {id(each): position for position, each in enumerate(p for part in held for p in part)}
    positions = [position_of[id(each)] for part in share for each in part]
    return {
        "state": {new: state["state"][old] for new, old in enumerate(positions) if old in state["state"]},
        "param_groups": state["param_groups"],
    }


def _indices(groups: Sequence[dict[str, Any]]) -> dict[torch.Tensor, int]:
    every = [parameter for group in groups for parameter in group["params"]]
    return {parameter: index for index, parameter in enumerate(every)}


def global_state(
    groups: Sequence[dict[str, Any]],
    shares: Sequence[Sequence[Sequence[torch.Tensor]]],
    states: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the state as one optimizer with these parameter groups would have it.

    Args:
        shares: for each rank, for each group, its parameters.
        states: for each rank, the state_dict of its optimizer.
    """
    index_of = _indices(groups)
    state: dict[int, Any] = {}
    for of_groups, local in zip(shares, states, strict=True):
        every = [parameter for share in of_groups for parameter in share]
        for position, value in local["state"].items():
            state[index_of[every[position]]] = value
    packed = []
    for group, options in zip(groups, states[0]["param_groups"], strict=True):
        packed.append({**options, "params": [index_of[parameter] for parameter in group["params"]]})
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def local_state(
    groups: Sequence[dict[str, Any]], share: Sequence[Sequence[torch.Tensor]], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of the global state that one rank's optimizer loads.

    Args:
        share: for each group, the rank's parameters.
        state_dict: as :func:`global_state` returns it.

    Raises:
        InvalidArgumentError: the state is of other parameter groups.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise InvalidArgumentError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, and this optimizer"
            f" has {len(groups)}"
        )
    names: dict[torch.Tensor, Any] = {}
    for index, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise InvalidArgumentError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's"
                f" group: group {index} has {len(theirs['params'])} parameters, and here"
                f" {len(ours['params'])}"
            )
        names.update(zip(ours["params"], theirs["params"], strict=True))
    state, packed, position = {}, [], 0
    for theirs, members in zip(saved, share, strict=True):
        packed.append({**theirs, "params": list(range(position, position + len(members)))})
        for parameter in members:
            if names[parameter] in state_dict["state"]:
                # Optimizers keep the loaded tensors without a copy, and change them.
                state[position] = copy.deepcopy(state_dict["state"][names[parameter]])
            position += 1
    return {"state": state, "param_groups": packed}
