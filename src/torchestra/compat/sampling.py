"""As ``torch.utils.data.distributed``, for ranks of torchestra."""

from __future__ import annotations

from typing import TypeVar

import torch.utils.data

from torchestra.world.init import get_rank, get_world_size

__all__ = ["DistributedSampler"]

T_co = TypeVar("T_co", covariant=True)


class DistributedSampler(torch.utils.data.DistributedSampler[T_co]):
    """torch's sampler of a rank's share of a dataset, with the default group's rank and size by default.

    Raises:
        NotInitializedError: there is no default group, and ``num_replicas`` or ``rank`` is not given.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T_co],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            get_world_size() if num_replicas is None else num_replicas,
            get_rank() if rank is None else rank,
            shuffle,
            seed,
            drop_last,
        )
