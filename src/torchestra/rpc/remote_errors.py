"""How the exception of a function on one worker becomes one at the caller."""

from __future__ import annotations

import logging
import pickle
import traceback
from typing import TYPE_CHECKING, Any

from torchestra.errors import RemoteError, RemoteNameError, RpcError, RpcTimeoutError, WorkerFailedError
from torchestra.rpc.calls import Call, name_of

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

_log = logging.getLogger(__name__)


def describe(error: BaseException, worker: str) -> tuple[bytes | None, str]:
    """An exception for the way: its class and attributes where they can be pickled, and what to say.

    It is written to this worker's log too: who operates it may not be who called.
    """
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"On {worker}:\n{_say(error)}\n{lines}"
    _log.warning("a function called by another worker failed. %s", text)
    kind = getattr(type(error), _ORIGINAL, type(error))
    for attributes in (dict(vars(error)), {}):
        attributes.pop("__notes__", None)
        try:
            return pickle.dumps((kind, attributes), 5), text
        except Exception:
            continue
    return None, text


def _say(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def rebuild(described: bytes | None, text: str) -> BaseException:
    """The exception to raise at the caller: of the same class where that exists here."""
    remote = RemoteError(text)
    if described is None:
        return remote
    try:
        kind, attributes = pickle.loads(described)
        error = _made(kind, text)
        vars(error).update(attributes)
    except Exception:
        return remote
    if not isinstance(error, Exception):  # SystemExit there shall not end anything here
        return remote
    error.__cause__ = remote
    return error


_ORIGINAL = "_torchestra_original"


def _made(kind: Any, text: str) -> BaseException:
    """An exception of that class with that text.

    One that cannot be made from a text alone is made without its ``__init__``, which might have done
    more than keep its arguments. So it is a RemoteError as well.
    """
    try:
        error: BaseException = kind(text)
    except Exception:
        text = f"Original exception on remote side was: {text}"
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, _ORIGINAL: kind}
        both: Any = type(kind.__name__, (kind, RemoteError), names)
        error = both.__new__(both, text)
    error.args = (text,)
    return error


def unreadable(error: Exception, source: str, here: str) -> Exception:
    """Why a call cannot be read."""
    message = (
        f"a call from worker {source!r} cannot be unpickled on worker {here!r}: {type(error).__name__}:"
        f" {error}. RPC pickler does not serialize code, functions and classes are sent by name: they must be"
        " importable, by the same name, on both workers"
    )
    return RemoteNameError(message) if isinstance(error, AttributeError) else RpcError(message)


def too_late(call: Call, now: float, agent: Agent) -> RpcTimeoutError:
    """What a call that worker ``agent`` has made ends with when its time is over."""
    crew, waiting = agent.crew, len(agent.crew.todo)
    at_limit = (
        f" This worker itself has reached its limit of {crew.limit} threads, and {waiting} calls"
        " wait for one."
        if waiting
        else ""
    )
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({(call.deadline or now) - call.began:g} s) and will now be"
        f" marked with an error: {name_of(call.doing)}, called on worker"
        f" {agent.workers[call.peer].name!r} by worker {agent.info.name!r}, had not answered after"
        f" {now - call.began:.3f} s.{at_limit}"
    )


def gone(call: Call, agent: Agent) -> WorkerFailedError:
    """What a call that worker ``agent`` has made ends with when the worker it was for is gone."""
    called = agent.workers[call.peer]
    return WorkerFailedError(
        f"worker {called.name!r} (rank {called.id}) {agent.how_gone(called.id)} before it answered the call"
        f" of {name_of(call.doing)} from worker {agent.info.name!r}",
        called.name,
    )
