"""Enter a group: start the engine and meet the other ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Union

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device import delegate
from torchestra.engine import warm_up
from torchestra.engine.device.agreement import Agreement, DeviceRequest, agree, announce
from torchestra.engine.device.nccl import is_nccl_built, why_no_nccl
from torchestra.engine.fake import FakeEngine
from torchestra.engine.hosts import Hosts
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.joining import join
from torchestra.engine.membership.joining import refuse as refuse_entry
from torchestra.engine.multihost.host_discovery import hosts_found, may_span_hosts, refuse_hosts
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import DistBackendError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.rendezvous import launch_environment
from torchestra.store import PrefixStore, Store

# Importing torch.distributed for the name of its stores would take a quarter of a second.
_TORCHS: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "Store", Store)

AnyStore = Union[Store, _TORCHS]
"""A store of torchestra, or one of torch.distributed."""

BACKENDS = ("native", "threads", "fake")
OWN_NAMES = ("gloo", "torchestra")
"""Names that programs of torch.distributed use for this engine, which does what Gloo does there."""
_NCCL = "nccl"
_NATIVE = DeviceRequest()
_INSTEAD = {
    "mpi": "leave it out: ranks that mpiexec has started find each other, and this engine serves them",
    "ucc": 'leave it out: this engine serves tensors of the CPU, and "nccl" can serve those of CUDA',
}
_log = logging.getLogger(__name__)


def choose_backend(backend: str | None) -> str:
    """Return ``"native"`` (ranks are processes), ``"threads"`` or ``"fake"``; for None, the calling rank's.

    ``"gloo"`` and ``"torchestra"`` mean the same as None; the first use of Gloo's name is logged. ``"nccl"``,
    alone or as in ``"cpu:native,cuda:nccl"``, concerns devices only: see :func:`requires_nccl`.

    Raises:
        InvalidArgumentError: there is no such backend.
        DistBackendError: NCCL is asked for, and this torch was built without it.
    """
    launched_as = "native" if current_thread_rank() is None else "threads"
    if backend is None:
        return launched_as
    if not isinstance(backend, str):
        raise InvalidArgumentTypeError(f"backend must be a str, got {backend!r}")
    if backend in BACKENDS:
        return backend
    named = {name for _, name in _by_device(backend) if name != _NCCL}
    own = {launched_as if name in OWN_NAMES else name for name in named}
    if instead := next((_INSTEAD[name] for name in sorted(named) if name in _INSTEAD), None):
        raise InvalidArgumentError(f"torchestra has no backend {backend!r}; {instead}")
    known = own <= set(BACKENDS) and len(own) <= 1
    if not known or any(device not in ("", "cpu", "cuda") for device, _ in _by_device(backend)):
        raise InvalidArgumentError(
            f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}, and None to pick; CUDA tensors"
            ' can have "nccl", as in "cpu:native,cuda:nccl"'
        )
    if requires_nccl(backend):
        if ("cpu", _NCCL) in _by_device(backend) or own == {"fake"}:
            raise InvalidArgumentError(f'backend {backend!r}: "nccl" is for tensors of CUDA')
        if not is_nccl_built():
            raise DistBackendError(
                f"Distributed package doesn't have NCCL built in: {why_no_nccl()}, so backend {backend!r}"
                " is not available; without naming it, CUDA tensors go through the memory of the host"
            )
    if "gloo" in named:
        _say_what_serves_gloo()
    return own.pop() if own else launched_as


@cache
def _say_what_serves_gloo() -> None:
    _log.warning('backend "gloo": torchestra\'s own engine serves it, and Gloo is not used')


def requires_nccl(backend: str | None) -> bool:
    """Return whether a backend's name requires that NCCL run the operations on CUDA tensors."""
    return isinstance(backend, str) and any(name == _NCCL for _, name in _by_device(backend))


def device_request(backend: str | None, device_id: Any) -> DeviceRequest:
    """Return the request for a group's device that these arguments make.

    Raises:
        InvalidArgumentError: ``device_id`` is not a CUDA device of this host, by number or as torch.device.
    """
    required = requires_nccl(backend)
    if device_id is None:
        return DeviceRequest(required=required)
    if not torch.backends.cuda.is_built():
        raise InvalidArgumentError(
            "device_id: a group is not bound to a device where torch was built without CUDA, so leave it out;"
            f" got {device_id!r}"
        )
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type != "cuda" or device.index is None or device.index >= torch.cuda.device_count():
        raise InvalidArgumentError(
            f"device_id must be one of the {torch.cuda.device_count()} CUDA devices of this host, by number,"
            f" got {device_id!r}"
        )
    return DeviceRequest(device, required)


def _by_device(backend: str) -> list[tuple[str, str]]:
    """Split ``"cpu:native,cuda:nccl"`` into pairs (device, name); the device is empty if none is named."""
    parts = (part.rpartition(":") for part in backend.lower().split(","))
    return [(device, name) for device, _, name in parts]


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What one rank knows of a group to be started.

    Attributes:
        store: a store that the ranks of the group share.
        rank, size: this rank's number in the group, and how many ranks the group has.
        name: of the group, never used before over the store.
        timeout_s: how long to wait for the others, and later for their operations.
        backend: as :func:`choose_backend` gives it.
        program: the thread that the rank's program runs in; default: the calling thread.
        hosts: where the ranks are; default: the ranks find out.
        bridge: the bridge between hosts; default: the choice of :func:`choose_bridge`.
        request: which device this rank has, and whether NCCL must run the operations on it.
        agreement: the ranks' agreement on their devices; default: they agree when the group starts.
    """

    store: Store
    rank: int
    size: int
    name: str
    timeout_s: float
    backend: str
    program: threading.Thread | None = None
    hosts: Hosts | None = None
    bridge: str | None = None
    request: DeviceRequest = _NATIVE
    agreement: Agreement | None = None

    @property
    def threads(self) -> bool:
        """Return whether the ranks are threads."""
        return self.backend == "threads"


def start(spec: GroupSpec) -> Communicator:
    """Enter a group; returns when all ranks have.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
        DistBackendError: NCCL is asked for, and not available; raised on every rank that asks for it.
    """
    rank, size, name = spec.rank, spec.size, spec.name
    if spec.backend == "fake":
        return Communicator(FakeEngine(rank, size), name, spec.timeout_s)
    warm_up()
    own = PrefixStore(f"group/{name}", spec.store)
    record = None
    if spec.agreement is None and not spec.threads:
        record = announce(own, rank, spec.request, launch_environment().local_rank)
    if spec.hosts is None and may_span_hosts(own, size):
        found = hosts_found(own, rank, size, name, spec.timeout_s, threads=spec.threads)
        with found as (hosts, local_ranks):
            communicator = _enter(spec, own, hosts, None if local_ranks is None else local_ranks.has_died)
    else:
        communicator = _enter(spec, own, spec.hosts)
    try:
        agreed = spec.agreement or agree(own, size, name, record, spec.request)
    except BaseException:
        communicator.close()
        raise
    delegate(communicator, own, agreed)
    return communicator


def start_unregistered(
    store: Store, rank: int, size: int, name: str | None, timeout_s: float, backend: str | None
) -> Communicator:
    """:func:`start` a group that is made as an object, outside of the world.

    Args:
        name: if empty, one is derived from how many such groups this rank has made over the store, the same
            number on every rank.
        backend: as for :func:`choose_backend`.
    """
    spec = GroupSpec(
        store=store,
        rank=rank,
        size=size,
        name=name or f"direct-{store.add(f'torchestra/made/{rank}', 1)}",
        timeout_s=timeout_s,
        backend=choose_backend(backend),
        request=DeviceRequest(required=requires_nccl(backend)),
    )
    return start(spec)


def refuse(store: Store, name: str, hosts: Hosts | None, why: str) -> None:
    """Tell the ranks that wait for the others in :func:`start` that their group cannot be made.

    Args:
        store, name, hosts: those of their :class:`GroupSpec`.
        why: the text of their error.
    """
    own = PrefixStore(f"group/{name}", store)
    if hosts is not None and len(hosts) > 1:
        from torchestra.engine.multihost.joining import refuse_hosts

        refuse_hosts(own, hosts, why)
    else:
        refuse_entry(own, why)


def cancel(store: Store, name: str, why: str) -> None:
    """Have ranks that are in :func:`start`, or will be, give up; it has no effect once all have come.

    Args:
        store, name: those of their :class:`GroupSpec`.
        why: the text of their error.
    """
    hosts = refuse_hosts(PrefixStore(f"group/{name}", store), why)
    refuse(store, name, hosts, why)


def _enter(
    spec: GroupSpec, own: Store, hosts: Hosts | None, has_died: Callable[[int], bool] | None = None
) -> Communicator:
    """Join the other ranks, on one host or on several, over the group's part of the store."""
    program = spec.program
    if program is None and (here := current_thread_rank()) is not None:
        program = here.thread
    rank, name, timeout_s = spec.rank, spec.name, spec.timeout_s
    if hosts is None or len(hosts) == 1:
        context = join(
            own, rank, spec.size, name, timeout_s, threads=spec.threads, thread=program, has_died=has_died
        )
        return Communicator(LocalEngine(context), name, timeout_s)
    # Ranks of one host start quicker without the modules for several hosts.
    from torchestra.engine.multihost.bridge_selection import choose_bridge
    from torchestra.engine.multihost.joining import join_hosts

    bridge = spec.bridge
    if bridge is None:
        mpiexec = launch_environment().source in ("mpich", "openmpi")
        bridge = choose_bridge(threads=spec.threads, mpiexec=mpiexec, has_secret=own.secret is not None)
    engine = join_hosts(
        own,
        hosts,
        rank,
        name,
        timeout_s,
        threads=spec.threads,
        bridge=bridge,
        thread=program,
        has_died=has_died,
    )
    return Communicator(engine, name, timeout_s)
