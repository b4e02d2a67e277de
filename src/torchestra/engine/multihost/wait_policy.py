"""Decide whether to go on waiting for a message to or from another host."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.engine.multihost.hierarchy import EXPLANATION_BOUNDS, Hierarchy
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError, RankFailedError
from torchestra.system.deadline import RunningClock

_IN_FLIGHT_SECONDS = 1.0
"""For how long what a rank that is gone has sent before may still be on its way."""

_LONGEST_INTERVAL_S = 0.1


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
        if peer is not None and (end_reason := self._hierarchy.detector.end_reason(peer)) is not None:
            self._give_up_on(request, peer, end_reason)
        if peer is not None and request.deadline.elapsed() > self._hierarchy.detector.interval:
            self._hierarchy.detector.watch([self._hosts.host_of[peer]])
        if request.broken is not None:
            since, why = request.broken
            if request.deadline.elapsed() - since > EXPLANATION_BOUNDS * self._hierarchy.detector.bound:
                raise self.failure(request, why)
        elif request.partner is None and request.deadline.expired():
            others = (each for each in range(self._hosts.size) if each != self._hierarchy.rank)
            elsewhere = self._hierarchy.detector.ask_where_they_are()
            report = self._context.report([self._hierarchy.local_rank], None, elsewhere)
            raise CollectiveTimeoutError(
                f"{request} timed out after {request.timeout_s:.1f} s; the group stays usable.{report}",
                tuple(others) if peer is None else (peer,),
            )

    def failure(self, request: P2PRequest, why: str) -> DistBackendError:
        """Return the error to raise if the connection to the other rank has failed."""
        peer = request.peer if request.partner is None else request.partner
        name = "another host" if peer is None else self._hosts.describe(peer)
        return DistBackendError(f"{request}: the connection to {name} failed: {why}")

    def _give_up_on(self, request: P2PRequest, peer: int, end_reason: str) -> None:
        """Raise, as the other rank is gone, unless its data may still be on its way."""
        if request.gone_since is None:
            request.gone_since = RunningClock(_LONGEST_INTERVAL_S)
        if request.gone_since.elapsed() < _IN_FLIGHT_SECONDS and not self._has_said_bye(peer):
            return
        name = self._hosts.describe(peer)
        own = self._hosts.describe(self._hierarchy.rank)
        why = f"{name} {end_reason}; {own} saw it in {request.description}"
        if end_reason == "died":
            raise RankFailedError(f"{request}: {why}", (peer,))
        raise GroupAbortedError(f"{request}: {why}")
