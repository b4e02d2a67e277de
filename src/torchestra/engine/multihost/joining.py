"""Enter a group whose ranks are on several hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from torchestra.engine import layout as at
from torchestra.engine.hosts import Hosts
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.joining import join, refuse
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost.bridge import Bridge
from torchestra.engine.multihost.bridge_selection import BRIDGE_VARIABLE, TRUST_VARIABLE, open_bridge
from torchestra.engine.multihost.engine import MultiHostEngine
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.multihost.group_transport import RECORD_BYTES, GroupTransport
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE, heartbeat_bound
from torchestra.engine.multihost.heartbeat_monitor import HeartbeatMonitor
from torchestra.engine.multihost.hierarchy import Call, Hierarchy
from torchestra.engine.multihost.mpi import close_at_exit, start_mpi
from torchestra.engine.multihost.point_to_point import PointToPoint
from torchestra.engine.operations import Kind, pack
from torchestra.errors import InvalidArgumentError, StoreTimeoutError
from torchestra.store import PrefixStore, Store
from torchestra.store.unreadable import reading
from torchestra.system.deadline import Deadline
from torchestra.system.limits import allow_descriptors

_AGREED = "agreed"
_SETTLED_POLL_S = 0.5
_DESCRIPTORS = 5
"""For each end of a rail: two connections, and what ZeroMQ needs for the own one."""


def join_hosts(
    store: Store,
    hosts: Hosts,
    rank: int,
    name: str,
    timeout_s: float,
    *,
    threads: bool,
    bridge: str,
    thread: threading.Thread | None = None,
    has_died: Callable[[int], bool] | None = None,
) -> MultiHostEngine:
    """Enter a group; returns when all ranks have. Must be called by every rank of the group.

    Args:
        store: a store that only the ranks of this group, and only for this purpose, use.
        hosts: where the ranks are; more than one host.
        threads: whether the ranks are threads of this process.
        bridge: the kind of bridge between hosts, from choose_bridge.
        thread: the one that runs the rank's program; default: the calling one.
        has_died: returns whether a rank of this host, alive before, has died on its way here.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
        DistBackendError: there is no way to the other hosts.
        InvalidArgumentError: another rank uses another bridge, or has another heartbeat bound.
    """
    deadline = Deadline(timeout_s)
    bound = heartbeat_bound()  # raises, if it is invalid, before this rank meets any other
    host = hosts.host_at(rank)
    here = hosts.on(host)
    local_rank, own = here.index(rank), PrefixStore(f"host/{host}", store)
    enter = partial(join, threads=threads, thread=thread, has_died=has_died)
    context = enter(own, local_rank, len(here), name, timeout_s, group_ranks=here)
    if thread is not None:
        context.program = thread
    detector = _watch(store, hosts, host, context, bound)
    transport: GroupTransport | None = None
    try:
        _agree(store, bridge, bound, hosts, rank, context, _rest(deadline))
        if bridge == "mpi":
            start_mpi(_rest(deadline), hosts.size)
        transport = GroupTransport(store, hosts, rank)
        engine = _connect(store, bridge, name, context, detector, transport, deadline)
    except BaseException:
        context.leave()
        detector.leave()
        if transport is not None:
            transport.close()
        raise
    if bridge == "mpi":
        close_at_exit(engine)
    return engine


def _rest(deadline: Deadline) -> float:
    return max(0.1, deadline.remaining())


def _connect(
    store: Store,
    bridge: str,
    name: str,
    context: RankContext,
    detector: FailureDetector,
    transport: GroupTransport,
    deadline: Deadline,
) -> MultiHostEngine:
    """Connect to the ranks on other hosts, and return the engine; close the end of the rail if that fails."""
    hosts, end = transport.hosts, None
    if context.rank < hosts.rails:
        end = _open_rail(store, hosts, context.rank, bridge, transport, _rest(deadline))
    try:
        local = LocalEngine(context)
        # The ranks of a host tell others what they called, so they must find a mismatch at once.
        local.choices = replace(local.choices, eager=-1)
        hierarchy = Hierarchy(local, hosts, transport.rank, end, detector, name)
        _exchange_endpoints(hierarchy, transport, _rest(deadline))
        if isinstance(detector, HeartbeatMonitor):
            detector.start()
        return MultiHostEngine(hierarchy, PointToPoint(transport, hierarchy, bridge))
    except BaseException:
        if end is not None:
            end.close()
        raise


def _open_rail(
    store: Store, hosts: Hosts, local_rank: int, bridge: str, transport: GroupTransport, timeout_s: float
) -> Bridge:
    """Open a bridge to the ranks with the same local rank on the other hosts."""
    allow_descriptors(_DESCRIPTORS * (len(hosts) - 1))
    ranks = [members[local_rank] for members in hosts.members]
    names = [*map(hosts.describe, ranks)]
    return open_bridge(bridge, PrefixStore(f"rail/{local_rank}", store), transport, ranks, names, timeout_s)


def _watch(store: Store, hosts: Hosts, host: int, context: RankContext, bound: float) -> FailureDetector:
    """Make the failure detector of a rank that has entered its host's arena."""
    # A wait within the host is mostly for a rank that waits for the network: compared to that a wake-up is
    # cheap, while a yield may give the core away for a whole slice.
    context.store_word(at.YIELDS, 0)
    watch = PrefixStore("watch", store)
    detector = (HeartbeatMonitor if context.rank == 0 else FailureDetector)(
        watch, hosts, host, context, bound
    )
    context.when_aborted = detector.tell_aborted
    context.be_on_host(hosts.names[host], hosts.size)
    context.ask_elsewhere = detector.ask_where_they_are
    return detector


def refuse_hosts(store: Store, hosts: Hosts, why: str) -> None:
    """Do as :func:`torchestra.engine.membership.joining.refuse`, for a group on several hosts.

    It reaches those that wait for ranks of their own host.
    """
    for host in range(len(hosts)):
        refuse(PrefixStore(f"host/{host}", store), why)


def _exchange_endpoints(hierarchy: Hierarchy, transport: GroupTransport, timeout_s: float) -> None:
    """Give every rank the endpoint records of all ranks on other hosts, which admit it from now on."""

    def call() -> Call:
        return Call(pack(Kind.barrier), 0, timeout_s, None)

    hosts = hierarchy.hosts
    own = torch.frombuffer(bytearray(transport.own_record()), dtype=torch.uint8)
    here = torch.empty((len(hierarchy.here), RECORD_BYTES), dtype=torch.uint8)
    hierarchy.share(list(here), own, call())
    blocks = hierarchy.spread(here.view(-1), [len(ranks) * RECORD_BYTES for ranks in hosts.members], call())
    records = torch.empty((hosts.size, RECORD_BYTES), dtype=torch.uint8)
    records[[rank for ranks in hosts.members for rank in ranks]] = torch.cat(blocks).view(-1, RECORD_BYTES)
    transport.expect(records.numpy().tobytes())
    hierarchy.detector.attach(transport)  # else those that have met all others take this one for silent
    hierarchy.agree(call())  # nobody connects to a rank that does not know it yet
    hierarchy.detector.has_met = True


def _read_terms(terms: bytes, size: int) -> tuple[int, str, float]:
    """Return what the first rank to come wrote: which it is, its bridge and its heartbeat bound."""
    with reading("the bridge between hosts that the first rank uses"):
        first, bridge, bound = terms.decode().split(" ")
        if not 0 <= int(first) < size:
            raise ValueError(f"there is no rank {first:.20}")
        return int(first), bridge, float(bound)


def _agree(
    store: Store, bridge: str, bound: float, hosts: Hosts, rank: int, context: RankContext, timeout_s: float
) -> None:
    """Make sure that all ranks use the same bridge and heartbeat bound: those of the first rank to come.

    Returns when all have agreed, or raises the error that one has found. If a rank has died, the others wait
    for it as long as the heartbeat bound, and find it missing when they open the bridge.
    """
    terms = store.compare_set("terms", "", f"{rank} {bridge} {bound!r}")
    first, their_bridge, their_bound = _read_terms(terms, hosts.size)
    if (their_bridge, their_bound) == (bridge, bound):
        if store.add("agreed", 1) == hosts.size:
            store.compare_set("settled", "", _AGREED)
        message = _await_agreement(store, context, min(timeout_s, bound))
        if message != _AGREED:
            context.abort(message)
            raise InvalidArgumentError(message)
        return
    who, other = hosts.describe(rank), hosts.describe(first)
    if their_bridge != bridge:
        message = (
            f"{who} uses the bridge {bridge!r} between hosts, but {other} uses {their_bridge!r}; all ranks"
            f" must use the same: set {TRUST_VARIABLE} and {BRIDGE_VARIABLE} to the same for all, and have"
            " mpi4py on all hosts or on none"
        )
    else:
        message = (
            f"{who} has a heartbeat bound of {bound:g} s, but {other} of {their_bound:g} s; a host"
            " with the longer one sends heartbeats too rarely for the other, which would take it for dead:"
            f" set {HEARTBEAT_VARIABLE} to the same for all ranks, or for none"
        )
    # Several may find it at once: all raise the error of the first.
    message = store.compare_set("settled", "", message).decode()
    context.abort(message)
    raise InvalidArgumentError(message)


def _await_agreement(store: Store, context: RankContext, timeout_s: float) -> str:
    """Wait until the ranks have agreed on their terms, or one has found that they differ; return which."""
    deadline = Deadline(timeout_s)
    while not deadline.expired():
        if context.is_aborted:
            raise context.aborted()
        with contextlib.suppress(StoreTimeoutError):
            return store.await_values(["settled"], min(deadline.remaining(), _SETTLED_POLL_S))[0].decode()
    return _AGREED
