"""The names of libraries whose default group a test's or a notebook's ranks join. Imports nothing."""

TORCHESTRA = "torchestra"
TORCH = "torch"
"""torch.distributed's, on torchestra's engine."""
TORCH_ON_GLOO = "torch on gloo"
"""torch.distributed's, on Gloo itself."""
TORCH_WORLDS = (TORCH, TORCH_ON_GLOO)
