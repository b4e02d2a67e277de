"""A rank on torch tensors, through torch.distributed's public functions, whoever offers them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from .member import Prepared
from .shapes import partner, shape
from .timing import Call

__all__ = ["TorchMember"]


class TorchMember:
    """One rank of a module that has torch.distributed's functions: that one on Gloo, or torchestra.

    Args:
        module: the module.
        description: what it is, with its version.
        backend: the ``backend`` of ``init_process_group``.

    The group is made from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    """

    def __init__(self, module: Any, description: str, backend: str | None) -> None:
        torch.set_num_threads(1)
        self._dist = module
        self.description = description
        self._dist.init_process_group(backend)
        self.rank = int(self._dist.get_rank())
        self.world = int(self._dist.get_world_size())
        self._pool: dict[tuple[str, str], torch.Tensor] = {}
        assert self.rank == int(os.environ["RANK"])

    def prepare(self, operation: str, size: int, memory: str, slot: str) -> Prepared:
        """See :class:`Member`; ``memory``: ``private``, ``symmetric`` (the group's), or ``persistent``."""
        if operation == "barrier":
            return Prepared((self._dist.barrier,))
        buffers = shape(operation, size, self.world)
        given = self._tensor(memory, slot, "given", buffers.given)
        received = self._tensor(memory, slot, "received", buffers.received) if buffers.received else given
        calls = (self._plans if memory == "persistent" else self._calls)(operation, given, received)
        return Prepared(calls, max(1, len(calls)), given.numpy(), received.numpy())

    def barrier(self) -> None:
        """Wait for all ranks of this peer."""
        self._dist.barrier()

    def close(self) -> None:
        """Leave the group, together with the other ranks."""
        self._pool.clear()
        self._dist.destroy_process_group()

    def _tensor(self, memory: str, slot: str, role: str, count: int) -> torch.Tensor:
        key = (slot, role)
        if memory == "symmetric":
            # Let go of the old one first, so that the group's memory holds one at a time.
            self._pool.pop(key, None)
            tensor: torch.Tensor = self._dist.empty(count, dtype=torch.float32)
            self._pool[key] = tensor
        else:
            if key not in self._pool or self._pool[key].numel() < count:
                self._pool.pop(key, None)
                self._pool[key] = torch.empty(count, dtype=torch.float32)
            tensor = self._pool[key][:count]
        return tensor.fill_(0.0)

    def _calls(self, operation: str, given: torch.Tensor, received: torch.Tensor) -> tuple[Call, ...]:
        dist, root = self._dist, self.rank == 0
        if operation == "all_reduce":
            return (partial(dist.all_reduce, given),)
        if operation == "reduce":
            return (partial(dist.reduce, given, 0),)
        if operation == "broadcast":
            return (partial(dist.broadcast, given, 0),)
        if operation == "all_gather":
            return (partial(dist.all_gather_into_tensor, received, given),)
        if operation == "reduce_scatter":
            return (partial(dist.reduce_scatter_tensor, received, given),)
        if operation == "all_to_all":
            return (partial(dist.all_to_all_single, received, given),)
        if operation == "gather":
            return (partial(dist.gather, given, self._parts(received) if root else None, 0),)
        if operation == "scatter":
            return (partial(dist.scatter, received, self._parts(given) if root else None, 0),)
        assert operation == "send_recv", operation
        other = partner(self.rank, self.world)
        if other is None:
            return ()
        send, receive = partial(dist.send, given, other), partial(dist.recv, received, other)
        return (send, receive) if self.rank < other else (receive, send)

    def _plans(self, operation: str, given: torch.Tensor, received: torch.Tensor) -> tuple[Call, ...]:
        """Set up persistent operations on private memory."""
        dist = self._dist
        if operation == "send_recv":
            other = partner(self.rank, self.world)
            if other is None:
                return ()
            plans = (dist.send_init(given, other), dist.recv_init(received, other))
            return plans if self.rank < other else plans[::-1]
        if operation == "all_reduce":
            return (dist.all_reduce_init(given),)
        if operation == "broadcast":
            return (dist.broadcast_init(given, 0),)
        names = {
            "all_gather": "all_gather_into_tensor_init",
            "reduce_scatter": "reduce_scatter_tensor_init",
            "all_to_all": "all_to_all_single_init",
        }
        return (getattr(dist, names[operation])(received, given),)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.chunk(self.world))
