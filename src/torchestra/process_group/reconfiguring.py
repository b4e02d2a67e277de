"""Groups that are made without peers, and reconfigured: torch's spelling of elastic groups (since 2.14)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

from torchestra.arguments.annotations import check_integer, checked
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.lazy import LazyCommunicator
from torchestra.communicator.work import Work
from torchestra.engine.device.agreement import DeviceRequest
from torchestra.engine.membership.arena_transfer import leave_store
from torchestra.errors import (
    DistBackendError,
    DistError,
    GroupDestroyedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    shown,
)
from torchestra.process_group.reconfigure_handle import ReconfigureEndpoint, ReconfigureHandle
from torchestra.process_group.reconfigure_meeting import ReconfigureMeeting
from torchestra.process_group.starting import GroupSpec, cancel, start
from torchestra.store import HashStore, Store
from torchestra.store.base import pauses
from torchestra.types import Timeout, timeout_seconds

_LARGEST_UUID = (1 << 63) - 1
_CLOSE_S = 3.0


@dataclass
class ReconfigureOptions:
    """The arguments of ``reconfigure`` in torch's C++ form.

    Attributes:
        uuid, handles, timeout, hints: as for :meth:`ProcessGroup.reconfigure`.
    """

    uuid: int = 0
    handles: Collection[str] = ()
    timeout: Timeout | None = None
    hints: Mapping[str, str] = field(default_factory=dict)


class Reconfigured(NamedTuple):
    """A rank's part in the group that a call has made.

    ``previous`` is by rank the number before, or -1; ``lost`` are the numbers before of ranks that are out.
    """

    communicator: Communicator
    store: Store
    previous: tuple[int, ...]
    lost: tuple[int, ...]


class Reconfiguration:
    """What a rank's group needs to be reconfigured, again and again.

    Args:
        name, backend: of the group.
        secret: what the ranks prove to each other to know.
        program: the thread that the rank's program runs in.
        request: which device the rank has.

    Attributes:
        uuid: of the last group; None before the first call.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        secret: bytes | None,
        program: threading.Thread,
        request: DeviceRequest,
    ) -> None:
        self.uuid: int | None = None
        self._name, self._backend, self._program, self._request = name, backend, program, request
        self._endpoint = ReconfigureEndpoint(secret)
        # Of the last group that this rank has entered; its peers only while _entered.
        self._members: Sequence[ReconfigureHandle] = ()
        self._entered = False
        self._used: set[int] = set()
        self._store: Store | None = None

    @property
    def handle(self) -> str:
        """Return this rank's handle."""
        return self._endpoint.handle.encode()

    def checked(self, uuid: int, handles: object) -> list[ReconfigureHandle]:
        """Return the handles by rank.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: an argument is wrong.
        """
        if isinstance(handles, (str, bytes)) or not isinstance(handles, (Sequence, AbstractSet)):
            raise InvalidArgumentTypeError(
                f"reconfigure: `handles` must be a list or a set of handles, got {shown(handles)}"
            )
        if not all(isinstance(each, str) for each in handles):
            raise InvalidArgumentTypeError(
                f"reconfigure: `handles` must be texts of get_reconfigure_handle(), got {shown(handles)}"
            )
        given = sorted(handles) if isinstance(handles, AbstractSet) else list(handles)
        decoded = [ReconfigureHandle.decode(each) for each in given]
        for rank, handle in enumerate(decoded):
            if handle in decoded[:rank]:
                raise InvalidArgumentError(
                    f"reconfigure: `handles` has the same handle as rank {decoded.index(handle)} and as rank"
                    f" {rank} ({handle}); every rank has one of its own"
                )
        if self._endpoint.handle not in decoded:
            raise InvalidArgumentError(
                f"reconfigure: this rank's own handle is not one of the {len(decoded)} `handles`; a rank that"
                " is not to be in the group does not call it"
            )
        if not -_LARGEST_UUID <= uuid <= _LARGEST_UUID or uuid in self._used:
            why = "was already used by this rank" if uuid in self._used else "has more than 64 bits"
            raise InvalidArgumentError(f"reconfigure: `uuid` {shown(uuid)} {why}; give each call a new one")
        return decoded

    def enter(self, uuid: int, handles: Sequence[ReconfigureHandle], timeout_s: float) -> Reconfigured:
        """Meet the ranks of some handles, and enter their group; errors as from ``reconfigure()``."""
        self._used.add(uuid)
        self._entered, self.uuid = False, uuid
        meeting = ReconfigureMeeting(self._endpoint, self._name, uuid, handles, timeout_s)
        store = self._store = meeting.run()
        spec = GroupSpec(
            store=store,
            rank=meeting.rank,
            size=len(handles),
            name=self._name,
            timeout_s=timeout_s,
            backend=self._backend,
            program=self._program,
            request=self._request,
        )
        try:
            communicator = start(spec)
        except BaseException as error:
            why = f"rank {meeting.rank} could not enter it: {type(error).__name__}"
            with contextlib.suppress(DistError, OSError):
                meeting.give_up(why)
                cancel(store, self._name, why)
            raise
        try:
            meeting.await_inside()
        except BaseException:
            communicator.close()  # without an abort: others may be on their way in, to the same verdict
            raise
        store.add("entered", 1)
        before, self._members, self._entered = self._members, handles, True
        numbers = {handle: rank for rank, handle in enumerate(before)}
        previous = tuple(numbers.get(handle, -1) for handle in handles)
        lost = tuple(rank for rank in range(len(before)) if rank not in previous)
        return Reconfigured(communicator, store, previous, lost)

    def keep(self, survivors: Sequence[int]) -> None:
        """Take over who is left when the group has been shrunk: their numbers in it until then."""
        self._members = [self._members[rank] for rank in survivors]
        if survivors[0] != 0:
            self._entered = False  # another rank serves the store in which they met, if any still does

    def close(self) -> None:
        """Stop serving this rank's store; the first rank of a group gives the others a moment to enter it."""
        members, store = self._members, self._store
        if store is not None and self._entered:
            if members[0] != self._endpoint.handle:
                store.close()
            else:
                for _ in pauses(_CLOSE_S):
                    if store.add("entered", 0) >= len(members):
                        break
        self._endpoint.store.close()


class ReconfigureMethods:
    """Reconfigure a group that was made with ``enable_reconfigure=True``."""

    communicator: Any
    store: Store
    ranks: Sequence[int]
    generation: int
    successor: Any
    previous_ranks: Sequence[int]
    lost_ranks: tuple[int, ...]
    joined_ranks: tuple[int, ...]
    _member_ids: tuple[int, ...] | None
    reconfiguration: Reconfiguration | None = None
    """What the calls need; None if the group was made with its peers, for good."""
    when_reconfigured: Callable[[Any, Mapping[int, int]], None] | None = None
    """Called with the group and the new numbers of the ranks that were in it; set by the registry."""

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether the group was made with ``enable_reconfigure=True``."""
        return self.reconfiguration is not None

    def get_reconfigure_handle(self) -> str:
        """Return this rank's handle, which names it to others: a text of one line, for ``reconfigure()``.

        It stays the same until the group is destroyed. It holds no secret.

        Raises:
            DistBackendError: the group was not made with ``enable_reconfigure=True``.
        """
        return self._reconfigurable("get_reconfigure_handle").handle

    @checked
    def reconfigure(
        self,
        uuid: Union[int, ReconfigureOptions],
        handles: Any = None,
        timeout: Timeout | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work:
        """Make this group one of the ranks that some handles name, and of no others.

        To be called by all these ranks, with the same arguments; returns when all are in the group. It stays
        the same object. A rank's number is the index of its handle. This rank leaves the peers that it had:
        their operations with it fail from now on, whether they are named or not, and so do this rank's that
        have not ended. It may be called again at any time, with others in the place of those that have died.

        Who is a member is the caller's decision, and so is that no two parts of a job go on for the same
        purpose: where members are found by a vote, let the vote need a majority.

        If this is the default group, global ranks are renumbered. Groups of its ranks that have lost none go
        on, with the new numbers; the others can only be destroyed.

        Args:
            uuid: names the new group: an integer of 64 bits that was not used before, by any of the ranks.
                Or torch's ``ReconfigureOptions`` of torchestra.compat, which has all arguments.
            handles: what :meth:`get_reconfigure_handle` has returned to each rank. A set is put into an order
                that is the same on all ranks.
            timeout: how long to wait for the others; default: the group's.
            hints: texts for backends, as of MPI; those that a backend does not know are ignored, and this one
                knows none.

        Returns:
            A Work that has ended.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: an argument is wrong; the group is as before. This
                rank's handle is not in the list, one is there twice or is none, or the uuid was used.
            CollectiveTimeoutError: a rank lives and has not called in time; ``missing`` names it.
            RankFailedError: a rank is gone; ``ranks`` names it.
            DistBackendError: a rank has called with other handles, or has given up, or this group was not
                made with ``enable_reconfigure=True``. After this and the errors above, the group has no
                peers: call it again, with a new uuid.
            GroupDestroyedError: this rank has destroyed the group.
        """
        call = uuid if isinstance(uuid, ReconfigureOptions) else ReconfigureOptions(uuid, handles, timeout)
        reconfiguration = self._reconfigurable("reconfigure")
        number = check_integer(call.uuid, "uuid", "reconfigure")
        members = reconfiguration.checked(number, call.handles)
        former = self.communicator
        if former.closed:
            raise GroupDestroyedError(f"reconfigure: rank {former.rank} has destroyed group {former.name!r}")
        seconds = former.timeout_s if call.timeout is None else timeout_seconds(call.timeout, "reconfigure")
        self.communicator = without_peers(former.rank, former.size, former.name, former.timeout_s)
        if former.has_met and former.queue.has_unfinished():
            former.abort(f"rank {former.rank} reconfigures it, as uuid {number}")
        former.close()  # without an abort, ranks that are still on their way out of an operation finish it
        self._leave_shrunk_store()
        made = reconfiguration.enter(number, members, seconds)
        made.communicator.timeout_s = former.timeout_s
        self._move_to(made)
        return Work.finished("reconfigure", [])

    _reconfigure = reconfigure

    def _supports_reconfigure(self) -> bool:
        return self.supports_reconfigure

    def _get_reconfigure_handle(self) -> str:
        return self.get_reconfigure_handle()

    def _reconfigurable(self, call: str) -> Reconfiguration:
        if self.successor is not None:
            raise GroupDestroyedError(
                f"{call}: rank {self.communicator.rank} has shrunk group {self.communicator.name!r}; call it"
                f" on the group that shrink() has returned, {self.successor.communicator.name!r}"
            )
        if self.reconfiguration is None:
            raise DistBackendError(
                f"{call}: group {self.communicator.name!r} has been made with its ranks; one that can be"
                " reconfigured is made by init_process_group(enable_reconfigure=True)"
            )
        return self.reconfiguration

    def _leave_shrunk_store(self) -> None:
        """Leave the store that came with shrinking, if the group was shrunk."""
        if self.generation:
            leave_store(self.store)
            self.store = HashStore()

    def _move_to(self, made: Reconfigured) -> None:
        size = made.communicator.size
        self.communicator, self.store, self.ranks = made.communicator, made.store, range(size)
        self.previous_ranks = made.previous
        self.joined_ranks = tuple(rank for rank, before in enumerate(made.previous) if before < 0)
        self.lost_ranks = made.lost
        self._member_ids, self.generation = None, 0
        if self.when_reconfigured is not None:
            numbers = {before: now for now, before in enumerate(made.previous) if before >= 0}
            self.when_reconfigured(self, numbers)


def without_peers(rank: int, size: int, name: str, timeout_s: float) -> LazyCommunicator:
    """Return the communicator of a group that has no peers; its operations are refused."""

    def refuse(_: float) -> Communicator:
        raise DistBackendError(
            f"rank {rank}: group {name!r} has no peers: it was made with enable_reconfigure=True, and"
            " reconfigure() has not been called yet, or its last call has failed"
        )

    return LazyCommunicator(rank, size, name, timeout_s, refuse)
