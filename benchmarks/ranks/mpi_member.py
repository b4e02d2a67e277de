"""A rank of an MPI, through mpi4py's calls for NumPy buffers."""

from __future__ import annotations

from functools import partial

import numpy as np
from mpi4py import MPI

from .member import Prepared
from .shapes import Floats, partner, shape
from .timing import Call

__all__ = ["MpiMember"]


class MpiMember:
    """One rank of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = int(self._comm.Get_rank())
        self.world = int(self._comm.Get_size())
        self.description = str(MPI.Get_library_version()).splitlines()[0].strip("\0 ")
        self._pool: dict[tuple[str, str], Floats] = {}
        self._prepared: dict[str, list[MPI.Prequest]] = {}

    def prepare(self, operation: str, size: int, memory: str, slot: str) -> Prepared:
        """See :class:`Member`; the memory is always the rank's own, ``persistent`` says how it is called."""
        if operation == "barrier":
            return Prepared((self._comm.Barrier,))
        buffers = shape(operation, size, self.world)
        given = self._array(slot, "given", buffers.given)
        received = self._array(slot, "received", buffers.received) if buffers.received else given
        if memory == "persistent":
            calls = self._requests(operation, given, received, slot)
        else:
            calls = self._calls(operation, given, received)
        return Prepared(calls, max(1, len(calls)), given, received)

    def barrier(self) -> None:
        """Wait for all ranks of this peer."""
        self._comm.Barrier()

    def close(self) -> None:
        """Leave MPI, together with the other ranks."""
        MPI.Finalize()

    def _array(self, slot: str, role: str, count: int) -> Floats:
        key = (slot, role)
        if key not in self._pool or self._pool[key].size < count:
            self._pool.pop(key, None)
            self._pool[key] = np.empty(count, dtype=np.float32)
        array = self._pool[key][:count]
        array.fill(0.0)
        return array

    def _calls(self, operation: str, given: Floats, received: Floats) -> tuple[Call, ...]:
        comm, root = self._comm, self.rank == 0
        if operation == "all_reduce":
            return (partial(comm.Allreduce, MPI.IN_PLACE, given),)
        if operation == "reduce":
            return (partial(comm.Reduce, *((MPI.IN_PLACE, given) if root else (given, None))),)
        if operation == "broadcast":
            return (partial(comm.Bcast, given),)
        if operation == "all_gather":
            return (partial(comm.Allgather, given, received),)
        if operation == "reduce_scatter":
            return (partial(comm.Reduce_scatter_block, given, received),)
        if operation == "all_to_all":
            return (partial(comm.Alltoall, given, received),)
        if operation == "gather":
            return (partial(comm.Gather, given, received if root else None),)
        if operation == "scatter":
            return (partial(comm.Scatter, given if root else None, received),)
        assert operation == "send_recv", operation
        other = partner(self.rank, self.world)
        if other is None:
            return ()
        send, receive = partial(comm.Send, given, other), partial(comm.Recv, received, other)
        return (send, receive) if self.rank < other else (receive, send)

    def _requests(self, operation: str, given: Floats, received: Floats, slot: str) -> tuple[Call, ...]:
        """Set up MPI-4's persistent operations."""
        for request in self._prepared.pop(slot, []):
            request.Free()
        comm = self._comm
        if operation == "send_recv":
            other = partner(self.rank, self.world)
            if other is None:
                return ()
            requests = [comm.Send_init(given, other), comm.Recv_init(received, other)]
            if self.rank > other:
                requests.reverse()
        elif operation == "all_reduce":
            requests = [comm.Allreduce_init(MPI.IN_PLACE, given)]
        elif operation == "broadcast":
            requests = [comm.Bcast_init(given)]
        else:
            names = {
                "all_gather": "Allgather_init",
                "reduce_scatter": "Reduce_scatter_block_init",
                "all_to_all": "Alltoall_init",
            }
            requests = [getattr(comm, names[operation])(given, received)]
        self._prepared[slot] = requests
        return tuple(partial(_run, request) for request in requests)


def _run(request: MPI.Prequest) -> None:
    request.Start()
    request.Wait()
