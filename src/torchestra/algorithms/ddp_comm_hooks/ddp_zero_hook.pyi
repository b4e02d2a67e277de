from torchestra.nn.parallel.comm_hooks.ddp_zero_hook import *  # noqa: F403
