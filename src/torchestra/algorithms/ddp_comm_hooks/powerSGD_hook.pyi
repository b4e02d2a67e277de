from torchestra.nn.parallel.comm_hooks.powerSGD_hook import *  # noqa: F403
