"""Values of several workers, gathered by calls: for workers that have no process group.

The worker whose name is the least leads. The others tell it their values, and when it has all of them it
tells everybody. To wait for a worker that has not come yet takes no time-out unless one is given; to tell
takes that of calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.futures import Future

from torchestra.errors import RpcError
from torchestra.rpc.agent import Agent
from torchestra.rpc.constants import UNSET_RPC_TIMEOUT
from torchestra.rpc.current import current_agent, takes_agent

_Key = tuple[tuple[str, ...], int]
"""The names of those who take part, and how many times they have before."""


class _Gathering:
    """What one worker knows of one: the values it has been told, and a future of all."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.all: Future[dict[str, Any]] = Future()


class _Gatherings(NamedTuple):
    """Those that an agent takes part in."""

    lock: threading.Lock
    under_way: dict[_Key, _Gathering]
    begun: dict[tuple[str, ...], int]

    def of(self, key: _Key) -> _Gathering:
        """That of a key; others may have begun it."""
        with self.lock:
            return self.under_way.setdefault(key, _Gathering())

    def next_key(self, names: tuple[str, ...]) -> _Key:
        """The key of the next one of these workers."""
        with self.lock:
            number = self.begun[names] = self.begun.get(names, 0) + 1
            return names, number

    def tell(self, key: _Key, name: str, value: Any) -> None:
        """At the leader: a worker's value."""
        gathering = self.of(key)
        with self.lock:
            gathering.values[name] = value
            complete = len(gathering.values) == len(key[0])
        if complete:
            gathering.all.set_result(gathering.values)


_of_agents: weakref.WeakKeyDictionary[Agent, _Gatherings] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _gatherings(agent: Agent) -> _Gatherings:
    with _making:
        found = _of_agents.get(agent)
        if found is None:
            found = _of_agents[agent] = _Gatherings(threading.Lock(), {}, {})
        return found


def all_gather(
    value: Any, workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """The values of some workers, by name. Each of them must call this, with the same names.

    Args:
        value: anything that can be sent.
        workers: their names, this one's among them; default: all.
        timeout: how long each message may take, and each wait for the others; 0 is without end. Default: that
            of calls for messages, without end for the others.

    Raises:
        RpcTimeoutError: the others did not come in time, or a message took too long.
        RpcError: at the leader: somebody could not be told.
    """
    agent = current_agent()
    known = _gatherings(agent)
    names = tuple(sorted(set(workers) if workers else agent.by_name))
    key, here, leader = known.next_key(names), agent.info.name, names[0]
    patience = 0.0 if timeout == UNSET_RPC_TIMEOUT else timeout
    gathering = known.of(key)
    try:
        if here == leader:
            known.tell(key, here, value)
        else:
            agent.call(agent.find(leader).id, _tell, (key, here, value), timeout=timeout).wait()
        told: dict[str, Any] = agent.await_future(gathering.all, patience, "all_gather of RPC workers")
        if here == leader:
            _tell_all(agent, key, told, timeout)
        return told
    finally:
        known.under_way.pop(key, None)


def _tell_all(agent: Agent, key: _Key, told: dict[str, Any], timeout: float) -> None:
    """At the leader: tell the others."""
    futures = {
        name: agent.call(agent.find(name).id, _conclude, (key, told), timeout=timeout) for name in key[0][1:]
    }
    errors: dict[str, Exception] = {}
    for name, future in futures.items():
        try:
            future.wait()
        except Exception as error:
            errors[name] = error
    if errors:
        seconds = agent.timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        first = next(iter(errors.values()))
        raise RpcError(
            f"Followers {list(errors)} timed out in _all_gather after {seconds:.2f} seconds, or could not be"
            f" told for another reason. The first exception is {first}"
        ) from first


def barrier(workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all of some workers have called this. Arguments and errors as for :func:`all_gather`."""
    all_gather(None, workers, timeout)


# What workers call on each other.


@takes_agent
def _tell(agent: Agent, key: _Key, name: str, value: Any) -> None:
    _gatherings(agent).tell(key, name, value)


@takes_agent
def _conclude(agent: Agent, key: _Key, told: dict[str, Any]) -> None:
    _gatherings(agent).of(key).all.set_result(told)
