"""The errors of calls: exceptions of functions on other workers, time-outs, workers that are gone."""

from __future__ import annotations

import logging
import pickle
import traceback
from typing import Any

import torch

from torchestra.errors import RemoteError, RemoteNameError, RpcError, RpcTimeoutError, WorkerFailedError
from torchestra.rpc.calls import PendingCall, name_of
from torchestra.rpc.leader_followers import LeaderFollowersPool
from torchestra.rpc.worker_info import WorkerInfo

_log = logging.getLogger(__name__)


def describe(error: BaseException, here: WorkerInfo) -> tuple[bytes | None, str]:
    """Serialize an exception of worker ``here``: class and attributes where they can be pickled, and a text.

    The text is written to this worker's log too: its operator may not be the caller.
    """
    worker = f"worker {here.name!r} (rank {here.id})"
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"On {worker}:\n{_say(error)}\n{lines}"
    _log.warning("a function called by another worker failed. %s", text)
    cls = getattr(type(error), _ORIGINAL, type(error))
    for attributes in (dict(vars(error)), {}):
        attributes.pop("__notes__", None)
        try:
            return pickle.dumps((cls, attributes), 5), text
        except Exception:
            continue
    return None, text


def _say(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def rebuild(described: bytes | None, text: str) -> BaseException:
    """Return the exception to raise at the caller: of the same class where that exists here."""
    remote = RemoteError(text)
    if described is None:
        return remote
    try:
        cls, attributes = pickle.loads(described)
        error = _made(cls, text)
        vars(error).update(attributes)
    except Exception:
        return remote
    if not isinstance(error, Exception):  # SystemExit there must not end anything here
        return remote
    error.__cause__ = remote
    return error


_ORIGINAL = "_torchestra_original"


def _made(cls: Any, text: str) -> BaseException:
    """Return an exception of that class with that text.

    One that cannot be made from a text alone is made without its ``__init__``, which might have done
    more than keep its arguments. So it is a RemoteError as well. TorchScript's errors are too: callers expect
    a RuntimeError of torch.distributed.rpc there.
    """
    try:
        made = _as_remote_error(cls) if cls is torch.jit.Error else cls
        error: BaseException = made(text)
    except Exception:
        text = f"Original exception on remote side was: {text}"
        both = _as_remote_error(cls)
        error = both.__new__(both, text)
    error.args = (text,)
    return error


def _as_remote_error(cls: Any) -> Any:
    """Return a class of exceptions that are of this class and RemoteErrors."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, _ORIGINAL: cls}
    return type(cls.__name__, (cls, RemoteError), names)


def unreadable_call(error: Exception, caller: WorkerInfo, here: WorkerInfo) -> Exception:
    """Return the error of a call that worker ``here`` cannot read."""
    message = (
        f"a call from worker {caller.name!r} cannot be unpickled on worker"
        f" {here.name!r}: {type(error).__name__}: {error}. RPC pickler does not serialize code,"
        " functions and classes are sent by name: they must be importable, by the same name, on both workers"
    )
    return RemoteNameError(message) if isinstance(error, AttributeError) else RpcError(message)


def unreadable_result(error: Exception, call: PendingCall, called: WorkerInfo, here: WorkerInfo) -> RpcError:
    """Return the error of a call that worker ``here`` has made, and whose result it cannot read."""
    unreadable = RpcError(
        f"the result of {name_of(call.function)}, called on worker {called.name!r},"
        f" cannot be unpickled on worker {here.name!r}: {type(error).__name__}: {error}"
    )
    unreadable.__cause__ = error
    return unreadable


def unanswered(here: WorkerInfo, end_reason: str, failure: WorkerFailedError | None) -> RpcError:
    """Return the error of a call that worker ``here`` has made, and that it has ended before.

    Where it ended because of another worker's failure, that is the error: a function that waits for a call
    may itself have been called, by a worker that is to know who failed.
    """
    ended = f"worker {here.name!r} {end_reason} before the answer came"
    return RpcError(ended) if failure is None else WorkerFailedError(f"{ended}: {failure}", failure.worker)


def too_late(
    call: PendingCall, seconds: float, called: WorkerInfo, here: WorkerInfo, pool: LeaderFollowersPool
) -> RpcTimeoutError:
    """Return the error of a call that worker ``here`` has made, and that took too long."""
    waiting = len(pool.queue)
    at_limit = (
        f" This worker itself has reached its limit of {pool.max_threads} threads, and {waiting} calls"
        " wait for one."
        if waiting and pool.threads >= pool.max_threads
        else ""
    )
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({call.timeout_s:g} s) and will now be"
        f" marked with an error: {name_of(call.function)}, called on worker"
        f" {called.name!r} by worker {here.name!r}, had not answered after {seconds:.3f} s.{at_limit}"
    )
