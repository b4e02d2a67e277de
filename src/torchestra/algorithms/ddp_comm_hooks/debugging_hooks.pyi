from torchestra.nn.parallel.comm_hooks.debugging_hooks import *  # noqa: F403
