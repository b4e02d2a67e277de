"""The state of a ZeroRedundancyOptimizer, of which each parameter's part is on several ranks.

All ranks that hold a parameter's part (its holders) make the same update of it, by the same gradient, so a
replica costs computation and no traffic. Invariant: between two updates each part is on min(replicas + 1,
ranks) ranks, which are on min(replicas + 1, hosts) hosts; so if at most ``replicas`` ranks die before the
parts are divided anew, or all ranks of at most ``replicas`` hosts where there are more hosts than that,
every part is left on some rank. A part that moves is dropped from its old holder only when the new one has
it (state.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchestra.errors import InvalidArgumentError
from torchestra.optim.shards import Shards
from torchestra.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from torchestra.process_group import ProcessGroup

Holders = list[list[int]]
"""By parameter, the ranks that hold its part of the state; the first one sends the updated parameter."""


def assign_holders(sizes: Sequence[int], held: Holders, host_of: Sequence[int], copies: int) -> Holders:
    """Choose the holders of each part: on many hosts, with equal loads as far as can be, and with few moves.

    Largest first, as in ``optim.shards.partition``. The holders of a part are on as many hosts as there can
    be; of the ranks that this leaves, a part stays where it is while that rank's load is within a fair share.
    All ranks find the same.

    Args:
        sizes: elements of each part.
        held: by part, the ranks that have it.
        host_of: by rank, the index of its host.
        copies: how many holders each part gets, at most one on a rank.
    """
    ranks = len(host_of)
    copies = min(copies, ranks)
    fair = -(-sum(sizes) * copies // ranks)
    loads, sent = [0] * ranks, [0] * ranks
    holders: Holders = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size = sizes[index]
        preferred = sorted(
            range(ranks),
            key=lambda rank: (loads[rank] + size > fair, rank not in held[index], loads[rank], rank),
        )
        chosen = _on_most_hosts(preferred, host_of, copies)
        for rank in chosen:
            loads[rank] += size
        sender = min(chosen, key=lambda rank: (sent[rank], rank))
        sent[sender] += size
        holders[index] = [sender, *sorted(set(chosen) - {sender})]
    return holders


def _on_most_hosts(preferred: Sequence[int], host_of: Sequence[int], count: int) -> list[int]:
    """Return the first ranks of an order, but no second one of a host while there are other hosts."""
    times: Counter[int] = Counter()
    turns = []  # by rank, in that order, how many of its host come before it
    for rank in preferred:
        turns.append(times[host_of[rank]])
        times[host_of[rank]] += 1
    order = sorted(range(len(preferred)), key=turns.__getitem__)
    return [preferred[place] for place in order[:count]]


class Move(NamedTuple):
    """Say which parts go from which ranks to which; each rank that has them sends a share."""

    parameters: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class ShardedOptimizer:
    """A part of the state (parts.py) that has a ZeroRedundancyOptimizer's options, and knows its shares.

    Attributes:
        name: of the part.
        optimizer: the optimizer.
        sizes: elements of each parameter.
        held: the numbers of the parameters whose state this rank has.

    Raises:
        InvalidArgumentError: the optimizer has made steps, or divides parameters by itself.
    """

    def __init__(self, name: str, optimizer: ZeroRedundancyOptimizer) -> None:
        if optimizer.overlap is not None or optimizer.optim.state:
            raise InvalidArgumentError(
                f"elastic.State: {name} is a ZeroRedundancyOptimizer that"
                + (" has made steps" if optimizer.overlap is None else " has `overlap_with_ddp=True`")
                + ". The state divides its parameters with replicas: give it a new one without that option"
            )
        self.name, self.optimizer = name, optimizer
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.sizes = [each.numel() for each in self._parameters]
        self.held: frozenset[int] = frozenset()
        self._sent: list[int] = []

    def value(self) -> Any:
        """Return the options of the parameter groups as an optimizer's state_dict has them."""
        numbers = iter(range(len(self._parameters)))
        return {
            "param_groups": [
                {**group, "params": [next(numbers) for _ in group["params"]]}
                for group in self.optimizer.param_groups
            ]
        }

    def load(self, value: Any) -> None:
        """Take over the options, and the state of all parameters if the value has it (of a checkpoint)."""
        for group, options in zip(self.optimizer.param_groups, value["param_groups"], strict=True):
            group.update((name, each) for name, each in options.items() if name != "params")
        self.adopt(value.get("state", {}))

    def begin(self) -> None:
        """Have the state of all parameters, which is that of no step: no other rank has any."""
        self.optimizer.optim.state.clear()
        self.held = frozenset(range(len(self._parameters)))

    def states(self, indices: Sequence[int]) -> dict[int, Any]:
        """Return the state of some parameters, by number; without that of parameters that have none here."""
        state = self.optimizer.optim.state
        return {index: dict(state.get(self._parameters[index], {})) for index in indices}

    def sent_states(self) -> dict[int, Any]:
        """Return the state of the parameters that this rank, and no other, sends to those without."""
        return self.states(self._sent)

    def adopt(self, states: dict[int, Any]) -> None:
        """Take over the state of some parameters; what this rank has stays."""
        for index, value in states.items():
            if value:
                self.optimizer.optim.state[self._parameters[index]] = value
        self.held |= states.keys()

    @staticmethod
    def moves(before: Holders, after: Holders) -> list[Move]:
        """Return what new holders have to receive; parts with the same ranks go together."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if targets := tuple(rank for rank in sorted(new) if rank not in old):
                found.setdefault((tuple(old), targets), []).append(index)
        return [Move(tuple(indices), sources, targets) for (sources, targets), indices in found.items()]

    def divide(self, holders: Holders, group: ProcessGroup) -> None:
        """Hold what these holders say, and drop all else; every rank calls this."""
        self.optimizer.hold(dict(zip(self._parameters, holders, strict=True)), group)
        self.held = frozenset(index for index, ranks in enumerate(holders) if group.rank() in ranks)
        self._sent = [index for index, ranks in enumerate(holders) if group.rank() == ranks[0]]

    def send_from(self, holders: Holders, group: ProcessGroup) -> None:
        """Bring each parameter, as its first holder has it, to all; every rank calls this."""
        shares: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
        for parameter, ranks in zip(self._parameters, holders, strict=True):
            shares[ranks[0]].append(parameter)
        Shards(shares, group, as_views=False).exchange()
