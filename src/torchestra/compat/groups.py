"""Making and finding groups with torch's names, tags and backends, and with its values for non-members."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

from torchestra.communicator.work import Work
from torchestra.compat import torch_code
from torchestra.compat.backends import engine_of, get_backend_config, registered
from torchestra.errors import DistStoreError, InvalidArgumentError, StoreTimeoutError
from torchestra.functional import groups as functional_groups
from torchestra.process_group import NonMember, ProcessGroup, RoundRobinGroup
from torchestra.process_group.reconfiguring import ReconfigureOptions
from torchestra.process_group.starting import choose_backend
from torchestra.store import Store
from torchestra.types import Timeout, timeout_seconds
from torchestra.world import init, new_groups, subgroups
from torchestra.world.init import AnyGroup, GroupTerms, default_group
from torchestra.world.registry import current_world

__all__ = [
    "GroupMember",
    "_find_or_create_pg_by_ranks_and_tag",
    "_find_pg_by_ranks_and_tag",
    "_get_default_group",
    "_get_default_store",
    "_get_global_rank",
    "_get_group_size",
    "_get_group_size_by_name",
    "_get_group_tag",
    "_get_pg_config",
    "_get_process_group_name",
    "_get_process_group_store",
    "_get_reconfigure_handle",
    "_new_group_with_tag",
    "_rank_not_in_group",
    "_reconfigure",
    "_resolve_group_name_by_ranks_and_tag",
    "_resolve_process_group",
    "_round_robin_process_groups",
    "_store_based_barrier",
    "_supports_reconfigure",
    "get_global_rank",
    "get_group_rank",
    "get_rank",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
]

_log = logging.getLogger(__name__)
_USER = "user:"


class _NoMember(NonMember):
    """Stands for all groups without this rank; its ranks are those of the last such group made."""

    def __init__(self) -> None:
        self.group_name = "one that this rank is not in"

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return current_world().others


class GroupMember(init.GroupMember):
    """``WORLD`` is the default group; ``NON_GROUP_MEMBER`` stands for a group that this rank is not in."""

    NON_GROUP_MEMBER = _NoMember()


def _or_non_member(made: AnyGroup) -> AnyGroup:
    if not isinstance(made, NonMember):
        return made
    current_world().others = made.ranks
    return GroupMember.NON_GROUP_MEMBER


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    _ranks: Sequence[int] | None = None,
    enable_reconfigure: bool = False,
) -> None:
    """Call :func:`torchestra.init_process_group` by torch's names of backends: ``"gloo"`` is our engine.

    ``backend`` may be a registered one, whose ``pg_options`` may be anything. ``device_id`` names a device
    that torch's NCCL would bind the group to; ``_ranks`` is internal to torch.

    Raises:
        DistBackendError: the backend is one that torchestra does not run.
    """
    maker = registered(backend, pg_options)
    terms = GroupTerms(timeout, None if maker else engine_of(backend), pg_options, device_id, maker)
    init.make_world(
        terms, init_method, world_size, rank, store, group_name, enable_reconfigure=enable_reconfigure
    )
    current_world().rename_backends({"native": "gloo", "threads": "gloo"})
    torch_code.world_was_made()


def _supports_reconfigure(group: ProcessGroup | None = None) -> bool:
    """Return whether a group (default: the default one) was made with ``enable_reconfigure=True``."""
    return (default_group() if group is None else group).supports_reconfigure


def _get_reconfigure_handle(group: ProcessGroup | None = None) -> str:
    """Return this rank's handle in a group; see :meth:`torchestra.ProcessGroup.get_reconfigure_handle`."""
    return (default_group() if group is None else group).get_reconfigure_handle()


def _reconfigure(
    uuid: int,
    handles: Collection[str],
    group: ProcessGroup | None = None,
    timeout: Timeout | None = None,
    hints: Mapping[str, str] | None = None,
) -> Work:
    """Make a group one of other ranks; see :meth:`torchestra.ProcessGroup.reconfigure`."""
    options = ReconfigureOptions(uuid, handles, timeout, dict(hints or {}))
    return (default_group() if group is None else group).reconfigure(options)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> AnyGroup | None:
    """Call :func:`torchestra.new_group`; a rank that is not in the group gets what torch returns.

    That is ``GroupMember.NON_GROUP_MEMBER``, or None with ``use_local_synchronization``.
    """
    first, rest = (ranks, timeout, backend, pg_options), (use_local_synchronization, group_desc, device_id)
    return _new_group_with_tag(*first, None, *rest, sort_ranks)


def _new_group_with_tag(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    backend_options: Any = None,
    pg_tag: str | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> AnyGroup | None:
    """Call :func:`new_group` with a tag: a group of these ranks and this tag is made only once."""
    maker = registered(backend, backend_options)
    engine = None if maker else engine_of(backend)
    if backend is not None and engine is None and default_group().maker is not None:
        engine = choose_backend(None)  # requested by name, unless the default group has it
    made = new_groups.make_group(
        new_groups.in_order(ranks) if sort_ranks else ranks,
        GroupTerms(timeout, engine, backend_options, device_id, maker),
        use_local_synchronization,
        group_desc,
        tag=(pg_tag or "").removeprefix(_USER),
    )
    if use_local_synchronization and isinstance(made, NonMember):
        return None
    return _or_non_member(made)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[AnyGroup, list[AnyGroup]]:
    """Call :func:`torchestra.new_subgroups`, with torch's value for the subgroups of other ranks."""
    own, parts = subgroups.new_subgroups(
        group_size, group, timeout, engine_of(backend), pg_options, group_desc
    )
    return own, [_or_non_member(part) for part in parts]


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[AnyGroup | None, list[AnyGroup]]:
    """Call :func:`torchestra.new_subgroups_by_enumeration`, with torch's value for others' subgroups."""
    own, parts = subgroups.new_subgroups_by_enumeration(
        ranks_per_subgroup_list, timeout, engine_of(backend), pg_options, group_desc
    )
    return own, [_or_non_member(part) for part in parts]


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> AnyGroup | None:
    """Call :func:`torchestra.split_group`; None on a rank that is in none of the parts."""
    made = subgroups.split_group(parent_pg, split_ranks, timeout, pg_options, group_desc, engine_of(backend))
    return None if isinstance(made, NonMember) else made


def _get_default_group() -> ProcessGroup:
    """Return the default group; NotInitializedError where there is none."""
    return default_group()


def _get_default_store() -> Store:
    """Return the store that the default group was made over."""
    return default_group().get_group_store()


def _rank_not_in_group(group: AnyGroup | None) -> bool:
    """Return whether this rank is not in a group."""
    return isinstance(group, NonMember)


def _get_group_tag(pg: ProcessGroup) -> str:
    """Return the tag of a group; one that begins with ``ptd:`` if the group was made without one."""
    return current_world().tag_of(pg)


def _find_pg_by_ranks_and_tag(tag: str, ranks: Sequence[int]) -> ProcessGroup | None:
    """Return the group of these global ranks and this tag (``user:`` before it does not count), or None."""
    return current_world().find(ranks, tag.removeprefix(_USER))


def _find_or_create_pg_by_ranks_and_tag(tag: str, ranks: Sequence[int], stride: int) -> ProcessGroup:
    """Find or make the group of this rank's block of ``stride`` consecutive ranks in ``ranks``."""
    return functional_groups.find_or_make_group(tag.removeprefix(_USER), ranks, stride)


def _resolve_group_name_by_ranks_and_tag(ranks: Sequence[int], tag: str) -> str:
    """Return the name of the group of these ranks and this tag."""
    return _find_or_create_pg_by_ranks_and_tag(tag, ranks, len(ranks)).group_name


def _resolve_process_group(group_name: str) -> ProcessGroup:
    """Return the group of a name; NotInitializedError where there is none."""
    return current_world().group(group_name)


def _get_pg_config(group: ProcessGroup | None = None) -> dict[str, Any]:
    """Describe a group (default: the default group)."""
    chosen = group or default_group()
    return {
        "pg_name": chosen.group_name,
        "pg_desc": chosen.group_desc,
        "backend_config": get_backend_config(chosen),
        "pg_size": chosen.size(),
        "ranks": init.get_process_group_ranks(chosen),
    }


def _get_process_group_name(pg: ProcessGroup) -> str:
    """Return the name of a group."""
    return pg.group_name


def _get_process_group_store(pg: ProcessGroup) -> Store:
    """Return the store that a group was made over."""
    return pg.get_group_store()


def _get_group_size(group: AnyGroup | None) -> int:
    """Return how many ranks a group has (default: the default group)."""
    return (default_group() if group is None else group).size()


def _get_group_size_by_name(group_name: str) -> int:
    """Return how many ranks the group of a name has."""
    return current_world().group(group_name).size()


def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """Call :func:`torchestra.get_group_rank`; ``NON_GROUP_MEMBER`` is the last group without this rank."""
    if group is GroupMember.NON_GROUP_MEMBER:
        if global_rank not in group.ranks:
            raise InvalidArgumentError(f"Global rank {global_rank} is not part of group {group!r}")
        return group.ranks.index(global_rank)
    return init.get_group_rank(cast(ProcessGroup, group), global_rank)


def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """Call :func:`torchestra.get_global_rank`; ``NON_GROUP_MEMBER`` is the last group without this rank."""
    if group is GroupMember.NON_GROUP_MEMBER:
        if not 0 <= group_rank < len(group.ranks):
            raise InvalidArgumentError(f"Group rank {group_rank} is not part of group {group!r}")
        return group.ranks[group_rank]
    return init.get_global_rank(cast(ProcessGroup, group), group_rank)


_get_global_rank = get_global_rank


def get_rank(group: AnyGroup | None = None) -> int:
    """Call :func:`torchestra.get_rank`.

    Raises:
        InvalidArgumentError: the group has been destroyed, or was not made by ``new_group`` and its like.
    """
    found = init.get_rank(group)
    if isinstance(group, ProcessGroup) and group not in current_world().groups.values():
        raise InvalidArgumentError(
            f"Group {group!r} is not registered, please create group with torch.distributed.new_group API"
        )
    return found


def _round_robin_process_groups(process_groups: Sequence[ProcessGroup]) -> RoundRobinGroup:
    """Return several groups of the same ranks as one group, which uses them in turn."""
    return RoundRobinGroup(process_groups)


def _store_based_barrier(
    rank: int,
    store: Store,
    group_name: str,
    rendezvous_count: int,
    timeout: Timeout,
    logging_interval: timedelta = timedelta(seconds=10),
) -> None:
    """Wait until ``rendezvous_count`` ranks have called this.

    Raises:
        DistStoreError: they did not in time.
    """
    key = f"store_based_barrier_key:{group_name}"
    try:
        store.barrier(key, rendezvous_count, timeout)
    except StoreTimeoutError as error:
        raise DistStoreError(
            "Timed out initializing process group in store based barrier on rank"
            f" {rank}, for key: {key} (world_size={rendezvous_count},"
            f" timeout={timeout_seconds(timeout):g} s): {error}"
        ) from error
    _log.info("rank %s has passed the barrier %s of %s ranks", rank, key, rendezvous_count)
