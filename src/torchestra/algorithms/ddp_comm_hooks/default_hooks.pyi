from torchestra.nn.parallel.comm_hooks.default_hooks import *  # noqa: F403
