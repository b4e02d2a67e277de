"""init_rpc and shutdown."""

from __future__ import annotations

import atexit
import json
import threading
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torchestra.arguments.annotations import checked
from torchestra.engine import warm_up
from torchestra.engine.membership.joining import join
from torchestra.engine.multihost.host_discovery import hosts_found
from torchestra.engine.thread_ranks import ThreadRank, current_thread_rank, leave_thread_rank
from torchestra.errors import (
    InvalidArgumentTypeError,
    RemoteReferenceError,
    RpcError,
    StoreTimeoutError,
    WorkerFailedError,
    named,
)
from torchestra.process_group.starting import choose_backend
from torchestra.rendezvous import has_unknown_size, open_store, rendezvous
from torchestra.rpc import leaks, torchscript
from torchestra.rpc.agent import Agent
from torchestra.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT
from torchestra.rpc.current import agent_or_none, current_agent, set_agent
from torchestra.rpc.departing import depart
from torchestra.rpc.membership import STATIC, claim_group_kind
from torchestra.rpc.options import BackendType, RpcBackendOptions
from torchestra.rpc.router import Router
from torchestra.rpc.rref import RRef
from torchestra.rpc.termination import TerminationDetector
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.rpc.workers import Workers
from torchestra.store import PrefixStore, Store
from torchestra.store.collective_errors import raise_on_all_ranks
from torchestra.store.missing_keys import missing_indices
from torchestra.store.unreadable import reading
from torchestra.types import timeout_seconds

_MEETING_SECONDS = 1800.0

_open: weakref.WeakSet[Agent] = weakref.WeakSet()


@checked
def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Meet the other workers, and begin to answer their calls. Must be called by every worker.

    This needs no process group, and works with one too.

    Args:
        name: of this worker, which no other has: letters, digits, underscore, colon and dash, below 128.
        backend: there is only one.
        rank, world_size: which worker this is, and how many there are; default: as the launcher says. With
            ``rank`` alone, and no ``world_size`` in the environment where workers meet by that, it joins a
            group whose workers join and leave at any time: it returns when all that are there know it.
        rpc_backend_options: see :class:`RpcBackendOptions`.

    Raises:
        InvalidArgumentError: an argument is wrong, or something is missing from the environment.
        RpcError: this rank is a worker already, or two workers have one name; or some have a ``world_size``
            and some have none.
        CollectiveTimeoutError, StoreTimeoutError: the others did not come in time.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise InvalidArgumentTypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise InvalidArgumentTypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions"
        )
    WorkerInfo(name, rank)
    _check_no_worker()
    options = rpc_backend_options or RpcBackendOptions()
    here = current_thread_rank()
    store, method = options.store, options.init_method
    size = -1 if world_size is None else world_size
    if here is not None and store is None and method == "env://":
        rank, size, store = here.rank, here.size, PrefixStore("rpc", here.store)
    method = None if store is not None else method
    timeout_s = options.rpc_timeout or _MEETING_SECONDS
    if world_size is None and rank >= 0 and size < 0 and has_unknown_size(method, store):
        agent = _join(name, rank, method, options, timeout_s, here)
    else:
        agent = _meet_all(name, rank, size, method, store, options, timeout_s, here)
    set_agent(agent)
    _open.add(agent)
    agent.start()


def _join(
    name: str,
    rank: int,
    method: str | None,
    options: RpcBackendOptions,
    timeout_s: float,
    here: ThreadRank | None,
) -> Agent:
    """Become a worker of a group that workers join and leave."""
    from torchestra.rpc.joining import join_group  # needs ZeroMQ

    opened = open_store(
        method, rank=rank, timeout=timedelta(seconds=timeout_s), store=options.store, secret=options.secret
    )
    return join_group(opened, name, rank, options, timeout_s, here)


def _meet_all(
    name: str,
    rank: int,
    size: int,
    method: str | None,
    store: Store | None,
    options: RpcBackendOptions,
    timeout_s: float,
    here: ThreadRank | None,
) -> Agent:
    """Become a worker of a group in which as many meet as were told."""
    meeting = rendezvous(
        method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        store=store,
        secret=options.secret,
    )
    own = PrefixStore("torchestra/rpc", meeting.store)
    with raise_on_all_ranks(own, "init", meeting.world_size):
        if meeting.rank == 0:
            claim_group_kind(meeting.base_store, STATIC)
        names = _meet(own, name, meeting.rank, meeting.world_size, timeout_s)
        warm_up()
        torchscript.register()
        router = _open_router(own, name, meeting.rank, meeting.world_size, timeout_s, here)
        workers = Workers(WorkerInfo(each, number) for number, each in enumerate(names))
        agent: Agent = (options._agent_class or Agent)(router, workers, options, RRef)
        _connect_hosts(agent, own, names, timeout_s, options)
    return agent


def _check_no_worker() -> None:
    """Refuse a rank that is a worker already; drop the worker that a forked child has from its parent."""
    agent = agent_or_none()
    if agent is None:
        return
    if not agent.inherited:
        raise RpcError("RPC is already initialized")
    stop(agent)
    leave_thread_rank()


def _connect_hosts(
    agent: Agent, store: Store, names: Sequence[str], timeout_s: float, options: RpcBackendOptions
) -> None:
    """Connect an agent to the workers on other hosts, if there are any; close it if that fails."""
    router = agent.router
    try:
        if remote := router.remote_ranks():
            from torchestra.rpc.host_connections import connect  # needs ZeroMQ

            router.network = connect(store, router.number, remote, names, timeout_s, options, router.deliver)
    except BaseException:
        agent.close()
        raise


def _open_router(
    store: PrefixStore, name: str, rank: int, size: int, timeout_s: float, here: ThreadRank | None
) -> Router:
    """Find the workers on this host, and meet them in an arena."""
    threads = choose_backend(None) == "threads"
    group = f"rpc of {name}"
    with hosts_found(PrefixStore("hosts", store), rank, size, group, timeout_s, threads=threads) as found:
        hosts, local_ranks = found
        host, local_rank = hosts.host_of[rank], hosts.local_rank_of[rank]
        context = join(
            PrefixStore(f"arena/{host}", store),
            local_rank,
            len(hosts.members[host]),
            group,
            timeout_s,
            threads=threads,
            thread=here.thread if here is not None else threading.current_thread(),
            has_died=None if local_ranks is None else local_ranks.has_died,
        )
    return Router(context, rank, hosts.members[host], size)


def _meet(store: PrefixStore, name: str, rank: int, size: int, timeout_s: float) -> list[str]:
    """Tell the others this worker's name; return all names, by rank. Worker 0 collects them for all."""
    keys = [f"name/{peer}" for peer in range(size)]
    store.set(keys[rank], name)
    limit = timedelta(seconds=timeout_s)
    try:
        if rank == 0:
            values = store.await_values(keys, limit)
            with reading("the names of RPC workers"):
                store.set("names", json.dumps([each.decode() for each in values]))
        text = store.await_values(["names"], limit)[0]
    except StoreTimeoutError:
        missing = missing_indices(store, keys)
        raise StoreTimeoutError(
            f"init_rpc: {named(missing, 16) if missing else 'the last worker'} of {size} did not come to"
            f" {store} within {timeout_s:g} s (seen from worker {name!r}, rank {rank}): are all running, and"
            " do all use the same rendezvous?"
        ) from None
    names = _read_names(text, size)
    for peer, other in enumerate(names):
        if names.index(other) != peer:
            raise RpcError(
                f"RPC worker name {other!r} is not unique: ranks {names.index(other)} and {peer} both have it"
            )
    return names


def _read_names(text: bytes, size: int) -> list[str]:
    with reading("the names of RPC workers"):
        names = json.loads(text)
        if not isinstance(names, list) or len(names) != size or not all(type(each) is str for each in names):
            raise ValueError(f"not {size} names: {names!r:.100}")
        return [WorkerInfo(each, rank).name for rank, each in enumerate(names)]


@checked
def shutdown(graceful: bool = True, timeout: float | timedelta = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Stop being a worker.

    Args:
        graceful: wait until every worker has called this, and until all calls are over, those that
            are made meanwhile by functions that still run included; then drop all references to values on
            other workers. Where workers join and leave: wait until the calls of this worker and those to it
            are over, and all others have struck it out. Otherwise stop at once: whoever calls this worker
            from now on gets an error.
        timeout: how long, in seconds, that may take; 0 for no limit.

    Raises:
        RpcError: this rank is no worker.
        RpcTimeoutError: the others did not come in time; this worker has stopped all the same.
        WorkerFailedError: one of the others is gone; this worker has stopped all the same.
        RemoteReferenceError: with leak checking on, references were left; this worker has stopped.
    """
    agent = current_agent()
    timeout = timeout_seconds(timeout, "shutdown")
    if agent.inherited:
        graceful = False
    left: list[str] = []
    try:
        if graceful and agent.router.members is not None:
            left = depart(agent, timeout)
        elif graceful:
            detector = TerminationDetector(agent, timeout)
            detector.await_quiet()
            left = agent.rrefs.delete_users()
            detector.await_quiet()
            _check_counts(agent)
    except WorkerFailedError as failure:
        stop(agent, failure)
        raise
    finally:
        stop(agent)
    if left and not leaks.ignored:
        raise RemoteReferenceError(
            f"Leaking RRefs: worker {agent.info.name!r} has shut down with {len(left)} references that are"
            f" still in use: {', '.join(left)}"
        )


def stop(agent: Agent, failure: WorkerFailedError | None = None) -> None:
    """End this rank's worker at once, because of another one's failure or without."""
    set_agent(None)
    agent.close(failure)
    _open.discard(agent)


def _check_counts(agent: Agent) -> None:
    """Check that no fork is left after a graceful end: one would be a bug of the protocol."""
    counts: dict[str, Any] = agent.rrefs.counts()
    wrong = {name: counts[name] for name in ("num_forks", "num_users", "num_kept") if counts[name]}
    if wrong:
        warnings.warn(
            f"worker {agent.info.name!r} has shut down with {wrong}; workers that died may have left them",
            RuntimeWarning,
            stacklevel=3,
        )


@atexit.register
def _stop_all() -> None:
    """Close all workers: no thread may run in the engine while the interpreter frees memory."""
    for agent in tuple(_open):
        agent.close()
