"""Whether a message to or from another host may still be waited for."""

from __future__ import annotations

import time

from torchestra.engine.multihost.crossing import Crossing
from torchestra.engine.multihost.parcel import Parcel
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    GroupAbortedError,
    RankFailedError,
)

__all__ = ["Lookout"]

_DOUBT_SECONDS = 0.05
"""What a rank has written before it went may be read as much later."""


class Lookout:
    """Decides for one rank.

    Args:
        crossing: the group's.
    """

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing
        self._hosts = crossing.hosts
        self._member = crossing.member

    def check(self, parcel: Parcel) -> None:
        """Raise if waiting for a message any longer is in vain.

        Raises:
            GroupAbortedError: the group can be used no more, or the other rank has left it.
            RankFailedError: the other rank has died.
            DistBackendError: the way to it has failed, and nobody has told why within the heartbeat bound.
            CollectiveTimeoutError: its time is over, and it has not begun to move.
        """
        if self._member.is_aborted:
            raise self._member.aborted()
        peer = parcel.peer if parcel.partner is None else parcel.partner
        if peer is not None and (fate := self._crossing.outlook.fate(peer)) is not None:
            self._give_up_on(parcel, peer, fate)
        if parcel.broken is not None:
            since, why = parcel.broken
            if time.monotonic() - since > self._crossing.outlook.bound:
                raise self.failure(parcel, why)
        elif parcel.partner is None and parcel.remaining() <= 0:
            others = (each for each in range(self._hosts.size) if each != self._crossing.rank)
            raise CollectiveTimeoutError(
                f"{parcel} timed out after {parcel.seconds:.1f} s; the group stays usable."
                f"{self._crossing.outlook.ask_where_they_are()}{self._member.report([self._crossing.place])}",
                tuple(others) if peer is None else (peer,),
            )

    def failure(self, parcel: Parcel, why: str) -> DistBackendError:
        """What to raise if the way to the other rank has failed."""
        peer = parcel.peer if parcel.partner is None else parcel.partner
        who = "another host" if peer is None else self._hosts.describe(peer)
        return DistBackendError(f"{parcel}: the way to {who} failed: {why}")

    def _give_up_on(self, parcel: Parcel, peer: int, fate: str) -> None:
        """The other rank is gone: raise, unless what it has written may still be on its way."""
        now = time.monotonic()
        if parcel.doubted is None:
            parcel.doubted = now
        if now - parcel.doubted < _DOUBT_SECONDS:
            return
        who = self._hosts.describe(peer)
        why = f"{who} {fate}; {self._hosts.describe(self._crossing.rank)} saw it in {parcel.what}"
        if fate == "died":
            raise RankFailedError(f"{parcel}: {why}", (peer,))
        raise GroupAbortedError(f"{parcel}: {why}")
