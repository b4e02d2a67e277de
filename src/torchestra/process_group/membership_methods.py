"""Groups that take the place of another one: of the ranks that are left, and of those that are let in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchestra.arguments.annotations import checked
from torchestra.communicator.communicator import Communicator
from torchestra.engine.membership.admission import Terms
from torchestra.engine.membership.growing import Growth
from torchestra.errors import GroupDestroyedError, InvalidArgumentError
from torchestra.process_group.growing import GroupAdmission
from torchestra.process_group.reconfiguring import Reconfiguration
from torchestra.process_group.shrinking import NewMembership, check_members, shrunk, surviving_bridge
from torchestra.store import Store
from torchestra.system.untraced import untraced
from torchestra.types import Timeout

_Group = TypeVar("_Group", bound="MembershipMethods")


@untraced
class MembershipMethods:
    """Replaces a group by one without the ranks that were lost, or with new ones."""

    communicator: Any
    backend: str
    store: Store
    group_desc: str
    member_ids: tuple[int, ...]
    reconfiguration: Reconfiguration | None
    generation: int
    successor: Any
    when_shrunk: Callable[[Any, Any], None] | None
    admission: GroupAdmission | None

    @checked
    def shrink(self: _Group, exclude: Sequence[int] = (), timeout: Timeout | None = None) -> _Group:
        """Make a group of the ranks that are left, which replaces this one.

        To be called after a rank has died or left, by every rank that goes on; returns when all of these have
        called, with the same members on all. They keep their order and are numbered from 0. Operations of
        this group that ranks are still in, and every :class:`Work` that has not ended, fail
        (:class:`RankFailedError`, if a rank has died). This group is destroyed then.

        If this is the default group, the new one is the default group from then on: global ranks are
        renumbered. Groups that have lost no rank go on, with the new global ranks; the others can only be
        destroyed, or shrunk in their turn.

        The new group has a store of its own, without any keys, which its rank 0 serves if ranks are processes
        on one host. Across hosts the ranks agree through the group's store, and the new store is a part of
        that. See docs/guides/surviving-failures.md.

        The new group of one that was made with ``enable_reconfigure=True`` can be reconfigured in its turn:
        its ranks keep their handles.

        Args:
            exclude: ranks of this group to go on without, though they may be alive. In this group they get a
                :class:`RankExcludedError`.
            timeout: how long to wait for the other ranks; default: the group's.

        Returns:
            The new group; its ``previous_ranks`` are the numbers that its ranks had in this one, its
            ``lost_ranks`` the numbers of the ranks that are not in it.

        Raises:
            CollectiveTimeoutError: a rank is alive but has not called in time; ``missing`` names it. The call
                may be repeated.
            RankExcludedError: the others go on without this rank.
            GroupDestroyedError: this rank has destroyed the group, or shrunk it already.
            DistNetworkError: the ranks are on several hosts, and the group's store is gone.
            InvalidArgumentError: `exclude` names a rank that the group does not have, or this one.
        """
        return self._replace(exclude, timeout, abort=True)

    @checked
    def shrink_when_idle(self: _Group, exclude: Sequence[int], timeout: Timeout | None = None) -> _Group:
        """Do what :meth:`shrink` does, after this rank's operations in the group have ended, if they can.

        Takes, returns and raises the same as :meth:`shrink`.
        """
        return self._replace(exclude, timeout, abort=False)

    @checked
    def grow(self: _Group, timeout: Timeout | None = None, *, exclude: Sequence[int] = ()) -> _Group:
        """Let in those that wait to join the job; the group with them replaces this one.

        To be called on the default group by every rank that goes on, at a point where its operations in the
        group have ended; returns when all of these, and those let in, are in the new group. Ranks that have
        died are not in it: so a death and its replacement are one step. If nobody waits, or a rank has called
        :meth:`shrink` instead, it is what :meth:`shrink` would have made. Everything else is as there.

        Every rank has a *member id*. A rank that joins (:func:`torchestra.join`) gets the id that it asks
        for, or else the lowest that is free, and the new group's ranks are in the order of their ids. So a
        replacement that takes the id of a dead rank takes its place again.

        The ranks that are let in are told in the job's store (that in which the job met), and all meet there.
        See docs/guides/surviving-failures.md.

        Args:
            timeout: how long to wait for the other ranks; default: the group's.
            exclude: ranks of this group to go on without, though they may be alive.

        Returns:
            The new group. Its ``member_ids`` are by rank; ``joined_ranks`` the ranks that came in, of which
            ``previous_ranks`` is -1; its ``lost_ranks`` are numbers in this group.

        Raises:
            CollectiveTimeoutError: a rank is alive but has not called in time; ``missing`` names it. The call
                may be repeated.
            RankExcludedError: the others go on without this rank.
            GroupDestroyedError: this rank has destroyed the group, or shrunk it already.
            DistNetworkError: the job's store is gone.
            InvalidArgumentError: this is not the default group, it was made with ``enable_reconfigure=True``,
                or `exclude` names a rank that the group does not have, or this one.
        """
        admission = self._growable("grow")
        check_members(self.communicator, self.backend, exclude, "grow")
        terms = Terms(
            self._next_name(),
            self.generation + 1,
            self.group_desc,
            self.communicator.timeout_s,
            self.backend,
            surviving_bridge(self.communicator),
            self.member_ids,
        )
        try:
            growth = admission.growth(terms, self.backend, self.communicator.engine.context.program)
            return self._replace(exclude, timeout, abort=False, growth=growth)
        except BaseException:
            admission.look_again()
            raise

    def pending_joiners(self) -> int:
        """Return how many ranks wait to be let in, with :meth:`grow`: the same on all ranks.

        To be called on the default group by every rank, at the same points of its program, such as after
        each step. Ranks on one host do not wait for each other: a change is told to all at a call that none
        has come to yet. With several hosts it is an operation of the group, a broadcast of 8 bytes. It is 0
        once the job's store is gone.

        Raises:
            InvalidArgumentError: this is not the default group, or it was made with
                ``enable_reconfigure=True``.
            GroupDestroyedError: this rank has destroyed the group, or shrunk it already.
        """
        return self._growable("pending_joiners").pending()

    def _growable(self, call: str) -> GroupAdmission:
        rank, name = self.communicator.rank, self.communicator.name
        if self.communicator.closed:
            raise GroupDestroyedError(
                f"{call}: rank {rank} has destroyed group {name!r}, or shrunk it already"
            )
        if self.reconfiguration is not None:
            raise InvalidArgumentError(
                f"{call}: group {name!r} was made with enable_reconfigure=True, so its ranks have met without"
                " a store in which others could ask to be let in; call reconfigure() with the handles of all,"
                " those that come included"
            )
        if self.admission is None:
            raise InvalidArgumentError(
                f"{call}: ranks join the job's default group, and group {name!r} is not that, or its backend"
                f" {self.backend!r} admits no new ranks"
            )
        return self.admission

    def _next_name(self) -> str:
        return f"{self.communicator.name.removesuffix(f'~{self.generation}')}~{self.generation + 1}"

    def _replace(
        self: _Group,
        exclude: Sequence[int],
        timeout: Timeout | None,
        *,
        abort: bool,
        growth: Growth[Communicator] | None = None,
    ) -> _Group:
        """Replace this group by a group of the ranks that are left, and of those that are let in."""
        check_members(self.communicator, self.backend, exclude, "shrink")
        new = shrunk(
            self.communicator,
            self.backend,
            self._next_name(),
            exclude,
            timeout,
            self._successor,
            abort=abort,
            growth=growth,
        )
        self.successor = new
        self.communicator.queue.became = new.communicator.name
        if self.when_shrunk is None:
            new._leave_at_last()
        else:
            self.when_shrunk(self, new)
        if self.admission is not None:
            self.admission.close()
        self.reconfiguration = None  # the new group has it
        self.communicator.close()
        if self.generation:
            self.store.close()
        return new

    # -- of the group

    def _successor(self: _Group, made: NewMembership) -> _Group:
        """Make the group that replaces this one, of this rank's part in it."""
        raise NotImplementedError

    def _leave_at_last(self) -> None:
        """Have the group left when nothing refers to this object any more."""
        raise NotImplementedError
