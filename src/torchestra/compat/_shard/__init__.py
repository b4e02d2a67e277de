"""As ``torch.distributed._shard``, of which there is ``sharded_tensor``."""
