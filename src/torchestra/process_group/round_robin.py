"""Several groups of the same ranks used as one, in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchestra.arguments.annotations import checked
from torchestra.arguments.options import BarrierOptions
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError, shown
from torchestra.process_group.group import ProcessGroup
from torchestra.process_group.methods import CollectiveMethods
from torchestra.types import Timeout


def _in_turn(method: Callable[..., Work]) -> Callable[..., Work]:
    """Return a method of the group whose turn it is; if it refuses the arguments, the turn stays with it."""

    @functools.wraps(method)
    def call(self: RoundRobinGroup, *args: Any, **kwargs: Any) -> Work:
        work = method(self.groups[self.turn], *args, **kwargs)
        self.turn = (self.turn + 1) % len(self.groups)
        return work

    return call


class RoundRobinGroup(CollectiveMethods):
    """Run every operation on the next of its groups.

    As many operations as groups can run at once, since each group has its own memory and its own thread. It
    has the collectives in torch's C++ form, but no messages: ranks that send each other different numbers of
    them would end up in different groups. Every rank must make the same calls.

    Args:
        groups: at least one, in the same order on all ranks; the calling rank has the same number in each.
            They stay usable by themselves, and the program that made them is to destroy them.

    Attributes:
        groups: the groups, as given.
        turn: the index of the group that the next operation runs on.

    Raises:
        InvalidArgumentError: there are no groups, or this rank's place in them differs.
    """

    @checked
    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        if not groups:
            raise InvalidArgumentError(
                f"RoundRobinGroup: at least one group is needed, got `groups` = {shown(groups)}"
            )
        memberships = [(group.rank(), group.size()) for group in groups]
        if len(set(memberships)) > 1:
            raise InvalidArgumentError(
                "RoundRobinGroup: this rank must have the same rank and size in all groups, got (rank, size)"
                f" {', '.join(map(str, memberships))}"
            )
        self.groups = tuple(groups)
        self.turn = 0

    def rank(self) -> int:
        """This rank's number in the groups."""
        return self.groups[0].rank()

    def size(self) -> int:
        """Return how many ranks the groups have."""
        return self.groups[0].size()

    def barrier(
        self, opts: BarrierOptions | Timeout | None = None, *, timeout: Timeout | None = None
    ) -> Work:
        """Complete when every rank has called this, and all earlier operations on all the groups are done."""
        works = [group.barrier(opts, timeout=timeout) for group in self.groups]
        done = Work(f"barrier of {self!r}")

        def tell(_: object) -> None:
            error = next((work.exception() for work in works if work.exception() is not None), None)
            if error is None:
                done.finish([])
            else:
                done.fail(error)

        torch.futures.collect_all([work.get_future() for work in works]).add_done_callback(tell)
        return done

    def __repr__(self) -> str:
        return f"<RoundRobinGroup of {list(self.groups)}>"


for _name, _method in vars(CollectiveMethods).items():
    if callable(_method) and not _name.startswith("__") and _name != "barrier":
        setattr(RoundRobinGroup, _name, _in_turn(_method))
