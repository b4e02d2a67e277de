"""The world: making the default group, and destroying groups.

Groups that are made here and in new_groups.py are entered into the rank's registry (registry.py). It is the
only state of torchestra that is not reached through an object, and only these two files change it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Union

import torch

from torchestra.arguments.annotations import checked, refuse_type
from torchestra.communicator import work_registry
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.lazy import LazyCommunicator
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import InvalidArgumentError, NothingToDestroyError, NotInitializedError, shown
from torchestra.process_group import GroupOptions, NonMember, ProcessGroup
from torchestra.process_group.group import GroupMaker
from torchestra.process_group.growing import GroupAdmission
from torchestra.process_group.starting import AnyStore, GroupSpec, choose_backend, device_request, start
from torchestra.rendezvous import rendezvous
from torchestra.store import FakeStore, Store
from torchestra.store.collective_errors import raise_on_all_ranks
from torchestra.store.secret import Secret
from torchestra.store.torch_agent import TorchStore
from torchestra.system.phases import report
from torchestra.system.untraced import untraced
from torchestra.types import DEFAULT_TIMEOUT, Timeout, timeout_seconds
from torchestra.world.joining import JOIN_VARIABLE, join_world, joins_by_environment
from torchestra.world.reconfiguring import make_reconfigurable_world
from torchestra.world.registration import admission_store, refuse_second_world, register, world_store
from torchestra.world.registry import World, current_world, own_world
from torchestra.world.traced import group_rank, group_ranks, group_size, has_default

AnyGroup = Union[ProcessGroup, NonMember]
DEFAULT_NAME = "default"
_MAX_FAKE_RANKS = 1 << 31


class GroupTerms(NamedTuple):
    """Hold the terms of a new group, whichever function makes it.

    Attributes:
        timeout, backend, pg_options, device_id: as for :func:`init_process_group`.
        maker: a function that makes the group, instead of a backend; then its options may be anything.
    """

    timeout: Timeout | None = None
    backend: str | None = None
    pg_options: Any = None
    device_id: int | torch.device | None = None
    maker: GroupMaker | None = None

    def timeout_s(self, otherwise: Timeout) -> float:
        """Return the time-out in seconds: the one given, or the options', or else ``otherwise``."""
        options = self.pg_options if self.maker is None else None
        if options is not None and not isinstance(options, GroupOptions):
            raise InvalidArgumentError(f"pg_options must be a torchestra.GroupOptions, got {options!r}")
        timeout = self.timeout
        if timeout is None:
            timeout = otherwise if options is None else options.timeout
        return timeout_seconds(timeout)


def default_group() -> ProcessGroup:
    """Return the default group of the calling rank.

    Raises:
        NotInitializedError: there is none.
    """
    group = current_world().default
    if group is None:
        raise NotInitializedError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    return group


def member_group(group: AnyGroup | None, caller: str) -> ProcessGroup:
    """Return the group (None: the default group), of which this rank must be a member.

    Raises:
        InvalidArgumentError: it is not; the message begins with ``caller``.
    """
    found = default_group() if group is None else group
    if not isinstance(found, ProcessGroup):
        raise InvalidArgumentError(f"{caller}: this rank is {found!r}")
    return found


def is_available() -> bool:
    """Return whether torchestra can be used: always True."""
    return True


def is_initialized() -> bool:
    """Return whether this rank has a default group."""
    return current_world().default is not None


untraced(is_initialized, inlined=has_default)


@checked
@untraced
def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: AnyStore | None = None,
    group_name: str = "",
    pg_options: GroupOptions | None = None,
    device_id: int | torch.device | None = None,
    *,
    secret: Secret = None,
    then: Callable[[], object] | None = None,
    enable_reconfigure: bool = False,
) -> None:
    """Meet the other ranks and make the default group. Must be called by every rank, and first.

    Where the environment variable TORCHESTRA_JOIN is 1, this rank joins a job that runs, as :func:`join`
    does; then ``rank``, ``world_size``, ``group_name`` and ``pg_options`` say nothing.

    Args:
        backend: ``"native"`` (ranks are processes), ``"threads"`` (ranks are threads of this process), or
            None for the one that the rank was launched as. ``"fake"``: this rank alone, in a world whose
            other ranks do not exist (see fake.py). ``"gloo"``, torch.distributed's name for a backend of the
            CPU, means the same as None. So do ``"nccl"`` and ``"cpu:native,cuda:nccl"``, but NCCL must then
            run the operations on CUDA tensors (docs/guides/devices.md).
        init_method: where to meet: ``env://`` (default), ``file://path`` or ``tcp://host:port``.
        timeout: how long to wait for the others here, and in later operations; default 30 minutes.
        world_size, rank: how many ranks there are and which this one is; default: what the launcher
            (torchestra run, torchrun, Slurm, mpiexec) has put into the environment.
        store: a store that all ranks share, instead of ``init_method``; needs ``rank`` and ``world_size``.
        group_name: a description of the group.
        pg_options: :class:`GroupOptions`, of which the time-out is used if ``timeout`` is not given.
        device_id: the CUDA device that this rank uses, a number or a torch.device; default: the one that is
            current, if the program has used CUDA before. Refused where torch was built without CUDA.
        secret: a text, the same on all ranks, which they prove to each other to know; default: the
            environment variable TORCHESTRA_SECRET, which ``torchestra run`` sets. Without one, ranks of the
            same user on one host can meet, and ranks on several hosts cannot.
        then: called without arguments when the default group is made. ``torchestra.interop.adopt`` makes it
            torch.distributed's default group as well.
        enable_reconfigure: make a default group that has no peers until its
            :meth:`~ProcessGroup.reconfigure` is called, and may have others each time. No rank is waited
            for, there is no ``init_method``, and ``rank``, ``world_size`` and ``store`` are only what the
            group says of itself until then; default: what the launcher has said, else rank 0 of 1.

    Raises:
        InvalidArgumentError: an argument is wrong, something is missing from the environment, or this rank
            has a default group already.
        DistBackendError: NCCL is asked for, and not available.
        CollectiveTimeoutError, StoreTimeoutError: the others did not come in time.
    """
    terms = GroupTerms(timeout, backend, pg_options, device_id)
    make_world(
        terms, init_method, world_size, rank, store, group_name, secret, enable_reconfigure=enable_reconfigure
    )
    if then is not None:
        then()


def make_world(
    terms: GroupTerms,
    init_method: str | None,
    world_size: int,
    rank: int,
    store: AnyStore | None,
    group_name: str,
    secret: Secret = None,
    *,
    enable_reconfigure: bool = False,
) -> None:
    """Do what :func:`init_process_group` does, on any terms."""
    world = own_world()
    refuse_second_world(world)
    if enable_reconfigure:
        _make_reconfigurable(world, terms, init_method, world_size, rank, store, group_name, secret)
        return
    if terms.maker is None and joins_by_environment() and choose_backend(terms.backend) != "fake":
        join_world(init_method, terms.timeout, None, store, terms.backend, terms.device_id, secret)
        del os.environ[JOIN_VARIABLE]  # a later world is a new one, and so are the groups of child processes
        return
    request = device_request(terms.backend, terms.device_id)
    timeout_s = terms.timeout_s(DEFAULT_TIMEOUT)
    here = current_thread_rank()
    chosen = choose_backend(terms.backend)
    if store is not None and init_method is not None:
        raise InvalidArgumentError("give `init_method` or `store`, not both")
    if here is not None and store is None and init_method is None:
        rank, world_size, store = here.rank, here.size, here.store
    if chosen == "fake":
        store, rank, world_size = _fake_world(store, rank, world_size)
    else:
        meeting = rendezvous(
            init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            store=store,
            secret=secret,
        )
        store, rank, world_size = world_store(meeting.store), meeting.rank, meeting.world_size
    if world.thread is None:
        world.thread = threading.current_thread()
    with raise_on_all_ranks(store, "init", world_size):
        spec = GroupSpec(
            store=store,
            rank=rank,
            size=world_size,
            name=DEFAULT_NAME,
            timeout_s=timeout_s,
            backend=chosen,
            program=world.thread,
            request=request,
        )
        description = group_name or "default_pg"
        group = start_group(spec, range(world_size), description, deferred=True, maker=terms.maker)
        _register_and_meet(world, group)
    if terms.maker is None and chosen != "fake":
        group.admission = GroupAdmission(admission_store(store), group.communicator)
    report("joined")


def _make_reconfigurable(
    world: World,
    terms: GroupTerms,
    init_method: str | None,
    world_size: int,
    rank: int,
    store: AnyStore | None,
    group_name: str,
    secret: Secret,
) -> None:
    if terms.maker is not None:
        raise InvalidArgumentError(
            "enable_reconfigure: groups of registered backends are made with their ranks"
        )
    if init_method is not None:
        raise InvalidArgumentError(
            "enable_reconfigure: ranks exchange handles, and meet at no `init_method`; leave it out, got"
            f" {shown(init_method)}"
        )
    own = None if store is None else store if isinstance(store, Store) else TorchStore(store, proves=None)
    request = device_request(terms.backend, terms.device_id)
    make_reconfigurable_world(
        world,
        DEFAULT_NAME,
        choose_backend(terms.backend),
        terms.timeout_s(DEFAULT_TIMEOUT),
        world_size,
        rank,
        own,
        group_name or "default_pg",
        request,
        secret,
    )


def _register_and_meet(world: World, group: ProcessGroup) -> None:
    """Make a group the default group, and meet the other ranks; if that fails, there is none.

    A rank that has met the others may act at once, by a remote call for example, while others are on their
    way out of the meeting: their default group is registered by then. To use it is to wait for the meeting.
    """
    world.default = group
    register(world, group)
    try:
        if isinstance(group.communicator, LazyCommunicator):
            group.communicator.met(once=True)
    except BaseException:
        world.default = None
        world.remove(group)
        group.destroy()
        raise


def _fake_world(store: Store | None, rank: int, world_size: int) -> tuple[Store, int, int]:
    """Return the store, rank and world size of a fake world, whose only rank meets no other."""
    if not 0 <= rank < world_size < _MAX_FAKE_RANKS:
        raise InvalidArgumentError(
            'backend "fake" needs rank= and world_size=, with rank from 0 to world_size - 1; got'
            f" rank {rank} and world_size {world_size}"
        )
    return FakeStore() if store is None else store, rank, world_size


def start_group(
    spec: GroupSpec,
    ranks: Sequence[int],
    description: str,
    *,
    deferred: bool = False,
    maker: GroupMaker | None = None,
) -> ProcessGroup:
    """Make a group whose members call this, each with its own rank; returns when all have come.

    Args:
        ranks: the members' global ranks.
        description: of the group, for its ``group_desc``.
        deferred: return at once; the members meet in their first operation.
        maker: a function that makes the group instead of a backend.
    """
    if maker is not None:
        made = maker(spec.store, ranks, spec.rank, spec.name, spec.timeout_s)
        made.group_desc = description
        return made

    def meet(timeout_s: float) -> Communicator:
        return start(replace(spec, timeout_s=timeout_s))

    def made_of(communicator: Communicator | LazyCommunicator) -> ProcessGroup:
        made = ProcessGroup(
            spec.store,
            spec.rank,
            spec.size,
            GroupOptions(spec.timeout_s, backend=spec.backend),
            ranks=ranks,
            description=description,
            communicator=communicator,
        )
        made.bound_device_id = spec.request.device
        return made

    if not deferred:
        return made_of(start(spec))
    placeholder = LazyCommunicator(spec.rank, spec.size, spec.name, spec.timeout_s, meet)
    group = made_of(placeholder)

    def met(made: Communicator) -> None:
        group.communicator = made
        group.name_ranks()

    placeholder.replace = met
    return group


@checked
@untraced
def destroy_process_group(group: AnyGroup | None = None) -> None:
    """Leave a group, or with None (or the default group) all of them.

    Operations that are queued are run first. Ranks that wait for this one in the group get an error. A
    RuntimeWarning names results of functional collectives that were never waited for.

    Raises:
        NotInitializedError: there is no such group; it is a NothingToDestroyError if there is no default
            group.
    """
    world = current_world()
    if isinstance(group, NonMember):
        return
    if group is None or group is world.default:
        if world.default is None:
            raise NothingToDestroyError(
                "Default process group has not been initialized, or was destroyed already: there is nothing"
                " to destroy; call init_process_group() first"
            )
        world.close()
        return
    if world.groups.get(group.group_name) is not group:
        raise NotInitializedError(
            f"destroy_process_group: `group` {group!r} is not a group of this rank, or was destroyed already"
        )
    world.remove(group)
    group.destroy()
    work_registry.report(group)


def _any_group(group: object, name: str) -> AnyGroup:
    if not isinstance(group, (ProcessGroup, NonMember)):
        refuse_type(name, "group", "a ProcessGroup or None", group)
    return group


def get_rank(group: AnyGroup | None = None) -> int:
    """Return this rank's number in the group (default: the default group), or -1 if it is not in it."""
    return (default_group() if group is None else _any_group(group, "get_rank")).rank()


def get_world_size(group: AnyGroup | None = None) -> int:
    """Return how many ranks the group has (default: the default group), or -1 if this rank is not in it."""
    return (default_group() if group is None else _any_group(group, "get_world_size")).size()


def get_process_group_ranks(group: AnyGroup | None = None) -> list[int]:
    """Return the global ranks of the group, in the order of their numbers in it."""
    return list((default_group() if group is None else _any_group(group, "get_process_group_ranks")).ranks)


untraced(get_rank, inlined=group_rank)
untraced(get_world_size, inlined=group_size)
untraced(get_process_group_ranks, inlined=group_ranks)


@checked
def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """Return the number in ``group`` of a global rank; raise InvalidArgumentError if it is not in it."""
    return _registered(group, "get_group_rank").to_group_rank(global_rank, "global_rank", "get_group_rank")


@checked
def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """Return the global number of a rank of ``group``; raise InvalidArgumentError if there is none."""
    return _registered(group, "get_global_rank").to_global_rank(group_rank, "group_rank", "get_global_rank")


def _registered(group: AnyGroup, name: str) -> ProcessGroup:
    if not isinstance(group, ProcessGroup):
        raise InvalidArgumentError(
            f"{name}: Group {group!r} is not registered on this rank, please create group with new_group()"
        )
    return group


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """Return the default group, or None."""
        return current_world().default


class group(metaclass=_GroupMeta):
    """``group.WORLD`` is the default group, as in torch.distributed."""


class GroupMember(metaclass=_GroupMeta):
    """``GroupMember.WORLD`` is the default group, as in torch.distributed."""
