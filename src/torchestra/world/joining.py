"""Join a job that runs: a new rank asks its members to be let in, and gets a default group."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from torchestra.arguments.annotations import checked
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import InvalidArgumentError, shown
from torchestra.process_group import GroupOptions, ProcessGroup
from torchestra.process_group.group import group_of
from torchestra.process_group.growing import GroupAdmission, ask_to_join
from torchestra.process_group.shrinking import NewMembership
from torchestra.process_group.starting import AnyStore, choose_backend, device_request
from torchestra.rendezvous import join_rendezvous
from torchestra.rendezvous.environment import number
from torchestra.store.secret import Secret
from torchestra.system.deadline import Deadline
from torchestra.system.phases import report
from torchestra.types import DEFAULT_TIMEOUT, Timeout, timeout_seconds
from torchestra.world.registration import admission_store, refuse_second_world, register, world_store
from torchestra.world.registry import own_world

JOIN_VARIABLE = "TORCHESTRA_JOIN"
"""``1``: init_process_group() joins a job that runs."""

MEMBER_VARIABLE = "TORCHESTRA_MEMBER"
"""The member id that a rank that joins asks for."""


def joins_by_environment() -> bool:
    """Return whether the environment says that this rank joins a job that runs.

    Raises:
        InvalidArgumentError: TORCHESTRA_JOIN has no meaning.
    """
    text = os.environ.get(JOIN_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise InvalidArgumentError(f"{JOIN_VARIABLE} must be 0 or 1, or not set; got {text!r}")
    return text == "1"


@checked
def join(
    init_method: str | None = None,
    *,
    timeout: Timeout | None = None,
    member: int | None = None,
    store: AnyStore | None = None,
    backend: str | None = None,
    device_id: int | torch.device | None = None,
    secret: Secret = None,
    then: Callable[[], object] | None = None,
) -> None:
    """Join a job that runs, as a new rank of its default group; return when its members have let it in.

    They do when all of them call :meth:`ProcessGroup.grow`, and know by
    :meth:`ProcessGroup.pending_joiners` that somebody waits. Then this rank has the same default group as
    they. ``init_process_group()`` does the same where the environment variable TORCHESTRA_JOIN is 1, as it is
    for a rank that ``torchestra run`` starts in the place of a dead one.

    Args:
        init_method: where the job has met, as for :func:`init_process_group`. No rank is needed. Where rank 0
            served the store, it must still be there.
        timeout: how long to wait to be let in; default 30 minutes. Operations have the job's time-out.
        member: the member id to ask for, such as that of a rank that has died, whose place this one takes;
            default: what TORCHESTRA_MEMBER says, else the lowest that is free. So it is too if a member has
            the id that is asked for.
        store: a store that the job has met in, instead of ``init_method``.
        backend, device_id, secret, then: as for :func:`init_process_group`.

    Raises:
        InvalidArgumentError: an argument is wrong, something is missing from the environment, or this rank
            has a default group already.
        CollectiveTimeoutError: the members have not let it in within the time.
        DistBackendError: they have refused it, or have all destroyed the group; says why.
        DistNetworkError: the job's store is not reached, or goes away.
    """
    join_world(init_method, timeout, member, store, backend, device_id, secret)
    if then is not None:
        then()


def join_world(
    init_method: str | None,
    timeout: Timeout | None,
    member: int | None,
    store: AnyStore | None,
    backend: str | None,
    device_id: int | torch.device | None,
    secret: Secret,
) -> None:
    """Do what :func:`join` does."""
    world = own_world()
    refuse_second_world(world)
    request, chosen = device_request(backend, device_id), choose_backend(backend)
    if chosen == "fake":
        raise InvalidArgumentError('join: a fake world has no other ranks, so backend "fake" joins none')
    member = (
        number(os.environ, MEMBER_VARIABLE) if member is None and os.environ.get(MEMBER_VARIABLE) else member
    )
    if member is not None and member < 0:
        raise InvalidArgumentError(f"join: `member` must not be negative, got {shown(member)}")
    if store is not None and init_method is not None:
        raise InvalidArgumentError("give `init_method` or `store`, not both")
    here = current_thread_rank()
    if here is not None and store is None and init_method is None:
        store = here.store
    deadline = Deadline(timeout_seconds(DEFAULT_TIMEOUT if timeout is None else timeout))
    met = join_rendezvous(init_method, timeout=deadline.remaining(), store=store, secret=secret)
    if world.thread is None:
        world.thread = threading.current_thread()
    admission = admission_store(world_store(met))
    made = ask_to_join(admission, member, chosen, deadline.remaining(), world.thread, request)
    membership = NewMembership.grown(made)
    try:
        terms = made.offer.terms
        options = GroupOptions(terms.timeout_s, backend=chosen)
        size = range(membership.communicator.size)
        group = group_of(membership, ProcessGroup, options, terms.description, terms.name, size)
        group.admission = GroupAdmission(admission, group.communicator, made.offer.joiners)
        world.default = group
        register(world, group)
        report("joined")
    except BaseException:
        world.default = None
        membership.leave()  # interrupted: nothing refers to the group
        raise
