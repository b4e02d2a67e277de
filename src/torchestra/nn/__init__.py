"""Neural network modules whose ranks work together."""

from torchestra.nn import parallel

__all__ = ["parallel"]
