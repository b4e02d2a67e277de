"""Messages between two ranks of a group: argument checks, time-outs, layouts; blocking and not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import profiler

from torchestra.arguments.annotations import check_integer
from torchestra.communicator import profiling
from torchestra.communicator.device_routing import Delegation, delegated_message
from torchestra.communicator.host_staging import fetched, landing
from torchestra.communicator.queue import Order
from torchestra.communicator.work import Work
from torchestra.engine.local import LocalEngine
from torchestra.engine.p2p import Transfer
from torchestra.errors import DistError
from torchestra.tensors import checks
from torchestra.tensors.contiguity import made_plain, write_back


class Messaging(Order):
    """One rank's end of a group, as far as messages go. Whoever is named must take part, nobody else."""

    def __init__(self, engine: LocalEngine, name: str, seconds: float) -> None:
        super().__init__(engine, name)
        self.rank = engine.rank
        self.size = engine.size
        self.seconds = seconds
        self.delegation: Delegation | None = None

    def forget(self) -> None:
        super().forget()
        self.delegation = None

    def limit(self, seconds: float | None) -> float:
        """How long an operation may wait, in seconds, by its own time-out if it has one."""
        return self.seconds if seconds is None else seconds

    @delegated_message
    def send(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> None:
        """Send a message to a rank; returns when the tensor may be changed."""
        if profiler._is_profiler_enabled and profiling.wanted():
            with profiling.recorded("send", [tensor]):
                return self.send(tensor, rank, tag, seconds)
        tensor = checks.check_tensor(fetched(tensor), "tensor", "send")
        self._refuse_if_closed("send")
        tag = check_integer(tag, "tag", "send")
        self.engine.send(made_plain(tensor), rank, tag, self.limit(seconds))
        return None

    @delegated_message
    def recv(self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None) -> int:
        """Receive a message from a rank, or from any (None), into the tensor; the rank that sent it."""
        if profiler._is_profiler_enabled and profiling.wanted():
            with profiling.recorded("recvAnySource" if rank is None else "recv", [tensor]):
                return self.recv(tensor, rank, tag, seconds)
        tensor, land = landing(tensor)
        checks.check_tensor(tensor, "tensor", "recv", written=True)
        self._refuse_if_closed("recv")
        tag = check_integer(tag, "tag", "recv")
        buffer = made_plain(tensor)
        source = self.engine.receive(buffer, rank, tag, self.limit(seconds))
        write_back([tensor], [buffer])
        land()
        return source

    @delegated_message
    def isend(self, tensor: torch.Tensor, rank: int, tag: int = 0, seconds: float | None = None) -> Work:
        """Begin to send a message to a rank."""
        if profiler._is_profiler_enabled and profiling.wanted():
            with profiling.recorded("send", [tensor]):
                return self.isend(tensor, rank, tag, seconds)
        buffer = made_plain(checks.check_tensor(fetched(tensor), "tensor", "isend"))
        self._refuse_if_closed("isend")
        tag = check_integer(tag, "tag", "isend")
        work = Work(f"isend to rank {rank} of group {self.name!r}")
        transfer = self.engine.begin_send(
            buffer, rank, tag, self.limit(seconds), partial(self._end_message, work, tensor, buffer, None)
        )
        return self._hastened(work, transfer)

    @delegated_message
    def irecv(
        self, tensor: torch.Tensor, rank: int | None, tag: int = 0, seconds: float | None = None
    ) -> Work:
        """Begin to receive a message from a rank, or from any (None), into the tensor."""
        if profiler._is_profiler_enabled and profiling.wanted():
            with profiling.recorded("recvAnySource" if rank is None else "recv", [tensor]):
                return self.irecv(tensor, rank, tag, seconds)
        given = tensor
        tensor, land = landing(tensor)
        checks.check_tensor(tensor, "tensor", "irecv", written=True)
        self._refuse_if_closed("irecv")
        tag = check_integer(tag, "tag", "irecv")
        buffer = made_plain(tensor)
        source = "any rank" if rank is None else f"rank {rank}"
        work = Work(f"irecv from {source} of group {self.name!r}")

        def put() -> None:
            write_back([tensor], [buffer])
            land()

        transfer = self.engine.begin_receive(
            buffer, rank, tag, self.limit(seconds), partial(self._end_message, work, given, buffer, put)
        )
        return self._hastened(work, transfer)

    def _hastened(self, work: Work, transfer: Transfer) -> Work:
        """The Work of a message, for which the mailbox works while the program waits."""
        work.hasten = partial(self.engine.mailbox.wait, transfer)
        if work.is_completed():  # maybe before that was set
            work.hasten = None
        return work

    @staticmethod
    def _end_message(
        work: Work,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        put: Callable[[], None] | None,
        transfer: Transfer,
    ) -> None:
        if transfer.error is not None:
            work.fail(transfer.error)
            return
        try:
            if put is not None:
                put()
        except BaseException as error:
            if isinstance(error, Exception):
                work.fail(error)
                return
            # The interrupt itself is for who runs this; who waits for the message learns this.
            work.fail(DistError(f"a message was received, but not copied to its tensor: {error!r}"))
            raise
        work.finish([tensor], transfer.source)
