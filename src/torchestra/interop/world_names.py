"""The names of libraries whose default group a test's or a notebook's ranks join. Imports nothing."""

TORCHESTRA = "torchestra"
TORCH = "torch"
"""torch.distributed's, on torchestra's engine."""
