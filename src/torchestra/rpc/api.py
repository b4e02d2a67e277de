"""Calling functions on other workers: rpc_sync, rpc_async, remote; information about workers."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from torch.futures import Future

from torchestra.arguments.annotations import checked, refuse_type
from torchestra.errors import InvalidArgumentTypeError, shown
from torchestra.rpc.agent import Agent
from torchestra.rpc.constants import UNSET_RPC_TIMEOUT
from torchestra.rpc.current import current_agent
from torchestra.rpc.options import call_timeout
from torchestra.rpc.profiling import is_recorded, profiled_call, profiler_is_on, recorded
from torchestra.rpc.rref import RRef, remote_call
from torchestra.rpc.thread_state import calling_scope, thread_state
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.types import timeout_seconds


def rpc_sync(
    to: Any,
    func: Any,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | timedelta = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function on a worker, and return what it returns.

    Args:
        to: the worker's name, rank or WorkerInfo; this worker is allowed.
        func: anything callable that can be pickled: a function at the top level of a module, a builtin of
            torch, a bound method, a module of torch.nn.
        args, kwargs: its arguments. Tensors are copied.
        timeout: in seconds, 0 for none; default: this worker's, :func:`get_rpc_timeout`.

    Raises:
        RpcTimeoutError: no answer came in time.
        WorkerFailedError: the worker died or shut down.
        RpcError: there is no such worker, RPC is not initialised, or a call or its result cannot be
            unpickled.
        Exception: what the function raised there, with the remote traceback; or what pickling raised here.
    """
    return _call("sync", to, func, args, kwargs, timeout).wait()


def rpc_async(
    to: Any,
    func: Any,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | timedelta = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Call a function on a worker; return a future of the result.

    Tensors in the arguments must not be changed before the future is done. Arguments and errors as for
    :func:`rpc_sync`; what goes wrong later is raised by the future's ``wait()``.
    """
    future: Future[Any] = _call("async", to, func, args, kwargs, timeout)
    return future


def _call(mode: str, to: Any, func: Any, args: Any, kwargs: Any, timeout: float | timedelta) -> Any:
    agent = current_agent()
    if not callable(func) or type(args) is not tuple or kwargs is not None:
        args = _checked(func, args, kwargs, f"rpc_{mode}")
    number = agent.workers.numbers.get(to) if type(to) is str else None
    if number is None:
        number = agent.number_of(to)
    timeout_s = UNSET_RPC_TIMEOUT if timeout is UNSET_RPC_TIMEOUT else call_timeout(timeout, f"rpc_{mode}")
    scope = None if thread_state.scope is None else calling_scope()
    if profiler_is_on() and is_recorded():
        call = partial(profiled_call, agent, number, timeout=timeout_s, scope=scope, label=func)
        return recorded(mode, func, agent.info, agent.workers.known(number), args, kwargs, call)
    waits = mode == "sync"
    return agent.call(number, func, args, kwargs, timeout=timeout_s, scope=scope, waits=waits)


def remote(
    to: Any,
    func: Any,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | timedelta = UNSET_RPC_TIMEOUT,
) -> RRef:
    """Call a function on a worker and leave the result there; return a reference to it, at once.

    Arguments as for :func:`rpc_sync`. What the function raises, and a time-out, are raised by ``to_here()``.
    """
    agent = current_agent()
    arguments = _checked(func, args, kwargs, "remote")
    number = agent.number_of(to)
    timeout_s = call_timeout(timeout, "remote")
    if not (profiler_is_on() and is_recorded()):
        return remote_call(agent, number, func, arguments, kwargs, timeout_s)
    made: list[RRef] = []

    def call(function: Any, args: Any, kwargs: Any, answered: Any = None) -> Future[Any]:
        made.append(remote_call(agent, number, function, args, kwargs, timeout_s, answered, label=func))
        return made[0]._profiled or made[0]._get_future()

    future = recorded("remote", func, agent.info, agent.workers.known(number), arguments, kwargs, call)
    made[0]._set_profiling_future(future)
    return made[0]


@checked
def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the worker with a name, or this one.

    Raises:
        RpcError: no worker has that name.
    """
    agent = current_agent()
    return agent.info if worker_name is None else agent.find(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Return all workers, this one included; where workers join and leave, those that are there now.

    Raises:
        RpcError: this worker was removed from its group, since the others took it for dead.
    """
    return current_agent().current_workers()


def get_rpc_timeout() -> float:
    """Return the default time-out of this worker's calls, in seconds; 0 for no limit."""
    return current_agent().timeout


@checked
def set_rpc_timeout(seconds: float | timedelta) -> None:
    """Set the default time-out of this worker's calls, for calls made from now on."""
    current_agent().timeout = timeout_seconds(seconds, "set_rpc_timeout", "seconds")


def debug_info() -> dict[str, str]:
    """Return how many references, calls and threads this worker has, by torch.distributed.rpc's names.

    After :func:`enable_gil_profiling` also how long threads wait for the GIL.
    """
    agent: Agent = current_agent()
    counts = agent.rrefs.counts()
    counts["agent.num_pending_requests"] = len(agent.pending)
    counts["agent.thread_pool_size"] = agent.pool.max_idle
    counts["agent.num_threads"] = agent.pool.threads
    found = {name: str(number) for name, number in counts.items()}
    if agent.gil_waits.enabled:
        found["agent.gil_average_wait_time_us"] = f"{agent.gil_waits.average_us:.6f}"
    return found


@checked
def enable_gil_profiling(flag: bool) -> None:
    """Measure, or measure no more, how long this worker's threads wait for the GIL once a message has come.

    :func:`debug_info` then has the average of all waits, as ``agent.gil_average_wait_time_us``. Messages that
    were there before a thread looked are not among them; nor is the time until messages from other hosts were
    read from the network.
    """
    current_agent().gil_waits.enable(flag)


def _checked(func: Any, args: Any, kwargs: Any, name: str) -> tuple[Any, ...]:
    """Return the arguments to call a function with; refuse a function or arguments that cannot be used."""
    if not callable(func):
        raise InvalidArgumentTypeError(f"{name}: `func`: function should be callable, got {shown(func)}")
    if kwargs is not None and not isinstance(kwargs, dict):
        refuse_type(name, "kwargs", "a dict or None", kwargs)
    if args is None:
        return ()
    if not isinstance(args, (tuple, list)):
        refuse_type(name, "args", "a tuple, a list or None", args)
    return tuple(args)
