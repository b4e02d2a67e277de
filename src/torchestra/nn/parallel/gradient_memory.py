"""Memory for gradients that the group's ranks share, so that averaging copies none of them.

Autograd gets the memory of a gradient from torch's allocator. While backward runs, that gives it blocks of
the rank's heap in the group's arena, made for the lengths of the larger parameters (torch_allocator.py). An
all_reduce finds which tensors lie in the ranks' heaps, and reduces these where they are (in_place.py). A
gradient that got ordinary memory, because something else of the same length took the block, say, is reduced
as ever, and with it the rest of its list; that is found anew in each operation, so ranks need not agree.
Where tensors that live for a moment take blocks so that none is left, the next steps have one or two more.

Blocks keep their pages from one step to the next. The C library may give those of a large gradient back to
the system and get them anew in each step, which takes longer than averaging them.

Only for ranks that are processes of one host, on the CPU: of several ranks in a process, each would take the
others' blocks.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Sequence

import torch

from torchestra.engine.failure.liveness import PeerProcesses
from torchestra.engine.memory.torch_allocator import BlockPool
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.nn.parallel.autograd_hooks import on_backward, queue_callback
from torchestra.process_group import ProcessGroup

__all__ = ["GradientMemory", "is_large"]

_LEAST_BYTES, _LARGE_BYTES = 1 << 16, 1 << 20
_MOST_SPARE = 2  # of a length
_MOST_IN_VAIN = 4  # steps in which more are wanted, of lengths that have all these, until this looks no more


def _is_shared(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's gradient is to lie in shared memory."""
    return parameter.nbytes >= _LEAST_BYTES and parameter.is_cpu and parameter.layout is torch.strided


def is_large(parameter: torch.Tensor) -> bool:
    """Return whether a gradient is reduced alone: if it lies elsewhere, that costs the others nothing."""
    return parameter.nbytes >= _LARGE_BYTES and _is_shared(parameter)


class GradientMemory:
    """Blocks for the gradients of some parameters, of which the larger ones get one each.

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
        self._lengths = [each.nbytes for each in dense if _is_shared(each)]
        self._spare: collections.Counter[int] = collections.Counter()
        self._may_grow = _MOST_IN_VAIN
        self._pool: BlockPool | None = None

    @classmethod
    def of(
        cls, group: ProcessGroup, parameters: Sequence[torch.Tensor], sparse: Sequence[bool]
    ) -> GradientMemory | None:
        """Return the memory for a group's gradients; None if its ranks can have none, or need none."""
        engine = group.communicator.engine
        if engine.hosts is not None or engine.context is None:
            return None
        if not isinstance(engine.context.peers, PeerProcesses):
            return None
        memory = cls(group, parameters, sparse)
        return memory if memory._lengths else None

    def prepare(self) -> None:
        """Make the blocks, before a backward."""
        if self._pool is None:
            self._pool = BlockPool(self._lengths, self._make_block)

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let a backward that reaches one of these outputs of a module take blocks, until it ends."""
        self.prepare()
        for output in outputs:
            on_backward(output, self._backward_reached)

    def _make_block(self, length: int) -> torch.Tensor | None:
        try:
            return self._engine.empty((length,), torch.uint8)
        except (InvalidArgumentError, DistBackendError):
            return None

    def _backward_reached(self, _: object) -> None:
        self.serve()
        queue_callback(self.stop)

    def serve(self) -> None:
        """Let torch take blocks, as a backward begins."""
        if self._pool is not None:
            self._pool.serve()

    def stop(self) -> None:
        """Let torch take no more of them; make another of each length of which there were too few."""
        if self._pool is None:
            return
        self._pool.stop()
        if self._may_grow and (missed := self._pool.missed()):
            lengths = [length for length in missed if self._spare[length] < _MOST_SPARE]
            self._spare.update(lengths)
            self._pool.add(lengths)
            self._may_grow -= not lengths
