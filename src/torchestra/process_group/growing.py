"""Let ranks into a job's group, and get into one: what grow() and join() need of a group's terms."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from functools import partial

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device import agreement_of
from torchestra.engine.device.agreement import DeviceRequest
from torchestra.engine.hosts import Hosts
from torchestra.engine.membership.admission import Admission, JoinRequest, Offer, Terms
from torchestra.engine.membership.growing import GrownGroup, Growth
from torchestra.engine.membership.joiner import Joiner
from torchestra.engine.membership.joiner_detector import JoinerDetector
from torchestra.engine.membership.pending_joiners import PendingJoiners
from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.engine.multihost.host_id import certain_host_id, host_name
from torchestra.errors import DistError, DistNetworkError
from torchestra.process_group.starting import GroupSpec, cancel, start
from torchestra.store import HashStore, Store
from torchestra.system.deadline import Deadline
from torchestra.system.limits import start_thread

_POLL_S = 0.05
_LEAVE_S = 1.0
_log = logging.getLogger(__name__)


class GroupAdmission:
    """One member's view of those that wait to be let into its group.

    Args:
        store: the admission store of the job.
        communicator: the group's.
        let_in: the requests by which its ranks were let in.
    """

    def __init__(self, store: Store, communicator: Communicator, let_in: Collection[str] = ()) -> None:
        self.store = store
        self._communicator, self._let_in = communicator, let_in
        self._growing = False
        self._detector: JoinerDetector | None = None
        self._lock = threading.Lock()
        self._count: PendingJoiners | None = None
        self._waiting = 0
        self._watching = False
        self._closed = threading.Event()
        self._process = os.getpid()

    def of_successor(self, communicator: Communicator, let_in: Collection[str]) -> GroupAdmission:
        """Return this member's view in the group that replaces this one, which has let in some requests."""
        before = self._let_in if self._detector is None else self._detector.let_in
        return GroupAdmission(self.store, communicator, {*before, *let_in})

    # -- pending_joiners()

    def pending(self) -> int:
        """Return how many wait, the same on all ranks; every rank of the group must call it."""
        communicator, seen = self._communicator, self.seen()
        if communicator.engine.hosts is not None:
            waiting = torch.tensor([seen])
            communicator.broadcast(waiting, 0)
            return int(waiting.item())
        return self._shared_count().count()

    def seen(self) -> int:
        """Return how many wait, as rank 0 sees it, and 0 on other ranks; nothing is sent."""
        if not self._watching:
            self._watching = True
            if self._communicator.rank == 0:
                name = f"torchestra-joiners-{self._communicator.name}"
                start_thread(threading.Thread(target=self._watch, name=name, daemon=True))
        return self._waiting

    def _shared_count(self) -> PendingJoiners:
        with self._lock:
            if self._count is None:
                self._count = PendingJoiners(self._communicator.engine.context)
            return self._count

    def _watch(self) -> None:
        count = None if self._communicator.engine.hosts is not None else self._shared_count()
        try:
            while not self._closed.wait(_POLL_S):
                if self._growing:
                    continue
                self._waiting = len(self.waiting())
                if count is not None:
                    count.publish(self._waiting)
        except (DistError, OSError) as error:
            # At exit the store's connections are closed, also those of a group that nobody has destroyed.
            if not self._closed.is_set() and threading.main_thread().is_alive():
                _log.warning(
                    "group %r: the job's store is out of reach, so no rank can join it any more: %s",
                    self._communicator.name,
                    error,
                )
            self._waiting = 0
            while count is not None and not count.publish(0) and not self._closed.wait(_POLL_S):
                pass

    def waiting(self) -> list[JoinRequest]:
        """Return the join requests of those that wait now, as this rank sees it."""
        with self._lock:
            return self._own_detector().waiting()

    def _own_detector(self) -> JoinerDetector:
        if self._detector is None:
            self._detector = JoinerDetector(self._admission(), self._let_in)
        return self._detector

    def _admission(self) -> Admission:
        return Admission(self.store, heartbeat_bound())

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def leave(self) -> None:
        """Stop looking, and say that this rank leaves the job; when all have, those that wait are told."""
        if self._closed.is_set() or os.getpid() != self._process:
            return
        self.close()
        with contextlib.suppress(DistError, OSError):  # the store may be gone
            admission = Admission(self.store, min(_LEAVE_S, heartbeat_bound()))
            admission.leave(self._communicator.name, self._communicator.size)

    # -- grow()

    def growth(self, terms: Terms, backend: str, program: threading.Thread) -> Growth[Communicator]:
        """Return how this member lets in those that wait; the thread that looks for them rests meanwhile.

        Raises:
            DistNetworkError: the job's store is out of reach.
        """
        agreement = agreement_of(self._communicator)
        request = (
            DeviceRequest() if agreement is None else DeviceRequest(agreement.device, agreement.required)
        )
        self._growing = True
        try:
            with self._lock:
                detector = self._own_detector()
                detector.wait_until_known()
        except (DistError, OSError) as error:
            raise DistNetworkError(
                f"rank {self._communicator.rank}: group {self._communicator.name!r} cannot grow, because the"
                f" job's store, through which ranks ask to be let in, is gone or out of reach ({error})."
                " shrink() goes on without it on one host; a store that the launcher serves (torchestra run)"
                " outlives every rank"
            ) from error
        enter = partial(_enter, backend, program, request)
        one_host = self._communicator.engine.hosts is None and backend != "threads"
        host = certain_host_id() if one_host else ""
        return Growth(terms, self._admission(), detector, enter, _cancel, host)

    def look_again(self) -> None:
        """Look for those that wait, as before :meth:`growth`: the group has not been replaced."""
        self._growing = False


def ask_to_join(
    store: Store,
    member: int | None,
    backend: str,
    seconds: float,
    program: threading.Thread,
    request: DeviceRequest,
) -> GrownGroup[Communicator]:
    """Ask the members of a job to be let in; return this rank's part in their group.

    Args:
        store: the admission store of the job.
        member: the member id to ask for.
        backend: as choose_backend() gives it.
        seconds: how long to wait.
        program: the thread that the rank's program runs in.
        request: which device this rank has.

    Raises:
        CollectiveTimeoutError: they have not let it in within the time.
        DistBackendError: they have refused it.
        DistNetworkError: the store is gone.
    """
    enter: Callable[[Store, int, Offer, float], Communicator] = partial(_enter, backend, program, request)
    if backend != "threads":
        # What is slow the first time in a process comes before this rank is waited for.
        rehearsal = GroupSpec(
            store=HashStore(), rank=0, size=1, name="rehearsal", timeout_s=seconds, backend=backend,
            program=program,
        )  # fmt: skip
        start(rehearsal).close()
    join_request = JoinRequest.new(member, backend, "" if backend == "threads" else certain_host_id())
    admission = Admission(store, heartbeat_bound())
    return Joiner(admission, join_request, Deadline(seconds), enter, _cancel).run()


def _enter(
    backend: str,
    program: threading.Thread,
    request: DeviceRequest,
    store: Store,
    rank: int,
    offer: Offer,
    seconds: float,
) -> Communicator:
    terms = offer.terms
    made = start(
        GroupSpec(
            store=store,
            rank=rank,
            size=offer.size,
            name=terms.name,
            timeout_s=seconds,
            backend=backend,
            program=program,
            hosts=Hosts([range(offer.size)], [host_name()]) if offer.one_host else None,
            bridge=terms.bridge,
            request=request,
        )
    )
    made.timeout_s = terms.timeout_s
    return made


def _cancel(store: Store, offer: Offer) -> None:
    cancel(store, offer.terms.name, "it was given up, as one of its ranks is gone or has given up")
