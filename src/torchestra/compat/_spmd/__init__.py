"""As ``torch.distributed._spmd`` was, of which there is ``comm_tensor``."""
