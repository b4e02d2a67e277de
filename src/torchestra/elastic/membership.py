"""Change the members of the default group between the steps of a training."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from torchestra.errors import CollectiveTimeoutError
from torchestra.process_group import ProcessGroup
from torchestra.system.deadline import Deadline
from torchestra.world.init import default_group

_log = logging.getLogger(__name__)
_POLL_S = 0.01


class MembershipChange(NamedTuple):
    """Describe a change of members, as this rank saw it.

    Attributes:
        step: that the training goes on with.
        lost: the member ids that are gone.
        joined: the member ids that have come in.
        size: how many ranks there are now.
        agreed_s: how long the ranks took to agree and to make the new group.
        synced_s: how long it took then until all had the newest state.
        bytes: how many bytes of state this rank has received.
        reason: the first line of the error by which this rank learnt of a loss; "" at a join.
    """

    step: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    size: int
    agreed_s: float
    synced_s: float
    bytes: int
    reason: str

    def __str__(self) -> str:
        lost = f"lost {list(self.lost)}, " if self.lost else ""
        joined = f"joined {list(self.joined)}, " if self.joined else ""
        return (
            f"step {self.step}: {lost}{joined}{self.size} ranks go on after {self.pause_s * 1e3:.0f} ms"
            f" ({self.agreed_s * 1e3:.0f} to agree, {self.synced_s * 1e3:.0f} for the state)"
        )

    @property
    def pause_s(self) -> float:
        """Return how long the training stood still, after this rank had noticed."""
        return self.agreed_s + self.synced_s


class Members:
    """Hold the default group while it changes, and what has changed.

    Attributes:
        group: the present one.
    """

    def __init__(self) -> None:
        self.group = default_group()
        self._explain_loss(False)
        self._lost: list[int] = []
        self._joined: list[int] = []

    def shrink(self) -> None:
        """Go on without those that are gone; every rank that is left calls this."""
        self._enter(self.group.shrink())

    def grow(self) -> None:
        """Let in those that wait, and go on without those that are gone; every rank calls this."""
        self._enter(self.group.grow())

    def _enter(self, group: ProcessGroup) -> None:
        self._lost += [self.group.member_ids[rank] for rank in group.lost_ranks]
        self._joined += [group.member_ids[rank] for rank in group.joined_ranks]
        self.group = group
        self._explain_loss(False)

    def leave(self) -> None:
        """End the watch over the members."""
        self._explain_loss(True)

    def _explain_loss(self, wanted: bool) -> None:
        """Have errors for a rank that is gone tell where all are; the loop needs only to know who is."""
        if (context := self.group.communicator.engine.context) is not None:
            context.explains_loss = wanted

    def wait_for(self, minimum: int) -> None:
        """Wait for ranks to join, and let them in, while there are fewer; every rank calls this.

        Raises:
            CollectiveTimeoutError: not enough came within the group's time-out.
        """
        seconds = self.group.timeout.total_seconds()
        deadline = Deadline(seconds)
        while self.group.size() < minimum:
            if self.group.pending_joiners():
                self.grow()
            elif deadline.expired():
                raise CollectiveTimeoutError(
                    f"elastic.shards: there are {self.group.size()} ranks, `minimum` is {minimum}, and no"
                    f" others have joined within {seconds:.0f} s"
                )
            else:
                time.sleep(_POLL_S)

    def take_change(
        self, step: int, agreed_s: float, synced_s: float, count: int, reason: str
    ) -> MembershipChange:
        """Return what has changed since the last call, and tell the log on rank 0."""
        lost, joined = tuple(self._lost), tuple(self._joined)
        self._lost, self._joined = [], []
        change = MembershipChange(step, lost, joined, self.group.size(), agreed_s, synced_s, count, reason)
        if self.group.rank() == 0:
            _log.info("%s%s", change, f"; {reason}" if reason else "")
        return change
