"""One world in two libraries: torchestra's default group for torch.distributed, and the other way round.

Each library keeps its own registry of groups. A group that is shared stays its owner's: the other
library's ``destroy_process_group()`` only forgets it, and its operations there fail once the owner has
destroyed it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import distributed
from torch._C import _distributed_c10d as c10d

from torchestra.errors import InvalidArgumentError, NotInitializedError
from torchestra.interop.registration import BACKEND
from torchestra.interop.switch import is_on
from torchestra.interop.torch_distributed.group import TorchestraGroup
from torchestra.interop.torch_distributed.registry import default_group, enter_group, next_name, set_default
from torchestra.interop.torch_distributed.rendezvous import ranks_are_threads, rendezvous
from torchestra.interop.torch_distributed.torch_store import AdoptedStore
from torchestra.process_group import ProcessGroup
from torchestra.world.registration import register
from torchestra.world.registry import own_world


class AdoptedGroup(TorchestraGroup):
    """torch.distributed's view of torchestra's default group, which stays torchestra's."""

    def shutdown(self) -> None:
        """Leave the groups of other devices; torchestra's group stays open."""
        self.leave_other_devices()


class UsedGroup(ProcessGroup):
    """Torchestra's view of torch.distributed's default group, which stays torch.distributed's."""

    def destroy(self) -> None:
        """Do nothing, unless this group was made by shrinking, which torch.distributed does not know."""
        if self.generation:
            super().destroy()


def adopt() -> distributed.ProcessGroup:
    """Make torchestra's default group that of torch.distributed too; return torch's group.

    Every rank must call this after ``torchestra.init_process_group()``, or pass it to that as ``then``. From
    then on code written for torch.distributed has the same ranks: checkpoints, metrics, samplers, DTensor,
    FSDP2. Operations by either library are of one group, in one order. After ``shrink()`` and
    ``grow()``, or when torchestra's world was made again, call this again; ``reconfigure()`` is followed.
    ``torch.distributed.destroy_process_group()`` forgets the group; it stays torchestra's, which destroys it.

    Raises:
        NotInitializedError: torchestra has no default group.
        InvalidArgumentError: torch.distributed has another one, or cannot have such ranks.
    """
    inner = own_world().default
    if inner is None:
        raise NotInitializedError("adopt: call torchestra.init_process_group() first")
    if inner.backend == "fake" or (inner.backend == "threads") != ranks_are_threads():
        raise InvalidArgumentError(
            f"adopt: torch.distributed has one world in a process, and this rank's backend is"
            f" {inner.backend!r}; run ranks as processes"
        )
    known: Any = default_group()
    if known is not None:
        if not isinstance(known, AdoptedGroup):
            raise InvalidArgumentError(
                "adopt: torch.distributed has a default group already; to have torchestra use that, destroy"
                " torchestra's and call torchestra.interop.use()"
            )
        if known.inner is inner and not inner.communicator.closed:
            return known
        distributed.destroy_process_group()
    store = c10d.PrefixStore("adopted", AdoptedStore(inner.get_group_store()))
    group = AdoptedGroup(inner, store)
    backend = "gloo" if is_on() else BACKEND
    group.report_as(backend)
    group.setGroupDesc("default_pg")
    devices = distributed.distributed_c10d.BackendConfig(distributed.Backend(backend))
    enter_group(group, backend, str(devices), store, range(inner.size()), next_name())
    set_default(group)
    if inner.supports_reconfigure:
        inner.when_reconfigured = partial(_follow, weakref.ref(group), inner.when_reconfigured)
    return group


def _follow(
    adopted: weakref.ref[AdoptedGroup],
    follow_others: Callable[[ProcessGroup, Mapping[int, int]], None] | None,
    inner: ProcessGroup,
    numbers: Mapping[int, int],
) -> None:
    """Have torch.distributed's view follow the group, after the registry of torchestra's groups has."""
    if follow_others is not None:
        follow_others(inner, numbers)
    group = adopted()
    if group is not None and group.inner is inner:
        group.follow_inner()


def use() -> ProcessGroup:
    """Make torch.distributed's default group that of ``import torchestra as dist`` too; return torchestra's.

    Every rank must call this after ``torch.distributed.init_process_group()``. A group whose backend is
    torchestra's is used as it is, with operations of either library in one order; for a group of another
    backend, such as NCCL, a new group of the same ranks is made, which meet over torch's store.
    ``torchestra.destroy_process_group()`` forgets a group that is torch.distributed's.

    Raises:
        NotInitializedError: torch.distributed has no default group.
        InvalidArgumentError: torchestra has one already.
    """
    theirs: Any = default_group()
    if theirs is None:
        raise NotInitializedError("use: call torch.distributed.init_process_group() first")
    world = own_world()
    if world.default is not None:
        raise InvalidArgumentError(
            "use: torchestra has a default group already; to have torch.distributed use that, call"
            " torchestra.interop.adopt()"
        )
    group = _borrowed(theirs.inner) if isinstance(theirs, TorchestraGroup) else _beside(theirs)
    if world.thread is None:
        world.thread = threading.current_thread()
    world.default = group
    register(world, group)
    return group


def _borrowed(inner: ProcessGroup) -> UsedGroup:
    return UsedGroup(
        inner.get_group_store(),
        inner.rank(),
        inner.size(),
        inner.options,
        ranks=range(inner.size()),
        description="default_pg",
        communicator=inner.communicator,
    )


def _beside(theirs: Any) -> ProcessGroup:
    """Make a group of the ranks of another backend's group. All of them must call this."""
    asked = c10d._DistributedBackendOptions()
    asked.store = c10d.PrefixStore("torchestra", distributed.distributed_c10d._get_default_store())
    asked.group_rank, asked.group_size = theirs.rank(), theirs.size()
    asked.timeout = distributed.distributed_c10d.default_pg_timeout
    asked.group_id = "used"
    asked.global_ranks_in_group = []
    return rendezvous(asked)
