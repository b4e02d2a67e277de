"""What runs on top of collectives: joining with uneven inputs, hooks that compress gradients, averaging."""

from torchestra.algorithms import join
from torchestra.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "join"]
