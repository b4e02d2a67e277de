"""The ranks that a list of handles names meet in the store of the first, and then enter their group.

The keys, below ``reconfigure/UUID`` in that store::

    claim       "DIGEST RANK": a digest of the list of the rank that came first, and its number in it
    signed/R    rank R has come, with the same list
    count       how many have signed
    verdict     "enter", or JSON that says why the group is not made; written once
    inside/...  the same again: each rank signs when it has entered the group

and ``calling`` in the store of each rank: "UUID DIGEST" of its last call.

All ranks of a list enter their group, or none does: whoever signs last writes "enter", whoever gives up
before that, or finds another dead, writes why, and the first of them counts (compare_set). A rank signs once
for a uuid, and only for the list that has claimed it; so no other rank, and no rank of an earlier group, gets
into a group whose verdict is "enter".

No rank returns before all are inside: what it calls next may abort the group, as ``shrink()`` does, and
whoever is still on the way in would fail by that.

Errors come soon, with the rank's name: each rank looks whether the processes of the others live, as far as it
can see them, and rank 0 looks at the stores of those that have not come. A rank whose store refuses
connections is gone. One that has called with the same uuid and another list will not come. Only a rank that
lives and calls with another uuid, or not at all, is waited for until the time-out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta

from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    RankFailedError,
    StoreTimeoutError,
    named,
)
from torchestra.process_group.reconfigure_handle import ReconfigureEndpoint, ReconfigureHandle
from torchestra.store import PrefixStore, Store, TCPStore
from torchestra.store.base import interruptible_sleep
from torchestra.store.missing_keys import missing_indices
from torchestra.store.unreadable import reading
from torchestra.system.deadline import Deadline

_LOOK_S = 0.25
_RETRY_S = 0.05
_CONNECT_S = 1.0
_LONGEST_TRY_S = _CONNECT_S + _RETRY_S  # all of which counts: a host that is off lets each try end late
_ENTER = b"enter"
_DEAD, _LATE, _REFUSED = "dead", "late", "refused"


class ReconfigureMeeting:
    """One call of ``reconfigure()`` on one rank.

    Args:
        endpoint: this rank's.
        name: of the group, for messages.
        uuid, handles: as given; this rank's own handle is among them.
        timeout_s: how long to wait for the others.
    """

    def __init__(
        self,
        endpoint: ReconfigureEndpoint,
        name: str,
        uuid: int,
        handles: Sequence[ReconfigureHandle],
        timeout_s: float,
    ) -> None:
        self.rank = handles.index(endpoint.handle)
        self._endpoint, self._name, self._uuid, self._handles = endpoint, name, uuid, handles
        self._deadline = Deadline(timeout_s, _LONGEST_TRY_S)
        self._digest = hashlib.sha256("\n".join(each.encode() for each in handles).encode()).hexdigest()[:32]
        self._peers: dict[int, TCPStore] = {}
        self._here: Store | None = None
        self._missed = "did not call it"

    def run(self) -> Store:
        """Wait for the other ranks; return the store of their group, in which there are no keys yet.

        Raises:
            CollectiveTimeoutError: not all came in time; names those that did not.
            RankFailedError: one of them is gone.
            DistBackendError: one has called with other handles, or has given up; says why.
            DistNetworkError: the first rank's store was not reached.
        """
        self._endpoint.store.set("calling", f"{self._uuid} {self._digest}")
        self._here = PrefixStore(f"reconfigure/{self._uuid}", self._reach_first())
        self._agree(self._here)
        return PrefixStore("members", self._here)

    def await_inside(self) -> None:
        """Wait, once this rank is in the group, until all are; errors as from :meth:`run`."""
        self._deadline = Deadline(self._deadline.timeout_s, _LONGEST_TRY_S)
        self._missed = "called it, but did not enter the group"
        self._agree(self._inside())

    def give_up(self, why: str) -> None:
        """Tell those that wait in :meth:`await_inside` that this rank will not be inside."""
        self._settle(self._inside(), _REFUSED, [self.rank], why)

    def _inside(self) -> Store:
        assert self._here is not None, "run() comes first"
        return PrefixStore("inside", self._here)

    def _agree(self, here: Store) -> None:
        try:
            self._sign(here)
            self._await_verdict(here)
        except BaseException as error:
            if not isinstance(error, DistError):
                why = f"rank {self.rank} has given up: {type(error).__name__}"
                with contextlib.suppress(DistError, OSError):
                    self._settle(here, _REFUSED, [self.rank], why)
            raise
        finally:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _reach_first(self) -> Store:
        """Return the store of the first rank."""
        if self.rank == 0:
            return self._endpoint.store
        first, secret = self._handles[0], self._endpoint.secret
        while not first.is_gone(secret):
            try:
                store = first.connect(secret, max(_RETRY_S, min(_CONNECT_S, self._deadline.remaining())))
            except DistNetworkError as error:
                if self._deadline.expired():
                    raise self._error(_LATE, [0], f"rank 0 ({first}) was not reached: {error}") from error
                interruptible_sleep(_RETRY_S)
                continue
            store.set_timeout(self._endpoint.store.timeout)
            return store
        raise self._error(_DEAD, [0], self._gone(0))

    def _sign(self, here: Store) -> None:
        claim = here.compare_set("claim", "", f"{self._digest} {self.rank}").decode(errors="replace")
        digest, _, first = claim.partition(" ")
        if digest != self._digest:
            why = (
                f"rank {first} and rank {self.rank}, each by its own list, have called it with other handles"
            )
            raise self._settle(here, _REFUSED, [self.rank], why) or self._error(_REFUSED, [self.rank], why)
        here.set(f"signed/{self.rank}", b"1")
        if here.add("count", 1) == len(self._handles):
            here.compare_set("verdict", "", _ENTER)

    def _await_verdict(self, here: Store) -> None:
        while True:
            wait_s = max(0.001, min(_LOOK_S, self._deadline.remaining()))
            try:
                (verdict,) = here.await_values(["verdict"], timedelta(seconds=wait_s))
            except StoreTimeoutError:
                error = self._look(here)
                if error is not None:
                    raise error from None
            except DistNetworkError as error:
                raise self._error(_DEAD, [0], self._gone(0)) from error
            else:
                if (refusal := self._read(verdict)) is not None:
                    raise refusal
                return

    def _look(self, here: Store) -> DistBackendError | None:
        """Return why not all ranks will come, if that is so, and tell it to the others."""
        for rank, handle in enumerate(self._handles):
            if handle.process.is_dead():
                return self._settle(here, _DEAD, [rank], self._gone(rank))
        missing = missing_indices(here, [f"signed/{rank}" for rank in range(len(self._handles))])
        notes: list[str] = []
        for rank in missing if self.rank == 0 else []:
            if self._handles[rank].is_gone(self._endpoint.secret):
                return self._settle(here, _DEAD, [rank], self._gone(rank))
            uuid, digest = self._last_call(rank)
            if uuid == str(self._uuid) and digest != self._digest:
                why = f"rank {rank} ({self._handles[rank]}) has called it with other handles than rank 0"
                return self._settle(here, _REFUSED, [rank], why)
            if uuid and uuid != str(self._uuid):
                notes.append(f"; rank {rank} has called with uuid {uuid} last")
        if not self._deadline.expired() or not missing:
            return None
        where = ", ".join(f"rank {rank}: {self._handles[rank]}" for rank in missing[:16])
        waited = f"within {self._deadline.timeout_s:g} s"
        return self._settle(
            here, _LATE, missing, f"{named(missing, 16)} {self._missed} {waited} ({where}){''.join(notes)}"
        )

    def _last_call(self, rank: int) -> tuple[str, str]:
        """Return the uuid and the digest of a rank's last call; empty texts if they are not known."""
        try:
            if rank not in self._peers:
                self._peers[rank] = self._handles[rank].connect(self._endpoint.secret, _CONNECT_S)
            uuid, _, digest = self._peers[rank].compare_set("calling", "", "").decode().partition(" ")
        except (DistStoreError, OSError, ValueError):
            return "", ""
        return uuid, digest

    def _settle(self, here: Store, kind: str, ranks: list[int], why: str) -> DistBackendError | None:
        """Write that the group is not made; return the error, or None if all have come meanwhile."""
        told = json.dumps([kind, ranks, why]).encode()
        return self._read(here.compare_set("verdict", "", told))

    def _read(self, verdict: bytes) -> DistBackendError | None:
        told = read_verdict(verdict, len(self._handles))
        return None if told is None else self._error(*told)

    def _gone(self, rank: int) -> str:
        return f"rank {rank} ({self._handles[rank]}) has ended, or has destroyed its group"

    def _error(self, kind: str, ranks: Sequence[int], why: str) -> DistBackendError:
        text = (
            f"rank {self.rank}: group {self._name!r} cannot be reconfigured as uuid {self._uuid} of"
            f" {len(self._handles)} ranks: {why}. Call reconfigure() with a new uuid and the handles of the"
            " ranks that are left"
        )
        if kind == _DEAD:
            return RankFailedError(text, tuple(ranks))
        if kind == _LATE:
            return CollectiveTimeoutError(text, tuple(ranks))
        return DistBackendError(text)


def read_verdict(text: bytes, size: int) -> tuple[str, list[int], str] | None:
    """Return why ``size`` ranks do not enter their group, and which of them it is about; None if they do.

    Raises:
        DistStoreError: it is something else.
    """
    if text == _ENTER:
        return None
    with reading("the verdict on a group to be reconfigured, in the store of its first rank"):
        kind, ranks, why = json.loads(text)
        if kind not in (_DEAD, _LATE, _REFUSED) or type(why) is not str:
            raise ValueError(f"no verdict: {text!r:.100}")
        if not all(type(each) is int and 0 <= each < size for each in ranks):
            raise ValueError(f"not ranks of this group: {ranks!r:.100}")
        return kind, ranks, why
