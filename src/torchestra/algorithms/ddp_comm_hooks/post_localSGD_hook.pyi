from torchestra.nn.parallel.comm_hooks.post_localSGD_hook import *  # noqa: F403
