"""The ways to meet: ``env://``, ``tcp://``, ``file://``, or a store that the caller passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from torchestra.engine.multihost.mpi import why_no_mpi
from torchestra.errors import DistNetworkError, InvalidArgumentError, shown
from torchestra.rendezvous.environment import LaunchEnvironment, launch_environment
from torchestra.rendezvous.gathering import gather, newest_world
from torchestra.rendezvous.handlers import handler_of, with_rank
from torchestra.rendezvous.local_job import local_store_address
from torchestra.rendezvous.over_mpi import open_over_mpi
from torchestra.rendezvous.replication import moved_to_replicas, replicas_to_join, replicas_wanted
from torchestra.store import FileStore, PrefixStore, ReplicatedStore, Store, TCPStore
from torchestra.store.base import check_integer, interruptible_sleep
from torchestra.store.secret import SECRET_ADVICE, SECRET_VARIABLE, Secret, job_secret
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.shared_server import keep_server
from torchestra.store.torch_agent import TorchStore, connect_to_agent
from torchestra.system.deadline import Deadline
from torchestra.types import Timeout, timeout_seconds

_UNKNOWN = -1
_MAX_RANKS = 1 << 16  # tested with ten thousand; a larger number is a mistake, and ranks would wait for it
_RETRY_SECONDS = 0.1
_MPI = ("mpich", "openmpi")
_LAUNCHERS_WITHOUT_ADDRESS = (*_MPI, "slurm")

Opener = Callable[[float], Store]
"""Connects to the store within a time-out in seconds."""


@dataclass(frozen=True)
class Rendezvous:
    """The outcome of a meeting.

    Attributes:
        store: shared by all ranks of this world and by nobody else, empty at first.
        rank: which rank this is.
        world_size: how many ranks there are.
        base_store: the store at which they have met, which other worlds use, too.
    """

    store: Store
    rank: int
    world_size: int
    base_store: Store


def rendezvous(
    init_method: str | None = None,
    *,
    rank: int = -1,
    world_size: int = -1,
    timeout: Timeout,
    store: Store | None = None,
    secret: Secret = None,
) -> Rendezvous:
    """Meet the other ranks; return when all have come. Must be called by every rank.

    It may be called again, in the same processes and with the same arguments, for a new world: the keys of
    the old one are not seen. Rank 0's server keeps running until its process ends.

    Args:
        init_method: ``env://`` (None means the same): as the launcher's environment variables say, see
            :func:`launch_environment`. ``tcp://host:port``: rank 0 listens there. ``file:///path``: a
            file that all ranks can write, see :class:`~torchestra.FileStore`. Rank and world size may be
            given in it: ``tcp://host:port?rank=0&world_size=2``. Or a URL for a handler that the program has
            registered (:func:`torchestra.register_rendezvous_handler`).
        rank: this rank; -1: as the address or the environment says.
        world_size: the number of ranks; -1: as the address or the environment says.
        timeout: for reaching the store and for the others to come, and the store's time-out afterwards.
        store: meet here instead. A store of torch.distributed is accepted too.
        secret: a secret that ranks prove to each other that they know; the environment variable
            TORCHESTRA_SECRET if None. Without one, ranks of the same user on one host meet.

    Raises:
        InvalidArgumentError: something is missing from the arguments and the environment, or wrong, or two
            processes are the same rank, or the ranks are on several hosts and have no secret.
        DistNetworkError: rank 0 was not reached in time, or cannot listen.
        StoreTimeoutError: some ranks did not come in time; it names them.
    """
    timeout_s = timeout_seconds(timeout)
    url = "store:" if store is not None else init_method or "env://"
    parts = _split(url)
    if (handler := handler_of(parts.scheme)) is not None:
        store, rank, world_size = next(
            iter(handler(with_rank(url, rank, world_size), timeout=timedelta(seconds=timeout_s)))
        )
    query = dict(parse_qsl(parts.query))
    launch = launch_environment()
    rank = _given_number("rank", rank, query, launch.rank, parts.scheme)
    world_size = _given_number("world_size", world_size, query, launch.world_size, parts.scheme)
    _check_rank(rank, world_size)
    if store is not None:
        shared = store if isinstance(store, Store) else TorchStore(store, proves=job_secret(secret))
        opened, own = shared, gather(shared, rank, world_size, timeout_s)
    else:
        opener = _opener(url, parts, launch, rank, world_size, job_secret(secret))
        opened, own = _met(opener, rank, world_size, timeout_s)
        opened.set_timeout(timeout)
        if (count := replicas_wanted(opened, world_size)) is not None:
            own = moved_to_replicas(own, rank, world_size, count, timeout_s)
    if secret is not None:
        own.secret = secret
    return Rendezvous(own, rank, world_size, opened)


def has_unknown_size(init_method: str | None, store: Store | None) -> bool:
    """Return whether nothing says how many ranks meet, so that they may come and go."""
    if store is not None:
        return True
    parts = _split(init_method or "env://")
    if handler_of(parts.scheme) is not None or "world_size" in dict(parse_qsl(parts.query)):
        return False
    return parts.scheme != "env" or launch_environment().world_size is None


def open_store(
    init_method: str | None, *, rank: int, timeout: Timeout, store: Store | None = None, secret: Secret = None
) -> Store:
    """Return the store of ranks that come and go. Arguments and errors as for :func:`rendezvous`."""
    if store is None:
        url = init_method or "env://"
        parts = _split(url)
        rank = _given_number("rank", rank, dict(parse_qsl(parts.query)), None, parts.scheme)
        opener = _opener(url, parts, launch_environment(), rank, _UNKNOWN, job_secret(secret))
        store = opener(timeout_seconds(timeout))
        store.set_timeout(timeout)
    elif not isinstance(store, Store):
        store = TorchStore(store, proves=job_secret(secret))
    if secret is not None:
        store.secret = secret
    return store


def join_rendezvous(
    init_method: str | None = None,
    *,
    timeout: Timeout,
    store: Store | None = None,
    secret: Secret = None,
) -> Store:
    """Return the store that the ranks of a job that runs have got from :func:`rendezvous`.

    For a process that is none of them; no rank waits for it.

    Args:
        init_method, timeout, store, secret: as for :func:`rendezvous`.

    Raises:
        InvalidArgumentError: something is missing from the arguments and the environment, or wrong.
        DistNetworkError: the store was not reached in time.
        StoreTimeoutError: the ranks of the job have not met in time.
    """
    deadline = Deadline(timeout_seconds(timeout))
    count = None
    if store is not None:
        opened = store if isinstance(store, Store) else TorchStore(store, proves=job_secret(secret))
    else:
        url = init_method or "env://"
        parts = _split(url)
        if handler_of(parts.scheme) is not None:
            raise InvalidArgumentError(
                f"a job whose ranks met through a rendezvous handler ({parts.scheme}://) cannot be joined by"
                " its address; pass store="
            )
        launch = launch_environment()
        opened = _opener(url, parts, launch, _UNKNOWN, _UNKNOWN, job_secret(secret))(deadline.remaining())
        opened.set_timeout(timeout)
        count = replicas_wanted(opened, _MAX_RANKS)
    own = newest_world(opened, deadline.remaining())
    if count is not None:
        own = replicas_to_join(own, count, deadline.remaining())
        own.set_timeout(timeout)
    if secret is not None:
        own.secret = secret
    return own


def _check_rank(rank: int, world_size: int) -> None:
    if world_size > _MAX_RANKS:
        raise InvalidArgumentError(
            f"world_size (WORLD_SIZE) is {shown(world_size)}, but a world has at most {_MAX_RANKS} ranks"
        )
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(
            f"rank must be from 0 to world_size - 1, got rank {shown(rank)} and world_size"
            f" {shown(world_size)}"
        )


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidArgumentError(
            f"init_process_group: `init_method` is no address: {error}, got {shown(url)}"
        ) from error


def _given_number(
    name: str, argument: int, query: Mapping[str, str], environment: int | None, scheme: str
) -> int:
    """Return the rank or world size: the argument, else what the address says, else the environment."""
    argument = check_integer(name, argument)
    if name in query:
        if not query[name].isdigit():
            raise InvalidArgumentError(f"{name} in the address must be a number, got {query[name]!r}")
        if argument not in (_UNKNOWN, int(query[name])):
            raise InvalidArgumentError(
                f"{name} is {argument} as an argument, but {query[name]} in the address; give it once"
            )
        return int(query[name])
    if argument != _UNKNOWN:
        return argument
    if environment is not None:
        return environment
    if scheme == "env":
        raise _not_set(name.upper(), f"pass {name}=")
    raise InvalidArgumentError(
        f"Error initializing torchestra using {scheme}:// rendezvous: {name.replace('_', ' ')} parameter "
        f"missing; pass {name}=, or start with a launcher, which sets {name.upper()}"
    )


def _not_set(variable: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Error initializing torchestra using env:// rendezvous: environment variable {variable} expected, "
        f"but not set; start with torchestra run, torchrun, srun or mpiexec, or set {variable}, or {remedy}"
    )


def _opener(
    url: str,
    parts: SplitResult,
    launch: LaunchEnvironment,
    rank: int,
    world_size: int,
    secret: bytes | None,
) -> Opener:
    if parts.scheme == "env":
        return _by_environment(launch, rank, world_size, secret)
    if parts.scheme == "tcp":
        return _by_address(parts, rank, secret)
    if parts.scheme == "file":
        path = unquote(parts.netloc + parts.path)
        if not path or "\0" in path:
            raise InvalidArgumentError("Error initializing torchestra using file:// rendezvous: path missing")
        return lambda _: FileStore(path, world_size)
    raise InvalidArgumentError(
        f"No rendezvous handler for {url!r}; use env://, tcp://host:port or file:///path"
    )


def _by_address(parts: SplitResult, rank: int, secret: bytes | None) -> Opener:
    try:
        port = parts.port
    except ValueError as error:
        raise InvalidArgumentError(
            f"Error initializing torchestra using tcp:// rendezvous: {error}"
        ) from error
    if port is None or not parts.hostname:
        missing = "port number" if parts.hostname else "host"
        raise InvalidArgumentError(
            f"Error initializing torchestra using tcp:// rendezvous: {missing} missing; use tcp://host:port"
        )
    return _served_by_rank_0(parts.hostname, port, rank, secret)


def _by_environment(launch: LaunchEnvironment, rank: int, world_size: int, secret: bytes | None) -> Opener:
    """Return an opener of the store at which the launcher wants the ranks to meet."""
    variables = os.environ
    served = variables.get("TORCHESTRA_STORE")
    if served and launch.source != "torchrun":
        if "," in served:
            replicas = served.split(",")
            return lambda timeout_s: ReplicatedStore(replicas, timeout_s)
        host, port = _host_and_port("TORCHESTRA_STORE", served)
        # This store has the secret that the launcher gave to all ranks, whatever the ranks' own is.
        return lambda timeout_s: TCPStore(host, port, timeout=timeout_s)
    on_this_host = launch.world_size is not None and launch.local_world_size == launch.world_size
    if launch.source in _LAUNCHERS_WITHOUT_ADDRESS and on_this_host and not variables.get("MASTER_ADDR"):
        return _served_by_rank_0(local_store_address(variables, launch.source), 0, rank, secret)
    if rank != _UNKNOWN and launch.source in _MPI and not variables.get("MASTER_ADDR") and not why_no_mpi():
        return lambda timeout_s: open_over_mpi(rank, world_size, secret, timeout_s)
    host, port = _master(launch)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        run = variables.get("TORCHELASTIC_RUN_ID", "")
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"torchestra/{run}/{attempt}"
        return lambda timeout_s: PrefixStore(prefix, connect_to_agent(host, port, timeout_s, secret))
    several_hosts = None not in (launch.world_size, launch.local_world_size) and not on_this_host
    if several_hosts and secret is None and not Address(host, port).is_local:
        raise InvalidArgumentError(
            f"the ranks are on several hosts ({launch.local_world_size} of {launch.world_size} on this one) "
            f"and have no secret to authenticate each other with; {SECRET_ADVICE}, or pass secret="
        )
    return _served_by_rank_0(host, port, rank, secret)


def _master(launch: LaunchEnvironment) -> tuple[str, int]:
    remedy = "pass init_method='tcp://host:port'"
    if launch.source in _LAUNCHERS_WITHOUT_ADDRESS:
        remedy += " with the host of rank 0, the same for all ranks (they are on several hosts)"
    if launch.source in _MPI:
        remedy += f". With mpi4py they would meet without: {why_no_mpi()}"
    if launch.master_addr is None:
        raise _not_set("MASTER_ADDR", remedy)
    if launch.master_port is None:
        raise _not_set("MASTER_PORT", remedy)
    return launch.master_addr, launch.master_port


def _host_and_port(variable: str, value: str) -> tuple[str, int]:
    if value.startswith("unix:@"):
        return value, 0
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgumentError(f"environment variable {variable} must be host:port, got {value!r}")
    return host.strip("[]"), int(port)


def _served_by_rank_0(host: str, port: int, rank: int, secret: bytes | None) -> Opener:
    address = Address.checked(host, port, listening=rank == 0)
    if rank != 0:
        return lambda timeout_s: TCPStore(host, port, timeout=timeout_s, secret=secret)

    def open_as_master(timeout_s: float) -> Store:
        if address.is_unix or address.port != 0:
            keep_server(host, port, secret)
        return TCPStore(host, port, is_master=True, multi_tenant=True, timeout=timeout_s, secret=secret)

    return open_as_master


def _hint(store: Store) -> str:
    """Return other reasons why ranks may not come."""
    if isinstance(store, TCPStore) and store.secret is None:
        return f" Ranks on other hosts, or of other users, cannot come without {SECRET_VARIABLE}."
    if isinstance(store, FileStore):
        return f" If {store.path} is left from an earlier job, delete it or name a new file."
    return ""


def _met(opener: Opener, rank: int, world_size: int, timeout_s: float) -> tuple[Store, Store]:
    """Return the store that was opened, and the part of it that belongs to this world."""
    deadline = time.monotonic() + timeout_s
    opened = opener(timeout_s)
    while True:
        try:
            remaining = max(0.0, deadline - time.monotonic())
            return opened, gather(opened, rank, world_size, remaining, _hint(opened))
        except DistNetworkError as error:
            # Rank 0's process was ending, or has been restarted; a new one may come soon.
            opened.close()
            lost = str(error)
        except BaseException:
            opened.close()
            raise
        interruptible_sleep(_RETRY_SECONDS)
        try:
            opened = opener(max(0.0, deadline - time.monotonic()))
        except DistNetworkError as error:
            raise DistNetworkError(
                f"rank {rank} of {world_size}, while it waited for the others: {lost}; and no other store "
                f"came within {timeout_s:g} s"
            ) from error
