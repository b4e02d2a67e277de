from torchestra.nn.parallel.comm_hooks.optimizer_overlap_hooks import *  # noqa: F403
