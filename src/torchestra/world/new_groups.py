"""Making groups other than the default group: by all ranks of the world, or by their members only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchestra.arguments.annotations import checked
from torchestra.communicator.device import agreement_of
from torchestra.engine.device.agreement import DeviceRequest
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import GroupOptions, NonMember, ProcessGroup
from torchestra.process_group.group import GroupMaker
from torchestra.process_group.starting import GroupSpec, choose_backend, device_request
from torchestra.system.forking import refusal
from torchestra.types import Timeout
from torchestra.world.group_agreement import GroupCall, checked_ranks, same_call
from torchestra.world.init import DEFAULT_NAME, AnyGroup, GroupTerms, default_group, start_group
from torchestra.world.registration import register
from torchestra.world.registry import World, compact, current_world, label

_DEFAULTS = GroupTerms()


@checked
def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: GroupOptions | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: int | torch.device | None = None,
    sort_ranks: bool = True,
) -> AnyGroup:
    """Make a group of some ranks. Must be called by every rank of the world, in the same order.

    Args:
        ranks: global ranks; default: all. The same on all ranks.
        timeout: for operations of the group; default: that of the default group.
        backend: None or the default group's; ``"nccl"`` as for :func:`init_process_group`.
        pg_options, device_id: as for :func:`init_process_group`.
        use_local_synchronization: if true, only the members need to call, and ranks that are members of
            several such groups must make them in the same order.
        group_desc: a description.
        sort_ranks: number the members in the order of their global ranks; if false, as they are given.

    Returns:
        The group; on a rank that is not in it, a :class:`NonMember`.

    Raises:
        InvalidArgumentError: ranks repeat or do not exist, or an argument is wrong.
        NotInitializedError: there is no default group.
        CollectiveTimeoutError: not all members came in time.
        CollectiveMismatchError: another rank has called it with other ranks, or makes groups by another
            function; raised on every rank that has not made its group yet. The other groups stay usable.
    """
    terms = GroupTerms(timeout, backend, pg_options, device_id)
    return make_group(in_order(ranks) if sort_ranks else ranks, terms, use_local_synchronization, group_desc)


def in_order(ranks: Sequence[int] | None) -> Sequence[int] | None:
    """Sort global ranks; raise InvalidArgumentError if they are not ranks of the default group."""
    return None if ranks is None else sorted(checked_ranks(ranks, default_group().size()))


def make_group(
    ranks: Sequence[int] | None = None,
    asked: GroupTerms = _DEFAULTS,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    *,
    tag: str = "",
    deferred: bool = False,
) -> AnyGroup:
    """Do what :func:`new_group` does, with more choices, and number the ranks in the given order.

    Args:
        tag: tells groups of the same ranks apart: if there is a group of these ranks and this tag already, it
            is returned. Without a tag a new group is made each time.
        deferred: return at once; the members meet in their first operation. All members must call, as with
            ``use_local_synchronization``.
    """
    terms = _terms(asked)
    world, parent = terms.world, terms.parent
    chosen = checked_ranks(range(parent.size()) if ranks is None else ranks, parent.size())
    if not use_local_synchronization and not deferred:
        return _make_together(terms, "new_group", [chosen], group_desc, tag)[0]
    named = label(chosen)
    number = world.made_locally[named] = world.made_locally.get(named, 0) + 1
    return _make_named(terms, chosen, _name_in(parent, f"of-{named}-{number}"), group_desc, tag, deferred)


def make_groups(
    function: str, lists: Sequence[Sequence[int]], asked: GroupTerms, group_desc: str | None = None
) -> list[AnyGroup]:
    """Make a :func:`new_group` of each of several lists; messages name ``function`` as the caller."""
    terms = _terms(asked)
    size = terms.parent.size()
    chosen = [compact(sorted(checked_ranks(ranks, size))) for ranks in lists]
    return _make_together(terms, function, chosen, group_desc)


def make_parts(
    call: str,
    parent: ProcessGroup,
    parts: Sequence[Sequence[int]],
    asked: GroupTerms,
    group_desc: str | None = None,
) -> list[AnyGroup]:
    """Make a group of each of some parts of a group. Must be called by all ranks of that group, and no other.

    Args:
        call: the function that the program has called.
        parts: the global ranks of each.
        group_desc: a description; default: the group's, ``:split:`` and how often it has been cut before.
    """
    terms = _terms(asked)
    counted = f"split {parent.group_name}"
    number = terms.world.made_locally[counted] = terms.world.made_locally.get(counted, 0) + 1
    key = _name_in(terms.parent, f"{parent.group_name}.{number}")
    names = [_name_in(terms.parent, f"{parent.group_name}.{number}.{index}") for index in range(len(parts))]
    description = group_desc or f"{parent.group_desc}:split:{number - 1}"
    return _make_all(terms, call, key, dict(zip(names, parts, strict=True)), description)


class _Terms(NamedTuple):
    """Hold the terms that all groups of one call have in common, defaults filled in."""

    world: World
    parent: ProcessGroup
    backend: str
    timeout_s: float
    maker: GroupMaker | None
    request: DeviceRequest


def _terms(asked: GroupTerms) -> _Terms:
    backend, maker = asked.backend, asked.maker
    world = current_world()
    parent = default_group()
    if world.inherited:
        raise refusal(f"no group can be made of the world of rank {parent.rank()}")
    request = device_request(backend, asked.device_id)
    if maker is None and backend is None:
        maker = parent.maker
    own = parent.backend if parent.maker is None else choose_backend(backend if maker is None else None)
    if maker is None and backend is not None and choose_backend(backend) != own:
        raise InvalidArgumentError(
            f"new_group: backend {backend!r} differs from the default group's {parent.backend!r}"
        )
    timeout_s = asked._replace(maker=maker).timeout_s(parent.timeout)
    return _Terms(world, parent, own, timeout_s, maker, request)


def _name_in(parent: ProcessGroup, name: str) -> str:
    epoch = "" if (made := parent.reconfiguration) is None or made.uuid is None else f"~{made.uuid}"
    if parent.group_name == DEFAULT_NAME and not epoch:
        return name
    # Groups made before the world was shrunk or reconfigured may have the short one.
    return f"{name}@{parent.group_name}{epoch}"


def _make_together(
    terms: _Terms, function: str, lists: Sequence[Sequence[int]], group_desc: str | None, tag: str = ""
) -> list[AnyGroup]:
    """Make groups that all ranks of the world make."""
    terms.world.made += 1  # counts calls, so that ranks which differ in one still agree on the next
    key = _name_in(terms.parent, str(terms.world.made))
    if len(lists) == 1:
        names = [key]
    else:
        names = [_name_in(terms.parent, f"{terms.world.made}.{index}") for index in range(len(lists))]
    return _make_all(terms, function, key, dict(zip(names, lists, strict=True)), group_desc, tag)


def _make_all(
    terms: _Terms,
    function: str,
    key: str,
    groups: Mapping[str, Sequence[int]],
    group_desc: str | None,
    tag: str = "",
) -> list[AnyGroup]:
    def make() -> list[AnyGroup]:
        return [_make_named(terms, ranks, name, group_desc, tag) for name, ranks in groups.items()]

    if terms.parent.size() == 1 or terms.backend == "fake":
        return make()
    with same_call(terms.parent, key, GroupCall(function, terms.parent.rank(), groups)):
        return make()


def _make_named(
    terms: _Terms, ranks: Sequence[int], name: str, group_desc: str | None, tag: str, deferred: bool = False
) -> AnyGroup:
    world, parent = terms.world, terms.parent
    if parent.rank() not in ranks:
        return NonMember(ranks, name)
    if tag and (existing := world.find(ranks, tag)) is not None:
        return existing
    agreement = None if parent.maker is not None else agreement_of(parent.communicator)
    spec = GroupSpec(
        store=parent.store,
        rank=ranks.index(parent.rank()),
        size=len(ranks),
        name=name,
        timeout_s=terms.timeout_s,
        backend=terms.backend,
        program=world.thread,
        hosts=None if parent.maker is not None else parent.communicator.hosts_among(ranks),
        request=terms.request,
        agreement=None if agreement is None else agreement.among(ranks),
    )
    group = start_group(spec, ranks, group_desc or "undefined", deferred=deferred, maker=terms.maker)
    register(world, group, tag)
    return group
