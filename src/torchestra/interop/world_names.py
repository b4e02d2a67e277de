"""Whose default group ranks are in that somebody else has started. Imports nothing."""

TORCHESTRA = "torchestra"
TORCH = "torch"
"""torch.distributed's, on torchestra's engine."""
