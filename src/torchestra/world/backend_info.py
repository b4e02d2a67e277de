"""Information on backends, on how this rank was launched and on groups; and aborting groups that hang."""

from __future__ import annotations

import os

import torch

from torchestra.arguments.annotations import checked
from torchestra.communicator.device import agreement_of
from torchestra.engine.device.nccl import is_nccl_built
from torchestra.engine.local import reduces
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, NotInitializedError, shown
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.process_group.starting import BACKENDS, OWN_NAMES, choose_backend
from torchestra.rendezvous import launch_environment
from torchestra.types import DEFAULT_TIMEOUT, ReduceOp, Timeout
from torchestra.world.init import AnyGroup, default_group, destroy_process_group
from torchestra.world.registry import current_world

default_pg_timeout = DEFAULT_TIMEOUT
"""The time-out of a default group that is made without one."""


class Backend(str):
    """The names of backends, as attributes; ``Backend(name)`` is the name in lower case, a plain str.

    ``NATIVE`` and ``THREADS`` are torchestra's engine between processes and between threads, ``GLOO``
    whichever of these the rank was launched with, ``FAKE`` the fake world, ``NCCL`` torch's for CUDA tensors.
    ``MPI``, ``UCC`` and ``XCCL`` are torch's names for what torchestra does not have;
    :func:`is_backend_available` tells.

    Raises:
        InvalidArgumentError: the name is not a str.
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    NATIVE = "native"
    THREADS = "threads"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"

    def __new__(cls, name: str) -> str:  # type: ignore[misc]
        """Return the name in lower case."""
        if not isinstance(name, str):
            raise InvalidArgumentError(f"Backend constructor parameter must be string-ish, got {name!r}")
        return name.lower()


@checked
def is_backend_available(backend: str) -> bool:
    """Return whether :func:`torchestra.init_process_group` takes a backend of this name, ``"cpu:..."``
    included.

    It takes NCCL if this torch was built with it, and the name of Gloo, in whose place torchestra runs.
    """
    if not isinstance(backend, str):
        raise InvalidArgumentTypeError(f"is_backend_available: `backend` must be a str, got {backend!r}")
    lower = backend.lower()
    if lower.removeprefix("cuda:") == "nccl":
        return is_nccl_built()
    return lower.removeprefix("cpu:") in (*BACKENDS, *OWN_NAMES)


def is_gloo_available() -> bool:
    """Return :func:`is_backend_available` of torch's Gloo."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Return :func:`is_backend_available` of torch's NCCL."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return :func:`is_backend_available` of torch's MPI."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return :func:`is_backend_available` of torch's UCC."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return :func:`is_backend_available` of torch's XCCL."""
    return is_backend_available("xccl")


@checked
def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the backend for tensors on a device when the program names none: for the CPU, the calling
    rank's.

    Raises:
        InvalidArgumentError: there is no default for this kind of device.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"get_default_backend_for_device: `device` must be a device, got {shown(device)}"
        ) from error
    if kind != "cpu":
        raise InvalidArgumentError(f"Default backend not registered for device : {device}")
    return choose_backend(None)


@checked
def get_backend(group: AnyGroup | None = None) -> str:
    """Return the backend's name: ``"native"``, ``"threads"`` or ``"fake"``."""
    names = default_group() if group is None else group
    if isinstance(names, NonMember):
        raise InvalidArgumentError(f"get_backend: Invalid process group specified: this rank is {names!r}")
    return names.backend


@checked
def get_backend_config(group: AnyGroup | None = None) -> str:
    """Return which backend the group (default: the default group) has for which device: ``"cpu:native"``, or
    ``"cpu:native,cuda:nccl"`` where it delegates operations on CUDA tensors to NCCL.

    Raises:
        InvalidArgumentError: this rank is not in the group.
    """
    own = f"cpu:{get_backend(group)}"
    names = default_group() if group is None else group
    delegates = isinstance(names, ProcessGroup) and agreement_of(names.communicator) is not None
    return f"{own},cuda:nccl" if delegates else own


@checked
def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether a reduce operation is defined for complex tensors."""
    return reduces(torch.complex64, reduceOp)


def is_torchelastic_launched() -> bool:
    """Return whether this process was started by torchrun (torch's elastic agent)."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_pg_count() -> int:
    """Return how many groups all ranks have made together, the default group and destroyed ones included.

    Groups that only their members make are not counted.
    """
    world = current_world()
    return 0 if world.default is None else 1 + world.made


@checked
def set_pg_timeout(timeout: Timeout, group: AnyGroup | None = None) -> None:
    """Change how long later operations of a group (default: the default group) may wait.

    It changes the calling rank only, so all ranks should call it. (torch's ``_set_pg_timeout``.)

    Raises:
        InvalidArgumentError: this rank is not in the group, or ``timeout`` is not a time-out.
    """
    _member(group).set_timeout(timeout)


@checked
def abort_process_group(group: AnyGroup | None = None) -> None:
    """Abort a group, or with None (or the default group) all of them; any single rank may call it.

    All operations under way in the group, here or on another rank, fail with GroupAbortedError, and so do
    later ones; this rank leaves the group without waiting. (torch's ``_abort_process_group``.)

    Raises:
        NotInitializedError: there is no such group.
        InvalidArgumentError: this rank is not in the group.
    """
    names = _member(group)
    world = current_world()
    for each in world.groups.values() if names is world.default else (names,):
        each.abort()
    destroy_process_group(names)


def _member(group: AnyGroup | None) -> ProcessGroup:
    names = default_group() if group is None else group
    if isinstance(names, NonMember) or not isinstance(names, ProcessGroup):
        raise InvalidArgumentError(f"Invalid process group specified: {names!r}")
    return names


@checked
def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this rank's number among the ranks of its host, as the launcher has set it.

    Raises:
        NotInitializedError: the launcher has not set it, and there is no ``fallback_rank``.
    """
    here = current_thread_rank()
    if here is not None:
        return here.rank
    local = launch_environment().local_rank
    if local is not None:
        return local
    if fallback_rank is not None:
        return int(fallback_rank)
    raise NotInitializedError(
        "LOCAL_RANK is not in the environment; launch with torchestra run or torchrun, or give fallback_rank"
    )
