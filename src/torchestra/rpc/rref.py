"""Remote references: :class:`RRef`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from torchestra.errors import CallLostError, RemoteReferenceError, RpcError, RpcTimeoutError
from torchestra.rpc.calls import Named
from torchestra.rpc.constants import UNSET_RPC_TIMEOUT
from torchestra.rpc.current import agent_or_none, takes_agent
from torchestra.rpc.functions import MARK, async_execution
from torchestra.rpc.options import call_timeout
from torchestra.rpc.profiling import profiler_is_on, recorded
from torchestra.rpc.rref_context import fetch
from torchestra.rpc.rref_state import Entry, Number, User, told
from torchestra.rpc.thread_state import calling_context

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent
    from torchestra.rpc.worker_info import WorkerInfo


class RRef:
    """A reference to a value on some worker, its owner.

    ``RRef(value)`` makes this worker the owner. ``remote()`` gives references to values elsewhere. A
    reference can be passed to other workers in arguments and results; the value is kept while any of them is
    left.

    Args:
        value: what to refer to.
        type_hint: ignored; for torch.distributed's users.

    Raises:
        RpcError: ``init_rpc`` has not been called.
    """

    __slots__ = ("__weakref__", "_agent", "_held", "_type")

    def __init__(self, value: Any, type_hint: Any = None) -> None:
        self._held: Entry | User | None = None
        self._type: Future[Any] | None = None
        agent = agent_or_none()
        if agent is None:
            raise RpcError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling"
                " torchestra.rpc.init_rpc)? RPC has not been initialized"
            )
        self._agent: Agent = agent
        self._held = agent.references.own(value)

    @classmethod
    def _of(cls, agent: Agent, held: Entry | User) -> RRef:
        rref = cls.__new__(cls)
        rref._agent = agent
        rref._held = held
        rref._type = None
        return rref

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None:
            self._agent.references.drop(held)

    def __class_getitem__(cls, kind: Any) -> Any:
        """``RRef[T]``, for annotations: what TorchScript, which has a type of that name, takes for it."""
        known = getattr(torch._jit_internal, "rpc", None)
        return GenericAlias(cls, kind) if known is None else known.RRef[kind]

    def __reduce__(self) -> Any:
        raise RemoteReferenceError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __repr__(self) -> str:
        held = self._holding()
        if isinstance(held, Entry):
            return str(self)
        return f"{self} of worker {self.owner_name()!r}"

    def __str__(self) -> str:
        held = self._holding()
        if isinstance(held, Entry):
            return f"OwnerRRef({told(held.number)})"
        return f"UserRRef(RRefId = {told(held.reference)}, ForkId = {told(held.fork)})"

    def _holding(self) -> Entry | User:
        assert self._held is not None
        return self._held

    def is_owner(self) -> bool:
        """Whether the value is on this worker."""
        return isinstance(self._held, Entry)

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        held = self._holding()
        return self._agent.workers[self._agent.rank if isinstance(held, Entry) else held.owner]

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference."""
        held = self._holding()
        return isinstance(held, Entry) or held.confirmed

    def local_value(self) -> Any:
        """The value itself, on its owner; waits until it is there.

        Raises:
            RemoteReferenceError: this is not the owner.
            Exception: what the function raised whose result this is.
        """
        held = self._holding()
        if not isinstance(held, Entry):
            raise RemoteReferenceError(
                f"Cannot call localValue() on a non-local reference; use to_here(). For UserRRef("
                f"rref_id={told(held.reference)}, fork_id={told(held.fork)}), can't call localValue() on"
                f" user {self._agent.info}. Call it on owner {self.owner()}"
            )
        return self._agent.await_future(held.future, UNSET_RPC_TIMEOUT, "RRef.local_value")

    def to_here(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """The value itself on its owner, a copy elsewhere; waits until it is there.

        Args:
            timeout: in seconds, 0 for none; default: as for all calls.

        Raises:
            RpcTimeoutError: it did not come in time, or the call that makes it was not answered in time.
            WorkerFailedError: the owner is gone.
            Exception: what the function raised whose result this is.
        """
        timeout = call_timeout(timeout, "to_here")
        held = self._holding()
        if isinstance(held, Entry):
            return self._agent.await_future(held.future, timeout, "RRef.to_here")
        self._check(held, "to_here")
        return self._agent.call(
            held.owner,
            fetch,
            (held.reference,),
            timeout=timeout,
            keep=self,
            context=calling_context(),
            doing=RRef.to_here,
        ).wait()

    def _check(self, user: User, doing: str) -> None:
        if user.error is not None:
            raise user.error
        self._check_not_deleted(f"{doing}() on it")

    def _check_not_deleted(self, doing: str) -> None:
        held = self._holding()
        if isinstance(held, User) and held.dropped:
            raise RemoteReferenceError(
                f"{self!r} was deleted when its worker shut down. Cannot call {doing} after deletion."
            )

    def _serialize(self) -> Any:
        """Refused: a reference travels in a call only, where its owner learns of it.

        Raises:
            RemoteReferenceError: always, if it does not raise what kept the value from being made.
        """
        held = self._holding()
        if held.error is not None:
            raise held.error
        self._check_not_deleted("fork an UserRRef")
        raise RemoteReferenceError("an RRef cannot be serialized outside of a call: pass it to one")

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, or a future of it, which is asked for once."""
        held, agent = self._holding(), self._agent
        future = self._type
        if future is None or _has_failed(future):
            if isinstance(held, Entry):
                future = _used(held.future, lambda value: _done(type(value)))
            else:
                self._check(held, "_get_type")
                asked = _rref_typeof_on_owner, (held.reference,)
                call = partial(agent.call, held.owner, *asked, timeout=timeout, keep=self)
                future = recorded("async", asked[0], agent, held.owner, call) if profiler_is_on() else call()
            self._type = future
        if not blocking:
            return future
        if isinstance(held, Entry):
            return agent.await_future(future, timeout, "RRef type")
        return future.wait()

    def _get_future(self) -> Future[Any]:
        """Done when the value has been made, with the error if there was one."""
        held = self._holding()
        if isinstance(held, Entry):
            return held.future
        if held.created is None:
            raise RemoteReferenceError("only the RRef that remote() returned knows when its value is there")
        return held.created

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
        held = self._holding()
        if isinstance(held, Entry):
            _run_backward(self.local_value(), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id < 0:
            raise RemoteReferenceError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: only the owner can run backward"
                " without a context"
            )
        self._check(held, "backward")
        asked = held.reference, dist_autograd_ctx_id, retain_graph
        self._agent.call(held.owner, _backward_on_owner, asked, keep=self).wait()

    def rpc_sync(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: ``rref.rpc_sync().method(...)`` calls the value's method on its owner and waits."""
        return RRefProxy(self, "rpc_sync", call_timeout(timeout, "rpc_sync"))

    def rpc_async(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: ``rref.rpc_async().method(...)`` gives a future of the result."""
        return RRefProxy(self, "rpc_async", call_timeout(timeout, "rpc_async"))

    def remote(self, timeout: float | timedelta = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: ``rref.remote().method(...)`` gives a reference to the result."""
        return RRefProxy(self, "remote", call_timeout(timeout, "remote"))


class RRefProxy:
    """Calls methods of the value of a reference, on its owner."""

    def __init__(self, rref: RRef, kind: str, timeout: float) -> None:
        self._rref = rref
        self._kind = kind
        self._timeout = timeout

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        rref, agent = self._rref, self._rref._agent
        held = rref._holding()
        if isinstance(held, Entry):
            owner, number = agent.rank, held.number
        else:
            rref._check(held, self._kind)
            owner, number = held.owner, held.reference
        to_call, doing = (number, name, args, kwargs), Named(f"method {name} of an RRef's value")
        if self._kind == "remote":
            # What has no such method shall be an error here, as it is in the other two kinds of call.
            if not hasattr(rref._get_type(self._timeout), name):
                agent.call(owner, check_method, (number, name), timeout=self._timeout, keep=rref).wait()
            return remote_call(
                agent, owner, call_method, to_call, None, self._timeout, keep=rref, doing=doing
            )
        context = calling_context()
        future = agent.call(
            owner, call_method, to_call, timeout=self._timeout, keep=rref, context=context, doing=doing
        )
        return future if self._kind == "rpc_async" else future.wait()


@async_execution
@takes_agent
def call_method(
    agent: Agent, number: Number, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method of the value of a reference that this worker owns."""
    return _used(agent.references.value(number), lambda value: _called(value, name, args, kwargs))


@async_execution
@takes_agent
def check_method(agent: Agent, number: Number, name: str) -> Future[None]:
    """Fail unless the value of a reference that this worker owns has a method."""
    return _used(agent.references.value(number), lambda value: _done(getattr(value, name) and None))


@async_execution
@takes_agent
def _rref_typeof_on_owner(agent: Agent, number: Number) -> Future[Any]:
    """The type of the value of a reference that this worker owns."""
    return _used(agent.references.value(number), lambda value: _done(type(value)))


@takes_agent
def _backward_on_owner(agent: Agent, number: Number, context_id: int, retain_graph: bool) -> None:
    value = agent.await_future(agent.references.value(number), UNSET_RPC_TIMEOUT, "RRef.backward")
    _run_backward(value, context_id, retain_graph)


def _run_backward(value: Any, context_id: int, retain_graph: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise RemoteReferenceError(f"RRef should contain a tensor for .backward(), it contains {type(value)}")
    if context_id < 0:
        value.backward(retain_graph=retain_graph)
        return
    from torchestra.autograd.api import backward  # which is built on calls

    backward(context_id, [value], retain_graph)


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
    """Do something with a value as soon as it is there; a future of what comes of that.

    Errors are what they are: what a callback of a future raises would become a RuntimeError.
    """
    if value.done():
        return use(value.value())
    result: Future[Any] = Future()

    def inner(future: Future[Any]) -> None:
        try:
            result.set_result(future.value())
        except Exception as error:
            result.set_exception(error)

    def outer(future: Future[Any]) -> None:
        try:
            use(future.value()).add_done_callback(inner)
        except Exception as error:
            result.set_exception(error)

    value.add_done_callback(outer)
    return result


def _too_late(error: RpcTimeoutError) -> RpcTimeoutError:
    return type(error)(f"RRef creation via rpc.remote() timed out, so there may be no value: {error}")


def _give_up_late(entry: Entry, future: Future[Any]) -> None:
    """A call of this worker to itself has ended: if its time was over, so that its caller gets no value."""
    try:
        future.value()
    except RpcTimeoutError as error:
        entry.error = _too_late(error)
        entry.created |= isinstance(error, CallLostError)
        entry.fail(entry.error)
    except Exception:
        pass  # which the entry knows, for it was told of it where it was raised


def remote_call(
    agent: Agent,
    to: int,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float,
    keep: object = None,
    doing: Any = None,
) -> RRef:
    """Call a function and leave the result where it is; a reference to it."""
    known = agent.references
    if to == agent.rank:
        entry = known.entry_to_fill()
        rref = RRef._of(agent, entry)
        future = agent.call(
            to,
            function,
            args,
            kwargs,
            timeout=timeout,
            creates=(entry.number, None),
            keep=keep,
            context=calling_context(),
            doing=doing,
        )
        future.add_done_callback(partial(_give_up_late, entry))
        return rref
    user = User(known.new_number(), known.new_number(), to, False)
    rref = RRef._of(agent, user)
    known.use(user)
    try:
        future = agent.call(
            to,
            function,
            args,
            kwargs,
            timeout=timeout,
            creates=(user.reference, user.fork),
            keep=keep,
            context=calling_context(),
            doing=doing,
        )
    except BaseException:
        known.forget(user)
        raise
    # Done after what follows from the answer: who waits for it finds the reference as it is then.
    created = user.created = Future()

    def answered(future: Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            known.disown(user, _too_late(error) if isinstance(error, RpcTimeoutError) else error)
            created.set_exception(error)
        else:
            known.confirm(user)
            created.set_result(None)

    future.add_done_callback(answered)
    return rref
