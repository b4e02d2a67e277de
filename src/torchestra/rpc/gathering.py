"""Values of several workers, gathered by calls: for workers that have no process group.

The worker whose name sorts first is the leader. The others send it their values, and when it has all of them
it sends them all to every worker. Waiting for a worker that has not come yet has no time-out unless one is
given; sending has the time-out of calls.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from torchestra.errors import RpcError
from torchestra.rpc.agent import Agent
from torchestra.rpc.constants import UNSET_RPC_TIMEOUT
from torchestra.rpc.current import current_agent
from torchestra.rpc.package_functions import takes_agent

_Key = tuple[tuple[str, ...], int]
"""The names of the workers that take part, and how many times they have gathered before."""


@dataclass
class _Gathering:
    """The values that a worker has received, and a future of all."""

    values: dict[str, Any] = field(default_factory=dict)
    all: Future[dict[str, Any]] = field(default_factory=Future)


class _Gatherings:
    """The gatherings that a worker takes part in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: Counter[tuple[str, ...]] = Counter()
        self.under_way: dict[_Key, _Gathering] = {}

    def of(self, key: _Key) -> _Gathering:
        """Return the gathering of a key, which other workers may have begun."""
        with self._lock:
            return self.under_way.setdefault(key, _Gathering())

    def next_key(self, names: tuple[str, ...]) -> _Key:
        """Return the key of these workers' next gathering."""
        with self._lock:
            self._begun[names] += 1
            return names, self._begun[names]

    def add(self, key: _Key, name: str, value: Any) -> None:
        """Add a worker's value, at the leader."""
        gathering = self.of(key)
        with self._lock:
            gathering.values[name] = value
            complete = len(gathering.values) == len(key[0])
        if complete:
            gathering.all.set_result(gathering.values)


_of_agents: weakref.WeakKeyDictionary[Agent, _Gatherings] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _gatherings(agent: Agent) -> _Gatherings:
    with _making:
        return _of_agents.setdefault(agent, _Gatherings())


def all_gather(
    value: Any, workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the values of some workers, by name. Each of them must call this, with the same names.

    Args:
        value: anything that can be sent.
        workers: their names, this one's among them; default: all.
        timeout: how long each message may take, and each wait for the others; 0 for no limit. Default:
            that of calls for messages, no limit for the others.

    Raises:
        RpcTimeoutError: the others did not come in time, or a message took too long.
        RpcError: at the leader: the values could not be sent to a worker.
    """
    agent = current_agent()
    gatherings = _gatherings(agent)
    names = tuple(sorted(set(workers) if workers else agent.workers.numbers))
    key, own_name, leader = gatherings.next_key(names), agent.info.name, names[0]
    wait_timeout = 0.0 if timeout == UNSET_RPC_TIMEOUT else timeout
    gathering = gatherings.of(key)
    try:
        if own_name == leader:
            gatherings.add(key, own_name, value)
        else:
            agent.call(agent.number_of(leader), _add, (key, own_name, value), timeout=timeout).wait()
        values: dict[str, Any] = agent.await_future(gathering.all, wait_timeout, "all_gather of RPC workers")
        if own_name == leader:
            _send_all(agent, key, values, timeout)
        return values
    finally:
        gatherings.under_way.pop(key, None)


def _send_all(agent: Agent, key: _Key, values: dict[str, Any], timeout: float) -> None:
    """Send the values to the others, at the leader."""
    futures = {
        name: agent.call(agent.number_of(name), _conclude, (key, values), timeout=timeout)
        for name in key[0][1:]
    }
    errors: dict[str, Exception] = {}
    for name, future in futures.items():
        try:
            future.wait()
        except Exception as error:
            errors[name] = error
    if errors:
        timeout_s = agent.timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        first = next(iter(errors.values()))
        raise RpcError(
            f"Followers {list(errors)} timed out in _all_gather after {timeout_s:.2f} seconds, or could not"
            f" be told for another reason. The first exception is {first}"
        ) from first


def barrier(workers: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all of some workers have called this. Arguments and errors as for :func:`all_gather`."""
    all_gather(None, workers, timeout)


# Functions that workers call on each other.


@takes_agent
def _add(agent: Agent, key: _Key, name: str, value: Any) -> None:
    _gatherings(agent).add(key, name, value)


@takes_agent
def _conclude(agent: Agent, key: _Key, values: dict[str, Any]) -> None:
    _gatherings(agent).of(key).all.set_result(values)
