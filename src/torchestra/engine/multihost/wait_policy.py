"""Decide whether to go on waiting for a message to or from another host."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.engine.multihost.hierarchy import EXPLANATION_BOUNDS, Hierarchy
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError, RankFailedError
from torchestra.system.deadline import RunningClock

_ON_THE_WAY_SECONDS = 1.0
"""For how long what a rank that is gone has sent before may still be on its way."""

_LONGEST_LOOK = 0.1


class WaitPolicy:
    """Decide for one rank.

    Args:
        has_said_bye: whether all that a rank has sent has come, and it will send no more.
    """

    def __init__(self, hierarchy: Hierarchy, has_said_bye: Callable[[int], bool]) -> None:
        self._hierarchy = hierarchy
        self._has_said_bye = has_said_bye
        self._hosts = hierarchy.hosts
        self._context = hierarchy.context

    def check(self, request: P2PRequest) -> None:
        """Raise if waiting for a message any longer is in vain.

        Raises:
            GroupAbortedError: the group can be used no more, or the other rank has left it.
            RankFailedError: the other rank has died.
            DistBackendError: the connection to it has failed, for unknown reasons.
            CollectiveTimeoutError: its time is over, and it has not begun to move.
        """
        if self._context.is_aborted:
            raise self._context.aborted()
        peer = request.peer if request.partner is None else request.partner
        if peer is not None and (fate := self._hierarchy.detector.fate(peer)) is not None:
            self._give_up_on(request, peer, fate)
        if request.broken is not None:
            since, why = request.broken
            if request.deadline.elapsed() - since > EXPLANATION_BOUNDS * self._hierarchy.detector.bound:
                raise self.failure(request, why)
        elif request.partner is None and request.deadline.expired():
            others = (each for each in range(self._hosts.size) if each != self._hierarchy.rank)
            raise CollectiveTimeoutError(
                f"{request} timed out after {request.timeout_s:.1f} s; the group stays usable."
                f"{self._hierarchy.detector.ask_where_they_are()}{self._context.report([self._hierarchy.local_rank])}",
                tuple(others) if peer is None else (peer,),
            )

    def failure(self, request: P2PRequest, why: str) -> DistBackendError:
        """Return the error to raise if the way to the other rank has failed."""
        peer = request.peer if request.partner is None else request.partner
        name = "another host" if peer is None else self._hosts.describe(peer)
        return DistBackendError(f"{request}: the way to {name} failed: {why}")

    def _give_up_on(self, request: P2PRequest, peer: int, fate: str) -> None:
        """Raise, as the other rank is gone, unless its data may still be on its way."""
        if request.gone_since is None:
            request.gone_since = RunningClock(_LONGEST_LOOK)
        if request.gone_since.elapsed() < _ON_THE_WAY_SECONDS and not self._has_said_bye(peer):
            return
        name = self._hosts.describe(peer)
        why = f"{name} {fate}; {self._hosts.describe(self._hierarchy.rank)} saw it in {request.what}"
        if fate == "died":
            raise RankFailedError(f"{request}: {why}", (peer,))
        raise GroupAbortedError(f"{request}: {why}")
