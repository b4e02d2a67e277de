"""A shard of a step's batch: what the body of a training loop works on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, shown


class Shard:
    """One of the equal parts into which every step's batch is divided, whatever the number of ranks.

    The iterator of :func:`shards` makes them. Before it hands one out it seeds torch's, NumPy's and Python's
    random numbers for this step and shard.

    Attributes:
        step: of the training, from 0.
        index: its number within the step, from 0.
        count: how many shards a step has.
        generator: of random numbers of the CPU for this step and shard, for what takes a generator. Ranks
            that are threads share all other generators, so there only this one is reproducible.
        samples: how many have been given to :meth:`backward`.
        loss: the sum of the losses of these.
    """

    def __init__(
        self, step: int, index: int, count: int, key: int, order: Callable[[int, int], torch.Tensor]
    ) -> None:
        self.step, self.index, self.count = step, index, count
        self.generator = torch.Generator().manual_seed(key)
        self.samples, self.loss = 0.0, 0.0
        self._order = order

    def backward(self, loss: torch.Tensor, samples: float = 1) -> None:
        """Add the gradients of a loss to the step's.

        The step's gradient is that of the mean over all samples of all shards. May be called several times,
        each for some of the shard's samples, or not at all if it has none.

        Args:
            loss: the mean over the samples; one element.
            samples: their number, or any other weight; with 0 nothing is done.

        Raises:
            InvalidArgumentTypeError, InvalidArgumentError: it is no such tensor; negative samples.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidArgumentTypeError(
                f"shard.backward: `loss` must be a tensor of one element, got {shown(loss)}"
            )
        if not samples >= 0:
            raise InvalidArgumentError(
                f"shard.backward: `samples` must not be negative, got {shown(samples)}"
            )
        if samples == 0:
            return
        (loss * samples).backward()
        self.samples += samples
        self.loss += float(loss.detach()) * samples

    def indices(
        self, samples: int, batch_size: int, *, shuffle: bool = True, drop_last: bool = False
    ) -> torch.Tensor:
        """Return which samples of a dataset this shard has; every sample is in one shard of an epoch.

        An epoch's order depends on the seed and the epoch, which is ``step // steps per epoch``.

        Args:
            samples: how many the dataset has.
            batch_size: samples of a step, in all shards together; an epoch's last step has what is left.
            shuffle: draw a new order for each epoch.
            drop_last: leave out a last batch that is not full.

        Returns:
            Numbers from 0 to ``samples - 1``; none, if the batch has fewer samples than there are shards.
        """
        if not batch_size > 0 or not samples > 0 or (drop_last and samples < batch_size):
            raise InvalidArgumentError(
                "shard.indices: `samples` and `batch_size` must be positive, and make a batch; got"
                f" {shown(samples)} and {shown(batch_size)}"
            )
        steps = samples // batch_size if drop_last else -(-samples // batch_size)
        epoch, position = divmod(self.step, steps)
        order = self._order(epoch, samples) if shuffle else torch.arange(samples)
        batch = order[position * batch_size : (position + 1) * batch_size]
        return batch.tensor_split(self.count)[self.index]

    def __repr__(self) -> str:
        return f"Shard(step={self.step}, index={self.index}, count={self.count})"
