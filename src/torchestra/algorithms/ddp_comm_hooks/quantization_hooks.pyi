from torchestra.nn.parallel.comm_hooks.quantization_hooks import *  # noqa: F403
