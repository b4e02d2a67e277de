"""Find out which of those that wait to be let in live.

A joiner whose process can be seen from here is dead when that has ended. Any joiner is dead when its count of
heartbeats in the store has stood still for the heartbeat bound, counted by a clock that stands still while
this process does; and it is gone when its request is off the list, as its own error takes it off. One that
cannot be seen from here lives once that count has changed since it was first read: a request may be all that
is left of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from torchestra.engine.membership.admission import Admission, JoinRequest
from torchestra.store.process import ProcessIdentity
from torchestra.system.deadline import Deadline, RunningClock

HEARTBEATS_PER_BOUND = 8
_LONGEST_INTERVAL_S = 0.25
_SETTLING_S = 0.01


def heartbeat_interval(bound_s: float) -> float:
    """Return the seconds from a joiner's heartbeat to the next, for a heartbeat bound."""
    return min(_LONGEST_INTERVAL_S, bound_s / HEARTBEATS_PER_BOUND)


@dataclass
class _Observed:
    """A joiner's last count of heartbeats, when it was first read, and whether the joiner lives.

    The count of one that can be seen from here is read only now and then.
    """

    count: bytes | None
    lives: bool
    clock: RunningClock = field(default_factory=RunningClock)
    since: float = 0.0
    read_at: float = field(default_factory=time.monotonic)


class JoinerDetector:
    """One rank's view of the joiners. Several threads may use it: one that looks now and then, and grow().

    Args:
        admission: this rank's view of the admission store.
        let_in: the numbers of requests that are used up, though they may still be on the list.

    Attributes:
        let_in: those that were still there when it last looked; none comes back.
    """

    def __init__(self, admission: Admission, let_in: Collection[str] = ()) -> None:
        self._admission, self.let_in = admission, frozenset(let_in)
        self._interval_s = heartbeat_interval(admission.bound_s)
        self._observed: dict[str, _Observed] = {}
        self._polled_at = -self._interval_s
        self._listed: set[str] = set()
        self._found: list[JoinRequest] = []
        self._lock = threading.Lock()

    def waiting(self, max_age_s: float = 0.0) -> list[JoinRequest]:
        """Return the requests of those that wait and are known to live; take the dead off the list.

        Args:
            max_age_s: how many seconds old the answer may be.
        """
        with self._lock:
            if max_age_s and time.monotonic() - self._polled_at < max_age_s:
                return self._found
            self._found = self._waiting()
            return self._found

    def _waiting(self) -> list[JoinRequest]:
        on_list = self._admission.waiting()
        self.let_in = self.let_in.intersection(each.number for each in on_list)
        requests = [each for each in on_list if each.number not in self.let_in]
        unseen = [request for request in requests if not self._is_seen(request)]
        counts = self._admission.heartbeats(unseen)
        dead = [
            request for request, count in zip(unseen, counts, strict=True) if self._is_dead(request, count)
        ]
        self._admission.remove({request.number for request in dead})
        self._listed = {request.number for request in requests if request not in dead}
        self._observed = {number: seen for number, seen in self._observed.items() if number in self._listed}
        self._polled_at = time.monotonic()
        return [
            request
            for request in requests
            if request.number in self._listed and self._observed[request.number].lives
        ]

    def wait_until_known(self) -> list[JoinRequest]:
        """Do as :meth:`waiting`, after it has become known of each joiner whether it lives."""
        deadline = Deadline(4 * self._interval_s)
        found = self.waiting()
        while len(found) < len(self._listed) and not deadline.expired():
            time.sleep(_SETTLING_S)
            found = self.waiting()
        return found

    def lost(self, requests: dict[str, ProcessIdentity]) -> bool:
        """Return whether one of some joiners is gone; the store's heartbeats may be an interval old."""
        if any(process.is_dead() for process in requests.values()):
            return True
        is_due = time.monotonic() - self._polled_at > self._interval_s
        if is_due or not self._listed.issuperset(requests):  # one may have come since
            self.waiting()
        return not self._listed.issuperset(requests)

    def _is_seen(self, request: JoinRequest) -> bool:
        """Return whether a joiner is known to live without its count of heartbeats, which is not due yet."""
        if not request.process.is_alive():
            return False
        seen = self._observed.setdefault(request.number, _Observed(None, lives=True))
        return time.monotonic() - seen.read_at <= self._interval_s

    def _is_dead(self, request: JoinRequest, count: bytes) -> bool:
        if request.process.is_dead():
            return True
        seen = self._observed.get(request.number)
        if seen is None:
            self._observed[request.number] = _Observed(count, request.process.is_alive())
            return False
        if seen.count != count:
            seen.count, seen.lives, seen.since = count, True, seen.clock.elapsed()
        seen.read_at = time.monotonic()
        return seen.clock.elapsed() - seen.since > self._admission.bound_s
