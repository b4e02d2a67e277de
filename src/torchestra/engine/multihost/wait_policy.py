"""Whether a message to or from another host may still be waited for."""

from __future__ import annotations

import threading

from torchestra.engine.multihost.correspondence import Correspondence
from torchestra.engine.multihost.hierarchy import EXPLANATION_BOUNDS, Hierarchy
from torchestra.engine.multihost.p2p_request import P2PRequest
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    RankFailedError,
)
from torchestra.system.deadline import RunningClock

__all__ = ["WaitPolicy"]

_LINE_SECONDS = 1.0
"""How long a line to a rank that is gone may take to break, or to bring what that rank has written."""

_LONGEST_LOOK = 0.1


class _Doubt:
    """A rank is known to be gone; but what it has written before may not have been read.

    It is in this rank's box, or on the line. The first is known for certain: a mark is put into the box, and
    read after all that. The second is given some time, of which no interruption of this process uses up much.

    Args:
        letters: of this rank.
        peer: the rank that is gone.
        longest: how many seconds it may take to read what is in the box.
    """

    def __init__(self, letters: Correspondence, peer: int, longest: float) -> None:
        self._letters, self._peer, self._longest = letters, peer, longest
        self._clock = RunningClock(_LONGEST_LOOK)
        self._mark = threading.Event()
        try:
            self._mark = letters.mark()
        except (DistError, OSError):
            self._mark.set()  # nothing comes by the store any more

    def is_over(self) -> bool:
        """Whether all has been read; to be asked again and again."""
        waited = self._clock.elapsed()
        if self._letters.is_direct(self._peer) and waited < _LINE_SECONDS:
            return False
        return self._mark.is_set() or waited > self._longest


class WaitPolicy:
    """Decides for one rank.

    Args:
        hierarchy: the group's.
        letters: of this rank.
    """

    def __init__(self, hierarchy: Hierarchy, letters: Correspondence) -> None:
        self._hierarchy = hierarchy
        self._letters = letters
        self._hosts = hierarchy.hosts
        self._member = hierarchy.member

    def check(self, parcel: P2PRequest) -> None:
        """Raise if waiting for a message any longer is in vain.

        Raises:
            GroupAbortedError: the group can be used no more, or the other rank has left it.
            RankFailedError: the other rank has died.
            DistBackendError: the way to it has failed, and nobody tells why.
            CollectiveTimeoutError: its time is over, and it has not begun to move.
        """
        if self._member.is_aborted:
            raise self._member.aborted()
        peer = parcel.peer if parcel.partner is None else parcel.partner
        if peer is not None and (fate := self._hierarchy.detector.fate(peer)) is not None:
            self._give_up_on(parcel, peer, fate)
        if parcel.broken is not None:
            since, why = parcel.broken
            if parcel.deadline.elapsed() - since > EXPLANATION_BOUNDS * self._hierarchy.detector.bound:
                raise self.failure(parcel, why)
        elif parcel.partner is None and parcel.deadline.expired():
            others = (each for each in range(self._hosts.size) if each != self._hierarchy.rank)
            raise CollectiveTimeoutError(
                f"{parcel} timed out after {parcel.seconds:.1f} s; the group stays usable."
                f"{self._hierarchy.detector.ask_where_they_are()}{self._member.report([self._hierarchy.place])}",
                tuple(others) if peer is None else (peer,),
            )

    def failure(self, parcel: P2PRequest, why: str) -> DistBackendError:
        """What to raise if the way to the other rank has failed."""
        peer = parcel.peer if parcel.partner is None else parcel.partner
        who = "another host" if peer is None else self._hosts.describe(peer)
        return DistBackendError(f"{parcel}: the way to {who} failed: {why}")

    def _give_up_on(self, parcel: P2PRequest, peer: int, fate: str) -> None:
        """The other rank is gone: raise, unless what it has written may still be on its way."""
        if parcel.doubt is None:
            parcel.doubt = _Doubt(self._letters, peer, self._hierarchy.detector.bound)
        if not parcel.doubt.is_over():
            return
        who = self._hosts.describe(peer)
        why = f"{who} {fate}; {self._hosts.describe(self._hierarchy.rank)} saw it in {parcel.what}"
        if fate == "died":
            raise RankFailedError(f"{parcel}: {why}", (peer,))
        raise GroupAbortedError(f"{parcel}: {why}")
