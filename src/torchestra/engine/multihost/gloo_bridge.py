"""The bridge over Gloo, as torch brings it: the default between hosts.

Gloo finds its ends through the group's store and connects them when they first talk. Its connections carry
data only: who may take part is decided in the store, which asks for the job's secret.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from torchestra.engine.multihost.bridge import BridgeError
from torchestra.store import PrefixStore, Store
from torchestra.store.torch_agent import TorchStore

__all__ = ["GlooBridge"]

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interface that Gloo shall use, as for torch.distributed."""

_STILL_UNDER_WAY = "Operation timed out!"  # by the wait; an operation of Gloo that is late says otherwise


class _Work:
    """See Pending. Holds the tensors until it is dropped."""

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self._work = work
        self._tensors = tensors

    def wait(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=max(0.001, seconds)))
        except RuntimeError as error:
            if str(error).startswith(_STILL_UNDER_WAY):
                return False
            raise BridgeError(f"Gloo: {str(error).splitlines()[0]}") from error
        return True

    def has_ended(self) -> bool:
        return bool(self._work.is_completed())


class GlooBridge:
    """See Bridge.

    Args:
        store: one that only the ends of this rail, and only for this purpose, use.
        host, size: which end this is, and how many there are.
        seconds: how long to look for the others.
    """

    kind = "gloo"

    def __init__(self, store: Store, host: int, size: int, seconds: float) -> None:
        self.host = host
        self.size = size
        self._c10d = c10d = _bindings()
        _sweep()
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [_device(store)]
        options._threads = 2
        options._timeout = timedelta(seconds=seconds)
        self._store = _store_for_torch(store, seconds)
        try:
            self._group: Any = c10d.ProcessGroupGloo(self._store, host, size, options)
        except RuntimeError as error:
            raise BridgeError(f"Gloo: {str(error).splitlines()[0]}") from error
        self._works: list[_Work] = []

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> _Work:
        options = self._c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=seconds)
        return self._begun(self._group._allgather_base, output, tensor, options)

    def broadcast(self, tensor: torch.Tensor, root: int, seconds: float) -> _Work:
        options = self._c10d.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=seconds)
        return self._keep(_Work(self._call(self._group.broadcast, [tensor], options), tensor))

    def exchange(
        self,
        output: torch.Tensor,
        expected: Sequence[int],
        tensor: torch.Tensor,
        sent: Sequence[int],
        seconds: float,
    ) -> _Work:
        options = self._c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=seconds)
        arguments = (output, tensor, list(expected), list(sent), options)
        return self._keep(_Work(self._call(self._group.alltoall_base, *arguments), output, tensor))

    def close(self) -> None:
        _bury(self._group, self._works, self._store)
        self._group = None

    def _begun(self, function: Any, output: torch.Tensor, tensor: torch.Tensor, options: Any) -> _Work:
        return self._keep(_Work(self._call(function, output, tensor, options), output, tensor))

    @staticmethod
    def _call(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise BridgeError(f"Gloo: {str(error).splitlines()[0]}") from error

    def _keep(self, work: _Work) -> _Work:
        self._works = [each for each in self._works if not each.has_ended()]
        self._works.append(work)
        return work


# A group of Gloo waits in its destructor for what is under way, and cannot be told to give it up. So one that
# is closed amid an operation is kept until that has ended; at exit, for good.
_buried: list[tuple[Any, list[_Work], Any]] = []
_burying = threading.Lock()


def _bury(group: Any, works: list[_Work], store: Any) -> None:
    if group is None:
        return
    with _burying:
        _buried.append((group, works, store))
    _sweep()


def _sweep() -> None:
    """Drop those groups that nothing is under way in any more."""
    with _burying:
        ended = [grave for grave in _buried if all(work.has_ended() for work in grave[1])]
        _buried[:] = [grave for grave in _buried if grave not in ended]
    ended.clear()


def _keep_for_good() -> None:
    _sweep()
    for grave in _buried:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(grave))


atexit.register(_keep_for_good)


def _bindings() -> Any:
    from torch._C import _distributed_c10d

    return _distributed_c10d


def _device(store: Store) -> Any:
    """What Gloo listens with: on the address of this host from which the store is reached.

    Each group has one of its own, because groups that connect lazily mix up their connections otherwise.
    """
    interface = os.environ.get(INTERFACE_VARIABLE, "")
    named = {"interface": interface} if interface else {"hostname": own_address(store)}
    return _bindings().ProcessGroupGloo.create_device(**named, lazy_init=True)


def own_address(store: Store) -> str:
    """The address of this host that hosts which share the store can reach.

    It is the one from which this host sends to the store's; where that is not a TCP store, the one that its
    name stands for.
    """
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    place = inner.torch_store if isinstance(inner, TorchStore) else inner
    host, port = getattr(place, "host", ""), getattr(place, "port", 0)
    if host and not host.startswith("unix:"):
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(where)
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _store_for_torch(store: Store, seconds: float) -> Any:
    """A store of torch.distributed over one of ours."""
    from torch._C._distributed_c10d import Store as TorchsStore

    store = store.clone()
    store.set_timeout(seconds)

    class Adapter(TorchsStore):
        def set(self, key: str, value: Any) -> None:
            store.set(key, value if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return store.get(key)

        def add(self, key: str, amount: int) -> int:
            return store.add(key, amount)

        def check(self, keys: list[str]) -> bool:
            return store.check(keys)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            store.wait(keys, timeout)

    return Adapter()
