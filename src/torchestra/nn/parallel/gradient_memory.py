"""Memory for large gradients that the group's ranks share, so that averaging copies none of them.

Autograd gets the memory of a gradient from torch's allocator. While backward runs, that gives it blocks of
the rank's heap in the group's arena, made for the lengths of the large parameters (torch_allocator.py). An
all_reduce finds that each rank's tensor lies in its heap, and reduces them where they are. A gradient that
got ordinary memory, because something else of the same length took the block, say, is reduced as ever; that
is found anew in each operation, so ranks need not agree.

Blocks keep their pages from one step to the next. The C library may give those of a large gradient back to
the system and get them anew in each step, which takes longer than averaging them.

Only for ranks that are processes of one host, on the CPU: of several ranks in a process, each would take the
others' blocks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch

from torchestra.engine.failure.liveness import PeerProcesses
from torchestra.engine.memory.torch_allocator import BlockPool
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.nn.parallel.autograd_hooks import queue_callback
from torchestra.process_group import ProcessGroup

__all__ = ["GradientMemory", "is_large"]

_LARGE_BYTES = 1 << 20


def is_large(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's gradient is to lie in shared memory, and is reduced alone."""
    return parameter.nbytes >= _LARGE_BYTES and parameter.is_cpu and parameter.layout is torch.strided


class GradientMemory:
    """Blocks for the gradients of some parameters, of which the large ones get one each.

    They are made when the first backward is expected. Where the heap or the system has no room for all, the
    rest have ordinary memory.

    Args:
        parameters: that the group averages the gradients of.
        sparse: by parameter, whether these are sparse.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
    ) -> None:
        self._engine = group.communicator.engine
        dense = itertools.compress(parameters, map(operator.not_, sparse))
        self._lengths = [each.nbytes for each in dense if is_large(each)]
        self._pool: BlockPool | None = None

    @classmethod
    def of(
        cls, group: ProcessGroup, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
    ) -> GradientMemory | None:
        """Return the memory for a group's gradients; None if its ranks can have none in common."""
        engine = group.communicator.engine
        if engine.hosts is not None or engine.context is None:
            return None
        processes = isinstance(engine.context.peers, PeerProcesses)
        return cls(group, parameters, sparse) if processes else None

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let a backward that reaches one of these outputs of a module take blocks, until it ends."""
        if not self._lengths:
            return
        if self._pool is None:
            self._pool = BlockPool(self._lengths, self._make_block)
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(self._backward_reached)

    def _make_block(self, length: int) -> torch.Tensor | None:
        try:
            return self._engine.empty((length,), torch.uint8)
        except (InvalidArgumentError, DistBackendError):
            return None

    def _backward_reached(self, _: torch.Tensor) -> None:
        if self._pool is not None:
            self._pool.serve()
            queue_callback(self._pool.stop)
