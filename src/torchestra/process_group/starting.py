"""Enter a group: start the engine and meet the other ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Union

import torch

from torchestra.communicator.communicator import Communicator
from torchestra.communicator.device import delegate
from torchestra.engine import warm_up
from torchestra.engine.device.agreement import Agreement, DeviceRequest, agree, announce
from torchestra.engine.device.nccl import is_nccl_built, why_no_nccl
from torchestra.engine.fake import FakeEngine
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.joining import join
from torchestra.engine.membership.joining import refuse as refuse_entry
from torchestra.engine.multihost.host_discovery import hosts_found, may_span_hosts
from torchestra.engine.multihost.hosts import Hosts
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
                " cannot be had; without naming it, CUDA tensors go through the memory of the host"
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


def start(
    store: Store,
    rank: int,
    size: int,
    name: str | None,
    seconds: float,
    backend: str,
    program: threading.Thread | None = None,
    hosts: Hosts | None = None,
    bridge: str | None = None,
    request: DeviceRequest = _NATIVE,
    agreement: Agreement | None = None,
) -> Communicator:
    """Enter a group; returns when all ranks have.

    Args:
        store: a store that the ranks of the group share.
        name: of the group; if empty, one is derived from how many groups this rank has made over the store,
            the same number on every rank.
        seconds: how long to wait for the others, and later for their operations.
        backend: as :func:`choose_backend` gives it.
        program: the thread that the rank's program runs in; default: the calling thread.
        hosts: where the ranks are; default: the ranks find out.
        bridge: the bridge between hosts; default: the choice of :func:`choose_bridge`.
        request: which device this rank has, and whether NCCL must run the operations on it.
        agreement: the ranks' agreement on their devices; default: they agree here.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
        DistBackendError: NCCL is asked for, and not available; raised on every rank that asks for it.
    """
    if name is None:
        name = f"direct-{store.add(f'torchestra/made/{rank}', 1)}"
    if backend == "fake":
        return Communicator(FakeEngine(rank, size), name, seconds)
    warm_up()
    if program is None and (here := current_thread_rank()) is not None:
        program = here.thread
    own = PrefixStore(f"group/{name}", store)
    threads = backend == "threads"
    card = None
    if agreement is None and not threads:
        card = announce(own, rank, request, launch_environment().local_rank)
    enter = partial(_enter, own, rank, size, name, seconds, threads, program, bridge)
    if hosts is None and may_span_hosts(own, size):
        with hosts_found(own, rank, size, name, seconds, threads=threads) as (found, residents):
            communicator = enter(found, None if residents is None else residents.has_died)
    else:
        communicator = enter(hosts)
    try:
        agreed = agreement or agree(own, size, name, card, request)
    except BaseException:
        communicator.close()
        raise
    delegate(communicator, own, agreed)
    return communicator


def refuse(store: Store, name: str, hosts: Hosts | None, why: str) -> None:
    """Tell the ranks that wait for the others in :func:`start` that their group cannot be made.

    Args:
        store, name, hosts: the arguments of their :func:`start`.
        why: the text of their error.
    """
    own = PrefixStore(f"group/{name}", store)
    if hosts is not None and len(hosts) > 1:
        from torchestra.engine.multihost.joining import refuse_hosts

        refuse_hosts(own, hosts, why)
    else:
        refuse_entry(own, why)


def _enter(
    own: Store,
    rank: int,
    size: int,
    name: str,
    seconds: float,
    threads: bool,
    program: threading.Thread | None,
    bridge: str | None,
    hosts: Hosts | None,
    has_died: Callable[[int], bool] | None = None,
) -> Communicator:
    """Join the other ranks, on one host or on several."""
    if hosts is None or len(hosts) == 1:
        context = join(own, rank, size, name, seconds, threads=threads, thread=program, has_died=has_died)
        return Communicator(LocalEngine(context), name, seconds)
    # Ranks of one host start quicker without the modules for several hosts.
    from torchestra.engine.multihost.bridge_selection import choose_bridge
    from torchestra.engine.multihost.joining import join_hosts

    if bridge is None:
        mpiexec = launch_environment().source in ("mpich", "openmpi")
        bridge = choose_bridge(threads=threads, mpiexec=mpiexec, has_secret=own.secret is not None)
    engine = join_hosts(
        own, hosts, rank, name, seconds, threads=threads, bridge=bridge, thread=program, has_died=has_died
    )
    return Communicator(engine, name, seconds)
