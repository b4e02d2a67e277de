"""Join a group of workers that join and leave: ``init_rpc`` without ``world_size``."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from torchestra.engine import warm_up
from torchestra.engine.membership.joining import join
from torchestra.engine.thread_ranks import ThreadRank
from torchestra.errors import DistNetworkError, InvalidArgumentError, RpcError
from torchestra.rpc import torchscript
from torchestra.rpc.agent import Agent
from torchestra.rpc.dynamic_group import DynamicGroup
from torchestra.rpc.host_connections import ADVICE, given_ports, listening_address
from torchestra.rpc.membership import DYNAMIC, MembershipLog, WorkerJoined, claim_group_kind
from torchestra.rpc.options import RpcBackendOptions
from torchestra.rpc.router import Router
from torchestra.rpc.rref import RRef
from torchestra.store import HashStore, Store
from torchestra.store.process import ProcessIdentity
from torchestra.store.secret import SECRET_ADVICE
from torchestra.store.torch_agent import TorchStore
from torchestra.system.deadline import Deadline
from torchestra.transport.message import Message
from torchestra.transport.transport import Transport

_LOOPBACK = "127.0.0.1"


def join_group(
    store: Store, name: str, rank: int, options: RpcBackendOptions, timeout_s: float, here: ThreadRank | None
) -> Agent:
    """Join the workers that meet at a store; return this worker, which every one of them knows.

    Args:
        here: the rank of this thread, where ranks are threads.

    Raises:
        RpcError: a worker that lives has this name or rank, or those there have a ``world_size``.
        RpcTimeoutError: some did not let this one in.
        InvalidArgumentError: they are on other hosts and there is no secret.
    """
    deadline = Deadline(timeout_s)
    claim_group_kind(store, DYNAMIC)
    warm_up()
    torchscript.register()
    is_told = store.secret is not None
    log = MembershipLog(store, _secret(store))
    inbox = _Inbox()
    try:
        transport = Transport(
            f"worker {name!r}",
            (options.address or listening_address(store)) if is_told else _LOOPBACK,
            options.ports or given_ports(),
            options.heartbeat_timeout,
            inbox.put,
            advice=ADVICE,
            grows=True,
        )
    except DistNetworkError as error:
        raise RpcError(str(error)) from error
    group = DynamicGroup(log, transport, name, options.heartbeat_timeout)
    try:
        endpoint = transport.endpoint
        process = ProcessIdentity.current().encode()
        own = WorkerJoined(name, rank, endpoint.address, endpoint.key.decode(), process)
        group.enter(own, deadline, _none if is_told else _check_same_host)
        agent = _new_agent(group, transport, options, here, inbox)
    except BaseException:
        group.leave()
        transport.close()
        raise
    try:
        group.start(agent)
        group.await_admitted(deadline)
    except BaseException:
        agent.close()
        raise
    return agent


class _Inbox:
    """Takes messages from the network before and after there is an agent."""

    def __init__(self) -> None:
        self.deliver: Callable[[Message], None] | None = None

    def put(self, message: Message) -> None:
        """Give a message to the agent; none comes before there is one, as no other worker is let in."""
        assert self.deliver is not None
        self.deliver(message)


def _new_agent(
    group: DynamicGroup,
    transport: Transport,
    options: RpcBackendOptions,
    here: ThreadRank | None,
    inbox: _Inbox,
) -> Agent:
    """Return this worker, in an arena of its own, over the network with all others."""
    program = here.thread if here is not None else threading.current_thread()
    context = join(HashStore(), 0, 1, "rpc", 0.0, threads=False, thread=program)
    router = Router(context, group.number, [group.number], None)
    router.network, router.members = transport, group
    try:
        agent: Agent = (options._agent_class or Agent)(router, group.workers, options, RRef)
    except BaseException:
        context.leave()
        raise
    inbox.deliver = router.deliver
    return agent


def _secret(store: Store) -> bytes:
    """Return the secret of the group: the job's, or one that its first worker has left in the store.

    Whoever can read the store of a job without a secret is of this user and on this host.

    Raises:
        InvalidArgumentError: the store is torch's, which anybody can read.
    """
    if store.secret is not None:
        return store.secret
    if isinstance(store, TorchStore):
        raise InvalidArgumentError(
            f"workers that meet at a store of torch.distributed need a secret to join: {SECRET_ADVICE}, or"
            " pass secret= to RpcBackendOptions"
        )
    return store.compare_set("torchestra/rpc/secret", "", secrets.token_hex(32))


def _check_same_host(member: WorkerJoined) -> None:
    theirs, own = ProcessIdentity.decode(member.process), ProcessIdentity.current()
    if theirs.space and own.space and theirs.space != own.space:
        raise InvalidArgumentError(
            f"worker {member.name!r} is {theirs}, on another host than this one ({own.hostname}), and there"
            f" is no secret to authenticate each other with; {SECRET_ADVICE}, or pass secret= to"
            " RpcBackendOptions"
        )


def _none(member: WorkerJoined) -> None:
    pass
