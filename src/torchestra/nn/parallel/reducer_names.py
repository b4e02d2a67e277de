"""Methods of torch's Reducer, under its names, for programs that call the reducer of a wrapper.

Methods that only torch's own wrapper calls are left out: autograd hooks and running communication hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchestra.nn.parallel.bucket_reducer import BucketReducer
from torchestra.process_group import ProcessGroup


class TorchReducerNames:
    """Gives the methods of a :class:`Reducer` torch's names; see there."""

    graph_is_static: bool
    _agreed_order: list[int] | None
    _bucket_reducer: BucketReducer
    _failure: str

    def _check_reducer_finalized(self) -> None:
        self.check_finished()

    def _ddp_graph_static(self) -> bool:
        """Return whether all rounds so far have left the same parameters unused."""
        return self.graph_is_static

    def _get_local_used_map(self) -> torch.Tensor:
        return self.local_used_map

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self.install_post_backward_futures(futures)

    def _rebuild_buckets(self) -> bool:
        """Make new buckets, by the order in which gradients came, if that is due; return whether it was."""
        if self._agreed_order is None:
            return False
        self._rebuild()
        return True

    def _remove_autograd_hooks(self) -> None:
        self.remove_autograd_hooks()

    def _reset_state(self) -> None:
        """Forget a round that was not finished."""
        self._bucket_reducer.reset()
        self._end_round()
        self._failure = ""

    def _set_static_graph(self) -> None:
        self.set_static_graph()

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        self.update_process_group(new_process_group)

    # -- of the reducer

    @property
    def local_used_map(self) -> torch.Tensor:
        """Return how many ranks have used each parameter in the last round."""
        raise NotImplementedError

    def check_finished(self) -> None:
        """Raise an error if a round has begun and not ended."""
        raise NotImplementedError

    def install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Wait for these at the end of the next round."""
        raise NotImplementedError

    def remove_autograd_hooks(self) -> None:
        """Take no part in backward any more."""
        raise NotImplementedError

    def set_static_graph(self) -> None:
        """Assume that every step is like the first."""
        raise NotImplementedError

    def update_process_group(self, group: ProcessGroup) -> None:
        """Average over another group from now on."""
        raise NotImplementedError

    def _rebuild(self) -> None:
        raise NotImplementedError

    def _end_round(self) -> None:
        raise NotImplementedError
