"""A group of torch.distributed that runs on torchestra's engine.

torch.distributed lets process groups be written in Python: it and its C++ parts call the methods of this
class. Its operations are in operations.py; its identity, its devices and its end are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as c10d_python

from torchestra.arguments.options import GroupOptions
from torchestra.collectives.windows import supports_windows
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.host_staging import POSSIBLE
from torchestra.errors import DistBackendError, DistError, InvalidArgumentError
from torchestra.interop.registration import BACKEND
from torchestra.interop.torch_distributed.errors import as_torch_error
from torchestra.interop.torch_distributed.hooks import Hook, OperationHooks
from torchestra.interop.torch_distributed.operations import CoalescedBlock, Operations
from torchestra.interop.torch_distributed.other_devices import Membership, backends_by_device, group_on
from torchestra.interop.torch_distributed.rendezvous import joined_store, rendezvous, without_peers
from torchestra.interop.torch_distributed.windows import TorchestraWindow
from torchestra.interop.torch_distributed.works import TorchestraWork
from torchestra.process_group import ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.types import DEFAULT_TIMEOUT, Timeout

_Base: Any = distributed.ProcessGroup  # whose annotations leave out half of what its methods take


@untraced
class TorchestraGroup(Operations, _Base):  # type: ignore[misc]
    """A ``torch.distributed.ProcessGroup`` on torchestra's engine.

    Made by ``torch.distributed.init_process_group("torchestra")``, ``new_group`` and so on. All ranks of the
    group must call every operation in the same order, messages apart; each returns a
    ``torch.distributed.Work``. Errors are both torchestra's, which name ranks, and torch.distributed's.

    Args:
        inner: the group of torchestra that it runs on.
        store: torch's store, which the ranks share.
        backend_options: for the backends of other devices.

    Attributes:
        inner: the group of torchestra.
        splits: how often ``torch.distributed.split_group`` has split this group.
    """

    supports_splitting = True
    # Asked by batch_isend_irecv(). If one of its messages is refused within a coalesced block (torch 2.15),
    # torch leaves the block open: it collects later operations, and never runs them.
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = True
    supports_abort_hooks = False  # asked since torch 2.14
    use_pg_for_symm_mem_rendezvous = False

    def __init__(self, inner: ProcessGroup, store: c10d.Store, backend_options: Any = None) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self._store = store
        self._backend_options = backend_options
        self._rank, self._size = inner.rank(), inner.size()
        self._name = inner.group_name
        self._description = "undefined"
        # The program's names for this group's backend: two, if it serves another's name.
        self._backend_name = BACKEND
        self._own_names = {BACKEND}
        self.splits = 0
        # The backend requested by device; known once torch has registered the group.
        self._requested: dict[str, str] | None = None
        self._device_groups: dict[str, distributed.ProcessGroup] = {}
        self._hooks = OperationHooks()
        # For the fast paths; set once it is known that the group serves the CPU.
        self._fast_path: Communicator | None = None
        self._block: CoalescedBlock | None = None
        # Whether torch registers the group; it does not register one that split_group() makes.
        self._registered = False

    # -- what it is

    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Return the backend's name, as the program knows it."""
        return self._backend_name

    _get_backend_name = name

    def getBackendName(self) -> str:
        """Return the backend's own name, for C++, which would use Gloo's internals by Gloo's name."""
        return BACKEND

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` also accepts: torch and libraries check for Gloo's class."""
        return _REPORTED_TYPES[self._backend_name]

    def report_as(self, backend: str) -> None:
        """Take the name and the class of another backend, which this group replaces."""
        self._backend_name = backend
        self._own_names.add(backend)

    @property
    def group_name(self) -> str:
        """Return the group's name in torch.distributed."""
        return self._name

    def getGroupName(self) -> str:
        """Return :attr:`group_name`, for C++."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Name the group, for torch.distributed."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """Return the group's description."""
        return self._description

    def getGroupDesc(self) -> str:
        """Return :attr:`group_desc`, for C++."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Describe the group, for torch.distributed."""
        self._description = self.inner.group_desc = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def get_group_store(self) -> c10d.Store:
        """Return the store that the group was made over."""
        return self._store

    @property
    def options(self) -> GroupOptions:
        """Return a copy of the group's options, with its present time-out and the backend's name."""
        options = self.inner.options
        options.backend = self._backend_name
        return options

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the time-out of later operations, on this rank only."""
        self.inner.set_timeout(timeout)
        for other in self._device_groups.values():
            other.set_timeout(self.inner.timeout)

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the next operation's time-out where other backends serve a device (torch since 2.15)."""
        other: Any  # torch 2.13 declares no such method
        for other in self._device_groups.values():
            other._add_ephemeral_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.inner.get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the ranks' sequence numbers agree since the group was made."""

    def _enable_collectives_timing(self) -> None:
        """Refuse, as Gloo does: the flight record of :attr:`inner` has the times of all operations."""
        raise as_torch_error(
            DistBackendError(
                f"Backend {self._backend_name} is missing implementation of enableCollectivesTiming:"
                " torchestra records all times, see torchestra.flight_record(inner_group(group))"
            )
        )

    # -- hooks, as torch has them since 2.14

    def register_pre_hook(self, hook_id: int, hook: Hook) -> None:
        """Call a function before each operation of this rank, with torch's ``PreHookArgs``.

        An exception of the function ends the call of the operation, which does not begin.

        Args:
            hook_id: a number of the program's choice; a hook that was registered by it is replaced.
            hook: the function.
        """
        self._fast_path = None
        self._hooks.before[hook_id] = hook

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        """Call a function after each operation has begun, with torch's ``PostHookArgs``, which has the Work.

        Args:
            hook_id, hook: as :meth:`register_pre_hook` takes them.
        """
        self._fast_path = None
        self._hooks.after[hook_id] = hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none of this number."""
        self._hooks.before.pop(hook_id, None)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none of this number."""
        self._hooks.after.pop(hook_id, None)

    def _refuse(self, what: str) -> NoReturn:
        raise as_torch_error(DistBackendError(f"Backend {self._backend_name} does not support {what}"))

    def register_abort_hook(self, hook_id: int, hook: Any) -> None:
        """Refuse, as Gloo does."""
        self._refuse("register_abort_hook")

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Refuse, as Gloo does."""
        self._refuse("unregister_abort_hook")

    @property
    def supports_window(self) -> bool:
        """Return whether all ranks are on one host, where they share memory; asked since torch 2.14."""
        return supports_windows(self.inner)

    def new_window(self, tensor: torch.Tensor | None = None) -> TorchestraWindow:
        """Make a window on one tensor of each rank, by which the others can write and read it."""
        return TorchestraWindow(self.inner, tensor)

    # -- devices

    @property
    def _device_types(self) -> list[torch.device]:
        devices = self._requested or backends_by_device(self)
        if devices is None:
            # A group that torch has not registered yet has no devices: so torch (2.15) knows that it has no
            # parts in C++, whose operations its own flight recorder could watch.
            devices = {} if self._registered else dict.fromkeys(("cpu", "cuda"), BACKEND)
        return [torch.device(device) for device in devices if device != "cuda" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if (other := self._other_group_on(kind)) is not None:
            return other._get_backend(torch.device(device))
        # Operations on meta tensors have fake results. batch_isend_irecv() asks for their backend since 2.15.
        if kind not in ("cpu", "meta") and not (kind == "cuda" and POSSIBLE):
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return self

    def _other_group_on(self, device: str) -> Any:
        """Return the group that serves a device, if not this one. All ranks must call this."""
        self._read_requested()
        backend = BACKEND if self._requested is None else self._requested.get(device, BACKEND)
        if backend in self._own_names:
            return None
        if self.supports_reconfigure:
            raise as_torch_error(
                DistBackendError(
                    f"{self!r} can be reconfigured, so no other backend ({backend}) serves {device}"
                )
            )
        if device not in self._device_groups:
            member = Membership(
                self._store,
                self._rank,
                self._size,
                list(self.inner.ranks),
                self.inner.timeout,
                self._name,
                self._description,
                self._backend_options,
            )
            self._device_groups[device] = group_on(device, backend, member)
        return self._device_groups[device]

    def _read_requested(self) -> None:
        if self._requested is None:
            self._requested = backends_by_device(self)
        if self._requested is not None and self._requested.get("cpu") in self._own_names and not self._hooks:
            self._fast_path = self.inner.communicator

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether :meth:`allocate_tensor` takes a device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor in the ranks' shared memory, or in ordinary memory if that is full.

        FSDP2 asks for its buffers here, after ``set_allocate_memory_from_process_group_for_comm(True)``.
        """
        return self.inner.allocate_tensor(size, dtype=dtype, device=device)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing: the ranks are already connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only the ranks of a part take part in making it."""

    # -- other groups, and the end

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> TorchestraGroup | None:
        """Make a group of some of this one's ranks, which must all call this; return None on other ranks.

        Args:
            new_ranks: numbers in this group.
            timeout: default: this group's.
            opts, device_types: ignored.
            group_name, group_desc: of the new group.
        """
        members = sorted(new_ranks)
        if self._rank not in members:
            return None
        name = group_name or f"{self._name}:split:{'-'.join(map(str, members))}"
        asked = c10d._DistributedBackendOptions()
        asked.store = c10d.PrefixStore(f"{name}/", self._store)
        asked.group_rank, asked.group_size = members.index(self._rank), len(members)
        asked.timeout = self.inner.timeout if timeout is None else timeout
        asked.group_id = name
        asked.global_ranks_in_group = [self.inner.ranks[rank] for rank in members]
        group = TorchestraGroup(rendezvous(asked), asked.store, self._backend_options)
        group.report_as(self._backend_name)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._description}:split")
        return group

    def merge_remote_group(
        self,
        store: c10d.Store,
        size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> TorchestraGroup:
        """Make a group of this one and others; see :meth:`torchestra.ProcessGroup.merge_remote_group`."""
        try:
            inner = self.inner.merge_remote_group(joined_store(store), size, timeout, group_name, group_desc)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__
        group = TorchestraGroup(inner, store, self._backend_options)
        group.report_as(self._backend_name)
        group.setGroupName(group_name or inner.group_name)
        group.setGroupDesc(inner.group_desc)
        return group

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None) -> Any:
        """Make a group of the ranks that are left, for ``torch.distributed.shrink_group``.

        Every remaining rank must call this; see :meth:`torchestra.ProcessGroup.shrink`.

        Args:
            ranks_to_exclude: numbers in this group.
            shrink_flags: 0 lets operations that this rank has begun end first, 1 makes them fail at once.
            opts: must be None.
        """
        if opts is not None:
            raise InvalidArgumentError(f"shrink_group: pg_options: this backend has no options, got {opts!r}")
        shrink = self.inner.shrink if shrink_flags else self.inner.shrink_when_idle
        try:
            inner = shrink(list(ranks_to_exclude))
        except DistError as error:
            raise as_torch_error(error) from error.__cause__
        group = TorchestraGroup(inner, self._store, self._backend_options)
        group.report_as(self._backend_name)
        return group

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether the group was made with ``enable_reconfigure=True``, for torch since 2.14."""
        return self.inner.supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        """Return this rank's handle; see :meth:`torchestra.ProcessGroup.get_reconfigure_handle`."""
        try:
            return self.inner.get_reconfigure_handle()
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    def reconfigure(self, opts: Any) -> TorchestraWork:
        """Make this group one of other ranks; see :meth:`torchestra.ProcessGroup.reconfigure`.

        Args:
            opts: torch's ``ReconfigureOptions``: ``uuid``, ``handles``, ``timeout`` and ``hints``.
        """
        # Its operations go to the group's present communicator; the next ones look which that is.
        self._fast_path, self._block = None, None
        try:
            work = self.inner.reconfigure(opts.uuid, opts.handles, opts.timeout, opts.hints)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__
        self.follow_inner()
        return TorchestraWork(work)

    def follow_inner(self) -> None:
        """Take over the ranks of the group of torchestra, which has been reconfigured."""
        self._fast_path, self._block = None, None
        self._rank, self._size = self.inner.rank(), self.inner.size()
        if self in c10d_python._world.pg_group_ranks:
            c10d_python._world.pg_group_ranks[self] = {rank: rank for rank in range(self._size)}
        self._read_requested()

    def move_to(self, store: c10d.Store) -> None:
        """Use another store for parts of the group, and for groups of other devices."""
        self._store = store

    def abort(self) -> None:
        """Leave the group at once; peers in one of its operations now or later get an error."""
        communicator = self.inner.communicator
        if not communicator.closed:
            communicator.engine.abort(f"rank {self._rank} has aborted the group")
        for other in self._device_groups.values():
            other.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """Run queued operations, then leave the group."""
        if not self.inner.communicator.closed:
            self.inner.destroy()
        self.leave_other_devices()

    def leave_other_devices(self) -> None:
        """Leave the parts of the group that other backends serve."""
        for other in self._device_groups.values():
            other.shutdown()
        self._device_groups.clear()

    def __repr__(self) -> str:
        rank = f"rank {self._rank} of {self._size}"
        return f"<TorchestraGroup {self._name!r}: {rank}>"


_REPORTED_TYPES: dict[str, type] = {
    BACKEND: TorchestraGroup,
    "gloo": getattr(distributed, "ProcessGroupGloo", TorchestraGroup),
}


def create_group(options: Any, backend_options: Any) -> TorchestraGroup:
    """Make a group for torch.distributed; return when all its ranks have joined.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, time-out, name and ranks.
        backend_options: the ``pg_options`` of the call, which only backends of other devices use.

    Raises:
        DistBackendError: this torch is too old, or the ranks did not meet.
    """
    _check_torch()
    asked = any(getattr(given, "enable_reconfigure", False) for given in (options, backend_options))
    inner = without_peers(options) if asked else rendezvous(options)
    group = TorchestraGroup(inner, options.store, backend_options)
    group._registered = True
    return group


def _check_torch() -> None:
    """Refuse versions, such as 2.6, whose C++ parts would wait for ever for a group in Python."""
    if not hasattr(c10d.AllreduceOptions, "asyncOp"):
        raise DistBackendError(
            f"torch {torch.__version__} is too old for a backend of torch.distributed in Python: take a newer"
            " one (docs/interop.md names those that were tested), or use torchestra's own functions"
        )
