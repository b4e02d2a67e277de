"""Remote references: :class:`RRef`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import GenericAlias
from typing import Any

import torch
from torch.futures import Future

from torchestra.errors import CallLostError, RemoteReferenceError, RpcError, RpcTimeoutError
from torchestra.rpc.agent import Agent
from torchestra.rpc.calls import Label
from torchestra.rpc.constants import UNSET_RPC_TIMEOUT
from torchestra.rpc.current import agent_or_none
from torchestra.rpc.functions import MARK, async_execution
from torchestra.rpc.options import call_timeout
from torchestra.rpc.package_functions import takes_agent
from torchestra.rpc.profiling import is_recorded, profiled_call, profiler_is_on, recorded
from torchestra.rpc.rref_context import fetch
from torchestra.rpc.rref_state import GlobalId, OwnerRRef, UserRRef, id_text
from torchestra.rpc.thread_state import calling_scope
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.system.kept_errors import fail_future, fresh


class RRef:
    """A reference to a value on some worker, its owner.

    ``RRef(value)`` makes this worker the owner. ``remote()`` gives references to values of any worker. A
    reference can be passed to other workers in arguments and results; the value is kept while any of them is
    left.

    Args:
        value: what to refer to.
        type_hint: ignored; accepted as by torch.distributed.

    Raises:
        RpcError: ``init_rpc`` has not been called.
    """

    __slots__ = ("__weakref__", "_agent", "_profiled", "_state", "_type")

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        self._type: Future[Any] | None = None
        self._profiled: Future[Any] | None = None
        agent = agent_or_none()
        if agent is None:
            raise RpcError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling"
                " torchestra.rpc.init_rpc)? RPC has not been initialized"
            )
        self._agent: Agent = agent
        self._state: OwnerRRef | UserRRef = agent.rrefs.own(value)

    @classmethod
    def _of(cls, agent: Agent, state: OwnerRRef | UserRRef | None) -> RRef:
        """Return a reference; one without a state is given it before anybody else sees it."""
        rref = cls.__new__(cls)
        rref._agent = agent
        if state is not None:
            rref._state = state
        rref._type = rref._profiled = None
        return rref

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None:
            self._agent.rrefs.drop(state)

    def __class_getitem__(cls, kind: Any) -> Any:
        """``RRef[T]``, for annotations: what TorchScript, which has a type of that name, takes for it."""
        torch_rpc = getattr(torch._jit_internal, "rpc", None)
        return GenericAlias(cls, kind) if torch_rpc is None else torch_rpc.RRef[kind]

    def __reduce__(self) -> Any:
        raise RemoteReferenceError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __repr__(self) -> str:
        state = self._state
        if isinstance(state, OwnerRRef):
            return str(self)
        return f"{self} of worker {self.owner_name()!r}"

    def __str__(self) -> str:
        state = self._state
        if isinstance(state, OwnerRRef):
            return f"OwnerRRef({id_text(state.rref_id)})"
        return f"UserRRef(RRefId = {id_text(state.rref_id)}, ForkId = {id_text(state.fork_id)})"

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return isinstance(self._state, OwnerRRef)

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        state = self._state
        return self._agent.info if isinstance(state, OwnerRRef) else self._agent.workers.known(state.owner)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner knows of this reference."""
        state = self._state
        return isinstance(state, OwnerRRef) or state.confirmed

    def local_value(self) -> Any:
        """Return the value itself, on its owner; wait until it is there.

        Raises:
            RemoteReferenceError: this is not the owner.
            Exception: what the function raised whose result this is.
        """
        state = self._state
        if not isinstance(state, OwnerRRef):
            ids = f"rref_id={id_text(state.rref_id)}, fork_id={id_text(state.fork_id)}"
            raise RemoteReferenceError(
                f"Cannot call localValue() on a non-local reference; use to_here(). For UserRRef({ids}),"
                f" can't call localValue() on user {self._agent.info}. Call it on owner {self.owner()}"
            )
        return self._agent.await_future(state.future, UNSET_RPC_TIMEOUT, "RRef.local_value")

    def to_here(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """Return the value itself on its owner, else a copy; wait until it is there.

        Args:
            timeout: in seconds, 0 for none; default: as for all calls.

        Raises:
            RpcTimeoutError: it did not come in time, or the call that makes it was not answered in time.
            WorkerFailedError: the owner is gone.
            Exception: what the function raised whose result this is.
        """
        timeout = call_timeout(timeout, "to_here")
        state = self._state
        if isinstance(state, OwnerRRef):
            return self._agent.await_future(state.future, timeout, "RRef.to_here")
        self._check(state, "to_here")
        return self._agent.call(
            state.owner,
            fetch,
            (state.rref_id,),
            timeout=timeout,
            keep=self,
            scope=calling_scope(),
            label=RRef.to_here,
        ).wait()

    def _check(self, user: UserRRef, doing: str) -> None:
        if user.error is not None:
            raise fresh(user.error)
        self._check_not_deleted(f"{doing}() on it")

    def _check_not_deleted(self, doing: str) -> None:
        state = self._state
        if isinstance(state, UserRRef) and state.dropped:
            raise RemoteReferenceError(
                f"{self!r} was deleted when its worker shut down. Cannot call {doing} after deletion."
            )

    def _serialize(self) -> Any:
        """Refuse: only a call can carry a reference, as its owner must learn of it.

        Raises:
            RemoteReferenceError: always, unless making the value failed: then that error.
        """
        state = self._state
        if state.error is not None:
            raise fresh(state.error)
        self._check_not_deleted("fork an UserRRef")
        raise RemoteReferenceError("an RRef cannot be serialized outside of a call: pass it to one")

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a future of it, which is asked for once."""
        state, agent = self._state, self._agent
        future = self._type
        if future is None or _has_failed(future):
            if isinstance(state, OwnerRRef):
                future = _used(state.future, lambda value: _done(type(value)))
            else:
                self._check(state, "_get_type")
                request = _rref_typeof_on_owner, (state.rref_id,)
                call = partial(profiled_call, agent, state.owner, timeout=timeout, keep=self)
                future = (
                    recorded("async", request[0], agent.info, self.owner(), request[1], None, call)
                    if profiler_is_on() and is_recorded()
                    else call(*request)
                )
            self._type = future
        if not blocking:
            return future
        if isinstance(state, OwnerRRef):
            return agent.await_future(future, timeout, "RRef type")
        try:
            return future.wait()
        finally:
            del future  # as in PendingCall.wait

    def _get_future(self) -> Future[Any]:
        """Return a future that is done when the value has been made, with the error if there was one."""
        state = self._state
        if isinstance(state, OwnerRRef):
            return state.future
        if state.created is None:
            raise RemoteReferenceError("only the RRef that remote() returned knows when its value is there")
        return state.created

    def _get_profiling_future(self) -> Future[Any]:
        """Return a future that is done when a profiler that was on at ``remote()`` has recorded the call."""
        if self._profiled is None:
            raise RpcError("Profiling future has not been set: no profiler was on when remote() was called")
        return self._profiled

    def _set_profiling_future(self, future: Future[Any]) -> None:
        """Set what :meth:`_get_profiling_future` returns."""
        self._profiled = future

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, which must be a tensor with one element, on its owner.

        Args:
            dist_autograd_ctx_id: the distributed autograd context whose gradients are computed. On the owner
                it may be left out: gradients go to ``.grad`` then, and the pass stays on this worker.
            retain_graph: keep the graph for further passes.

        Raises:
            RemoteReferenceError: the value is no tensor, or this is not the owner and there is no context.
            RuntimeError: torch cannot run backward from the value.
            Exception: as for :func:`torchestra.autograd.backward`, and as for :meth:`to_here`.
        """
        state = self._state
        if isinstance(state, OwnerRRef):
            _run_backward(self._agent, self.local_value(), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id < 0:
            raise RemoteReferenceError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: only the owner can run backward"
                " without a context"
            )
        self._check(state, "backward")
        arguments = state.rref_id, dist_autograd_ctx_id, retain_graph
        self._agent.call(state.owner, _backward_on_owner, arguments, keep=self).wait()

    def rpc_sync(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.rpc_sync().method(...)`` calls the value's method on its owner and waits."""
        return RRefProxy(self, "rpc_sync", call_timeout(timeout, "rpc_sync"))

    def rpc_async(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.rpc_async().method(...)`` gives a future of the result."""
        return RRefProxy(self, "rpc_async", call_timeout(timeout, "rpc_async"))

    def remote(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.remote().method(...)`` gives a reference to the result."""
        return RRefProxy(self, "remote", call_timeout(timeout, "remote"))


class RRefProxy:
    """Calls methods of the value of a reference, on its owner."""

    def __init__(self, rref: RRef, mode: str, timeout: float) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        rref, agent = self._rref, self._rref._agent
        state = rref._state
        if isinstance(state, OwnerRRef):
            owner, rref_id = agent.number, state.rref_id
        else:
            rref._check(state, self._mode)
            owner, rref_id = state.owner, state.rref_id
        to_call, label = (rref_id, name, args, kwargs), Label(f"method {name} of an RRef's value")
        if self._mode == "remote":
            # A value without such a method must be an error here, as it is in the other two kinds of call.
            if not hasattr(rref._get_type(self._timeout), name):
                agent.call(owner, check_method, (rref_id, name), timeout=self._timeout, keep=rref).wait()
            return remote_call(
                agent, owner, call_method, to_call, None, self._timeout, keep=rref, label=label
            )
        call = partial(
            profiled_call, agent, owner, timeout=self._timeout, keep=rref, scope=calling_scope(), label=label
        )
        if profiler_is_on() and is_recorded():
            mode = self._mode.removeprefix("rpc_")
            future = recorded(mode, call_method, agent.info, rref.owner(), to_call, None, call)
        else:
            future = call(call_method, to_call)
        try:
            return future if self._mode == "rpc_async" else future.wait()
        finally:
            del future  # as in PendingCall.wait


@async_execution
@takes_agent
def call_method(
    agent: Agent, rref_id: GlobalId, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of the value of a reference that this worker owns."""
    return _used(agent.rrefs.value(rref_id), lambda value: _called(value, name, args, kwargs))


@async_execution
@takes_agent
def check_method(agent: Agent, rref_id: GlobalId, name: str) -> Future[None]:
    """Fail unless the value of a reference that this worker owns has a method."""
    return _used(agent.rrefs.value(rref_id), lambda value: _done(getattr(value, name) and None))


@async_execution
@takes_agent
def _rref_typeof_on_owner(agent: Agent, rref_id: GlobalId) -> Future[Any]:
    """Return the type of the value of a reference that this worker owns."""
    return _used(agent.rrefs.value(rref_id), lambda value: _done(type(value)))


@takes_agent
def _backward_on_owner(agent: Agent, rref_id: GlobalId, context_id: int, retain_graph: bool) -> None:
    value = agent.await_future(agent.rrefs.value(rref_id), UNSET_RPC_TIMEOUT, "RRef.backward")
    _run_backward(agent, value, context_id, retain_graph)


def _run_backward(agent: Agent, value: Any, context_id: int, retain_graph: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise RemoteReferenceError(f"RRef should contain a tensor for .backward(), it contains {type(value)}")
    if context_id < 0:
        value.backward(retain_graph=retain_graph)
        return
    agent.scope.backward(context_id, [value], retain_graph)


def _has_failed(future: Future[Any]) -> bool:
    if not future.done():
        return False
    try:
        future.value()
    except Exception:
        return True
    return False


def _called(value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    method = getattr(value, name)
    result = method(*args, **kwargs)
    if hasattr(method, MARK):
        return result  # type: ignore[no-any-return]
    return _done(result)


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def _used(value: Future[Any], use: Callable[[Any], Future[Any]]) -> Future[Any]:
    """Call ``use`` with a value as soon as it is there; return a future of the result.

    Errors keep their type; those that a callback of a future raises would become RuntimeErrors.
    """
    if value.done():
        return use(value.value())
    result: Future[Any] = Future()

    def inner(future: Future[Any]) -> None:
        try:
            result.set_result(future.value())
        except Exception as error:
            fail_future(result, error)

    def outer(future: Future[Any]) -> None:
        try:
            use(future.value()).add_done_callback(inner)
        except Exception as error:
            fail_future(result, error)

    value.add_done_callback(outer)
    return result


def _too_late(error: RpcTimeoutError) -> RpcTimeoutError:
    return type(error)(f"RRef creation via rpc.remote() timed out, so there may be no value: {error}")


def _give_up_late(owned: OwnerRRef, future: Future[Any]) -> None:
    """End the value of a call of this worker to itself, if the call took too long."""
    try:
        future.value()
    except RpcTimeoutError as error:
        owned.error = _too_late(error)
        owned.created |= isinstance(error, CallLostError)
        owned.fail(owned.error)
    except Exception:
        pass  # which it knows from where it was raised


def remote_call(
    agent: Agent,
    to: int,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float,
    answered: Callable[[Future[Any]], Any] | None = None,
    **options: Any,
) -> RRef:
    """Call a function and leave the result where it is; return a reference to it.

    Args:
        answered: is called with the future of the call's answer, before anybody else hears of it.
    """
    rrefs = agent.rrefs
    call = partial(agent.call, to, function, args, kwargs, timeout=timeout, scope=calling_scope(), **options)
    if to == agent.number:
        owned = rrefs.own_later()
        rref = RRef._of(agent, owned)
        future = call(creates=(owned.rref_id, None))
        future.add_done_callback(partial(_give_up_late, owned))
        rref._profiled = None if answered is None else future.then(answered)
        return rref
    user = UserRRef(rrefs.new_id(), rrefs.new_id(), to, False)
    rref = RRef._of(agent, user)
    rrefs.use(user)
    try:
        future = call(creates=(user.rref_id, user.fork_id))
    except BaseException:
        rrefs.forget(user)
        raise
    # Done after what follows from the answer: whoever waits for it finds the reference as it is then.
    created = user.created = Future()

    def settle(future: Future[Any]) -> None:
        try:
            if answered is None:
                future.value()
            else:
                answered(future)
        except Exception as error:
            rrefs.mark_unlisted(user, _too_late(error) if isinstance(error, RpcTimeoutError) else error)
            fail_future(created, error)
        else:
            rrefs.confirm(user)
            created.set_result(None)

    future.add_done_callback(settle)
    return rref
