"""Hold blocks of a state that came before they were needed, and tell which of them are still so."""

from __future__ import annotations

from typing import Any

import torch

from torchestra.elastic.blocks import Block, TensorBlocks, blocks_of
from torchestra.elastic.fetching import Signature, new_tensor
from torchestra.elastic.parts import flatten_tensors, paths_of, tensor_specs_of, unflatten_tensors


class PrefetchBuffer:
    """Hold what this rank has got of a value whose blocks come one after the other, while it may change.

    Own tensors are received into where they fit, new ones elsewhere. An own tensor may change afterwards
    here, too: buffers do, when the step's update gives them the values of all ranks.

    Args:
        skeleton: how the value is built on those that send it.
        own: this rank's own, nested.

    Attributes:
        skeleton: as given.
        tensor_blocks: of the tensors that are received into.
        blocks: all of them.
    """

    def __init__(self, skeleton: Any, own: Any) -> None:
        self.skeleton, self._own = skeleton, own
        own_skeleton, own_tensors = flatten_tensors(own)
        mine, specs = paths_of(own_skeleton), tensor_specs_of(skeleton)
        self._tensors: list[torch.Tensor] = []
        self._fits = True
        for path, number in paths_of(skeleton).items():
            spec, target = specs[number], own_tensors[mine[path]] if path in mine else None
            fits = target is None or (target.dtype, tuple(target.shape)) == (spec.dtype, spec.shape)
            self._fits = self._fits and fits
            if target is None or not fits or not target.is_contiguous():
                target = new_tensor(spec.shape, spec.dtype, spec.device)
            self._tensors.append(target)
        self.blocks: list[Block] = blocks_of(specs)
        # `data` has a count of changes of its own: what arrives counts as none.
        self.tensor_blocks = TensorBlocks([each.data for each in self._tensors])
        self._versions = [each._version for each in self._tensors]
        self._checksums: dict[int, int] = {}

    def arrived(self, number: int, checksum: int) -> None:
        """Note that a block has come. If it is not as it was sent, it changed meanwhile and is left out."""
        if self.tensor_blocks.checksum(self.blocks[number]) == checksum:
            self._checksums[number] = checksum

    def take_over(self) -> bool:
        """Do nothing, as all is received where it stays; blocks that are left out are fetched at the end."""
        return True

    def value(self) -> Any:
        """Return the value; this rank's own where it has other tensors, which is for fetch() to refuse."""
        return unflatten_tensors(self.skeleton, self._tensors) if self._fits else self._own

    def signature(self) -> Signature:
        """Return the checksums of the blocks that have come, as they are now."""
        changed = {
            number
            for number, (tensor, version) in enumerate(zip(self._tensors, self._versions, strict=True))
            if tensor._version != version
        }
        return Signature(
            self.skeleton,
            {
                number: self.tensor_blocks.checksum(self.blocks[number])
                if any(piece.tensor in changed for piece in self.blocks[number])
                else checksum
                for number, checksum in self._checksums.items()
            },
        )
