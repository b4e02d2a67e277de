"""Ask the members of a job to be let in, and enter their group: what a joiner does (admission.py)."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Generic

from torchestra.engine.membership.admission import COMMITTED, VOID, Admission, Invitation, JoinRequest, Offer
from torchestra.engine.membership.entering import E, EntryThread
from torchestra.engine.membership.growing import Cancel, EnterOffer, GrownGroup, entering_seconds
from torchestra.engine.membership.joiner_detector import heartbeat_interval
from torchestra.engine.membership.tidying import tidy_later
from torchestra.errors import CollectiveTimeoutError, DistBackendError, DistError
from torchestra.system.deadline import Deadline

_PAUSE_S = 0.02


class Joiner(Generic[E]):
    """A joiner that asks once to be let in.

    Args:
        admission: this joiner's view of the admission store.
        request: this joiner's, never used before.
        deadline: until when to wait for the members.
        enter, cancel: enter the group of an offer, and give it up.
    """

    def __init__(
        self,
        admission: Admission,
        request: JoinRequest,
        deadline: Deadline,
        enter: EnterOffer[E],
        cancel: Cancel,
    ) -> None:
        self._admission, self._request, self._deadline = admission, request, deadline
        self._bound_s, self._interval_s = admission.bound_s, heartbeat_interval(admission.bound_s)
        self._enter, self._cancel = enter, cancel
        self._last_heartbeat = 0.0
        self._followed: Invitation | None = None
        self._offer: Offer | None = None
        self._entry: EntryThread[E] | None = None
        self._entering = Deadline()

    def run(self) -> GrownGroup[E]:
        """Wait until the members have let this rank in, and return its part in their group.

        Raises:
            CollectiveTimeoutError: they have not within the time.
            DistBackendError: they have refused it, or have all left the job; says why.
            DistNetworkError: the store is gone.
        """
        try:
            self._admission.ask(self._request)
            while (grown := self._step()) is None:
                if self._deadline.expired():
                    raise self._late()
        except BaseException:
            self._leave()
            with contextlib.suppress(DistError, OSError):
                self._admission.forget(self._request)
            raise
        tidy_later(partial(self._admission.forget, self._request))
        return grown

    def _step(self) -> GrownGroup[E] | None:
        """Look once, and wait for a moment; return this rank's part in the group if it is committed."""
        self._send_heartbeat()
        timeout_s = min(self._interval_s, self._deadline.remaining())
        if self._entry is not None and self._offer is not None:
            if (grown := self._grown(self._entry, self._offer, timeout_s)) is not None:
                return grown
            timeout_s = 0.0
        invitation = self._admission.invitation(self._request, 0.0 if self._followed else timeout_s)
        if invitation is not None and invitation != self._followed:
            self._follow(invitation)
        elif self._entry is None and self._followed is not None:
            time.sleep(_PAUSE_S)
        return None

    def _grown(self, entry: EntryThread[E], offer: Offer, timeout_s: float) -> GrownGroup[E] | None:
        """Wait until this rank has entered, then for the verdict; polls would cost the members time."""
        if not entry.has_ended():
            entry.wait(timeout_s)
        verdict = self._admission.verdict(offer.key, timeout_s if entry.has_ended() else 0.0)
        if verdict == COMMITTED and entry.has_entered():
            assert entry.entered is not None
            return GrownGroup(entry.entered, self._admission.meeting(offer.key), offer)
        if verdict == VOID or self._entering.expired():
            self._leave()
        return None

    def _send_heartbeat(self) -> None:
        if (now := time.monotonic()) - self._last_heartbeat < self._interval_s:
            return
        self._admission.send_heartbeat(self._request)
        self._last_heartbeat = now
        if self._admission.has_ended():
            raise DistBackendError(
                f"{self._request} cannot join: the job has ended, as all its members have left"
            )
        if self._entry is None and all(
            each.number != self._request.number for each in self._admission.waiting()
        ):
            self._admission.ask(self._request)  # it was taken for dead, as it was stopped

    def _follow(self, invitation: Invitation) -> None:
        self._leave()
        self._followed = invitation
        offer = self._offer = self._admission.offer(invitation.key)
        rank, store = offer.joiners[self._request.number], self._admission.meeting(offer.key)
        seconds = entering_seconds(self._bound_s)
        self._entering = Deadline(seconds + 2 * self._bound_s)
        self._entry = EntryThread(
            lambda: self._enter(store, rank, offer, seconds),
            self._bound_s,
            lambda: self._cancel(store, offer),
        )
        # Looked for only now, since the members wait until this rank enters.
        if self._admission.verdict(invitation.key) == VOID:
            self._leave()

    def _leave(self) -> None:
        entry, self._entry, self._offer = self._entry, None, None
        if entry is not None:
            with contextlib.suppress(DistError, OSError):
                entry.abandon()

    def _late(self) -> CollectiveTimeoutError:
        if self._followed is None:
            why = "no member has let it in; they do when all call group.grow(): does the job run?"
        else:
            why = "the members began to let it in, but have not agreed on it"
        return CollectiveTimeoutError(f"{self._request} waited {self._deadline.timeout_s:g} s to join: {why}")
