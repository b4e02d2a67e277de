"""As ``torch.distributed.rpc.api``."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch._C._profiler import ActiveProfilerType
from torch.futures import Future

from torchestra import rpc
from torchestra.compat.futures import wait_all
from torchestra.compat.rpc.agents import TensorPipeAgent
from torchestra.compat.rpc.internal import PythonUDF, _internal_rpc_pickler, _run_pickled
from torchestra.errors import RemoteReferenceError, RpcError
from torchestra.rpc import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    RRef,
    WorkerInfo,
    gathering,
    get_rpc_timeout,
    get_worker_info,
)
from torchestra.rpc.current import agent_or_none, current_agent
from torchestra.rpc.profiling import profiler_is_on, unrecorded

__all__ = [
    "PyRRef",
    "RRef",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_default_pickler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_ignore_rref_leak",
    "_internal_rpc_pickler",
    "_is_current_rpc_agent_set",
    "_require_initialized",
    "_rref_typeof_on_owner",
    "_rref_typeof_on_user",
    "_set_and_start_rpc_agent",
    "_thread_local_var",
    "_to_worker_info",
    "_use_rpc_pickler",
    "_wait_all",
    "_wait_all_workers",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger(__name__)
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_as_ever: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
PyRRef = RRef


# -- calls


def _packed(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return a call; with another pickler than our own, a call that unpickles and runs its pickle."""
    if _default_pickler is _internal_rpc_pickler:
        return function, args, kwargs
    udf = PythonUDF(function, args or (), kwargs or {})
    return _run_pickled, _default_pickler.serialize(udf), None


def _in_legacy_profiles_only() -> contextlib.AbstractContextManager[None]:
    """Make calls no ranges of torch.profiler, as torch's own are none."""
    if not profiler_is_on() or torch._C._autograd._profiler_type() == ActiveProfilerType.LEGACY:
        return _as_ever
    return unrecorded()


def rpc_sync(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Call :func:`torchestra.rpc.rpc_sync`."""
    with _in_legacy_profiles_only():
        return rpc.rpc_sync(to, *_packed(func, args, kwargs), timeout=timeout)


def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """Call :func:`torchestra.rpc.rpc_async`; ``_wait_all`` waits for it."""
    with _in_legacy_profiles_only():
        future = rpc.rpc_async(to, *_packed(func, args, kwargs), timeout=timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef:
    """Call :func:`torchestra.rpc.remote`."""
    with _in_legacy_profiles_only():
        return rpc.remote(to, *_packed(func, args, kwargs), timeout=timeout)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle the block's calls with an instance of a class derived from ``_InternalRPCPickler``."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for all calls made by ``rpc_async`` in it on this thread."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# -- workers


def _require_initialized(func: F) -> F:
    """Make a function raise RpcError if ``init_rpc`` has not been called."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        current_agent()
        return func(*args, **kwargs)

    return cast("F", wrapper)


def _is_current_rpc_agent_set() -> bool:
    """Return whether this rank is a worker."""
    return agent_or_none() is not None


def _get_current_rpc_agent() -> TensorPipeAgent:
    """Return this worker, with torch's methods."""
    return TensorPipeAgent(current_agent())


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Refuse an agent of another backend.

    Raises:
        RpcError: always; torchestra's own agents make and answer calls.
    """
    raise RpcError(f"calls are made by torchestra's own agents: {agent!r} cannot be run")


def _to_worker_info(to: Any) -> WorkerInfo:
    """Return the worker that a name, a rank or a WorkerInfo means."""
    return current_agent().find(to)


def _rref_typeof_on_owner(rref: RRef, blocking: bool = True) -> Any:
    """Return the type of a reference's value."""
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(rref: RRef, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Return the type of a reference's value."""
    return rref._get_type(timeout, blocking)


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Call :func:`torchestra.rpc.gathering.all_gather`."""
    return gathering.all_gather(obj, worker_names, timeout)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Call :func:`torchestra.rpc.gathering.barrier`; its errors are only logged."""
    try:
        gathering.barrier(worker_names)
    except RpcError:
        _log.exception("Failed to complete barrier")


# -- the end


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RpcError:
        _log.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Drop all references to values on other workers."""
    current_agent().rrefs.delete_users()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Call :func:`torchestra.rpc.shutdown`, in torch's steps, each of which tests replace.

    Raises:
        RemoteReferenceError: with ``_ignore_rref_leak`` False, other workers still refer to values of this
            one after they should have dropped them.
    """
    agent = _get_current_rpc_agent()
    if not agent.is_static_group:
        rpc.shutdown(graceful, timeout)
        return
    try:
        if graceful:
            _wait_all_workers(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
        forks = current_agent().rrefs.counts()["num_forks"]
        if forks and graceful and not _ignore_rref_leak:
            raise RemoteReferenceError(
                f"Leaking RRefs detected: other workers have {forks} references to values of this one"
            )
    finally:
        agent.shutdown()
