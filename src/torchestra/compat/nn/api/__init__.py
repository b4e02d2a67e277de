"""As ``torch.distributed.nn.api``."""
