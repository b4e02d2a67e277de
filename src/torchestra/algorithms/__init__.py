"""Algorithms on top of collectives: joining with uneven inputs, model averaging."""

from torchestra.algorithms import join
from torchestra.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "join"]
