"""Abort notices: tell all hosts that a group is over; many hosts hear it along their rows.

Who aborts a group, the *originator*, tells the other hosts at once, and waits until they have confirmed it,
or for a few seconds: its process may end next, and they would never know why.

Few hosts it tells itself. Many are in rows (heartbeat_tree.py): it tells those of its own row, and of each
other row one, the *relay*. That tells the rest of its row, and when these have confirmed it to the relay, it
confirms for all of them. So each sends to, and hears from, no more than there are rows or hosts in a row.

A relay may be gone, or go now; then its row is not confirmed. After RELAY_SECONDS the originator itself tells
each host for which nobody has confirmed: so a relay can delay a notice, and cannot hide it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torchestra.engine.multihost.heartbeat_tree import rows_of

CONFIRM_SECONDS = 3.0
RELAY_SECONDS = 1.0
_RESEND_SECONDS = 0.1

Contact = Callable[[int], int | None]
"""Returns the rank that speaks for a host; None if there is none any more."""


@dataclass
class _Relayed:
    """The part of a row that this host tells: for whom, and who of it has not confirmed."""

    originator: int
    hosts: Sequence[int]
    owed: set[int]


class AbortNotices:
    """The notices that one rank sends and passes on.

    Args:
        hosts: how many there are.
        host: which this rank is on.
        contact: tells who speaks for a host.
        say_abort: sends a rank a notice, and the hosts that it is to tell.
        say_confirm: tells a rank for which hosts, besides this one, it is confirmed.
    """

    def __init__(
        self,
        hosts: int,
        host: int,
        contact: Contact,
        say_abort: Callable[[int, list[object], list[int]], None],
        say_confirm: Callable[[int, list[int]], None],
    ) -> None:
        self._rows = rows_of(hosts)
        self._others = [each for each in range(hosts) if each != host]
        self._host = host
        self._contact = contact
        self._say_abort, self._say_confirm = say_abort, say_confirm
        self._confirmed: set[int] = set()
        self._relayed: list[_Relayed] = []
        self.changed = threading.Condition()

    def tell(
        self, notice: list[object], failed: Collection[int], has_no_responder: Callable[[int], bool]
    ) -> None:
        """Tell all hosts, until the live ones have confirmed it, or for CONFIRM_SECONDS.

        Args:
            failed: hosts that have been given up. They are told without waiting for them: where the network
                is cut one way only, they hear the others, and would learn of nothing by themselves.
            has_no_responder: tells whether nobody is known to be on a host who answers.
        """
        began = time.monotonic()
        for host in failed:
            rank = self._contact(host)
            if rank is not None:
                self._say_abort(rank, notice, [])
        live = [host for host in self._others if host not in failed]
        contacted: dict[int, int] = {}
        left_to_relays = self._tell_relays(notice, live, contacted)
        with self.changed:
            while (elapsed := time.monotonic() - began) < CONFIRM_SECONDS:
                relayed = left_to_relays if elapsed < RELAY_SECONDS else frozenset()
                unknown = [host for host in live if host not in self._confirmed]
                # To look up who is on a host takes time by the job's size: not for those that others tell.
                owed = [host for host in unknown if host not in relayed and not has_no_responder(host)]
                if not owed and relayed.isdisjoint(unknown):
                    return
                for host in owed:
                    rank = self._contact(host)
                    if rank is not None and contacted.get(host) != rank:
                        contacted[host] = rank
                        self._say_abort(rank, notice, [])
                self.changed.wait(_RESEND_SECONDS)

    def _tell_relays(
        self, notice: list[object], live: Collection[int], contacted: dict[int, int]
    ) -> frozenset[int]:
        """Tell one host of each row but the own; return the hosts that these are to tell."""
        known, relayed = frozenset(live), set[int]()
        for row in self._rows:
            there = [] if self._host in row else [host for host in row if host in known]
            for relay in there:
                rank = self._contact(relay)
                if rank is not None:
                    onward = [host for host in there if host != relay]
                    contacted[relay] = rank
                    self._say_abort(rank, notice, onward)
                    relayed.update(onward)
                    break
        return frozenset(relayed)

    def relay(self, originator: int, notice: list[object], onward: Sequence[int]) -> None:
        """Tell hosts for the rank that has told this one, but for those on which nobody is."""
        contacts = {host: rank for host in onward if (rank := self._contact(host)) is not None}
        with self.changed:
            owed = contacts.keys() - self._confirmed
            self._relayed.append(_Relayed(originator, list(contacts), owed))
        for host in sorted(owed):
            self._say_abort(contacts[host], notice, [])
        self.confirm(())

    def confirm(self, hosts: Collection[int]) -> None:
        """Note that hosts have confirmed it; confirm it for those rows that have now."""
        with self.changed:
            self._confirmed.update(hosts)
            for each in self._relayed:
                each.owed -= self._confirmed
            done = [each for each in self._relayed if not each.owed]
            self._relayed = [each for each in self._relayed if each.owed]
            self.changed.notify_all()
        for each in done:
            self._say_confirm(each.originator, list(each.hosts))
