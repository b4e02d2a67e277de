"""Messages between two ranks, as methods in torch's C++ form. Ranks are numbers within the group."""

from __future__ import annotations

import torch

from torchestra.arguments.annotations import checked
from torchestra.communicator.communicator import Communicator
from torchestra.communicator.work import Work
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import tensor_lists as lists
from torchestra.process_group.forms import Tensors
from torchestra.process_group.monitored_barrier import monitored_barrier
from torchestra.system.untraced import untraced
from torchestra.tensors import checks
from torchestra.types import Timeout, timeout_seconds


@untraced
class MessageMethods:
    """Send and receive messages; to be called by the two ranks only. Each takes a list of one tensor."""

    communicator: Communicator

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Begin to send a tensor to a rank; it must not be changed until the Work is done."""
        communicator = self.communicator
        tensor = _single(tensors, "send")
        tag = checks.check_tag(tag, "send")
        return communicator.isend(
            tensor, lists.check_peer(dstRank, communicator.size, "dstRank", "send"), tag
        )

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Begin to receive a tensor from a rank."""
        communicator = self.communicator
        tensor = _single(tensors, "recv")
        tag = checks.check_tag(tag, "recv")
        return communicator.irecv(
            tensor, lists.check_peer(srcRank, communicator.size, "srcRank", "recv"), tag
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Begin to receive from the rank that sends first; the Work's ``source_rank`` returns it."""
        tensor = _single(tensors, "recv_anysource")
        tag = checks.check_tag(tag, "recv_anysource")
        return self.communicator.irecv(tensor, None, tag)

    @checked
    def monitored_barrier(self, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
        """Run :func:`torchestra.monitored_barrier` on this group; to be called by all ranks."""
        seconds = None if timeout is None else timeout_seconds(timeout)
        monitored_barrier(self.communicator, seconds, wait_all_ranks)


def _single(tensors: Tensors, name: str) -> torch.Tensor:
    chosen = lists.as_list(tensors, "tensors", name)
    if len(chosen) != 1:
        raise InvalidArgumentError(f"{name}: takes a single tensor, got {len(chosen)} in `tensors`")
    lists.check_dense(chosen, name)
    return chosen[0]
