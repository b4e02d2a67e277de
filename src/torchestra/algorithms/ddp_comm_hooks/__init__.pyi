from torchestra.nn.parallel.comm_hooks import *  # noqa: F403
