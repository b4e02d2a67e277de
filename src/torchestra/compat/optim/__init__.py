"""As ``torch.distributed.optim``."""

from __future__ import annotations

from torchestra.compat.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)
from torchestra.compat.optim.optimizer import DistributedOptimizer
from torchestra.compat.optim.post_localSGD_optimizer import PostLocalSGDOptimizer
from torchestra.compat.optim.utils import (
    _FunctionalAdadelta,
    _FunctionalAdagrad,
    _FunctionalAdam,
    _FunctionalAdamax,
    _FunctionalAdamW,
    _FunctionalRMSprop,
    _FunctionalRprop,
    _FunctionalSGD,
    as_functional_optim,
)
from torchestra.compat.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "DistributedOptimizer",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "_FunctionalAdadelta",
    "_FunctionalAdagrad",
    "_FunctionalAdam",
    "_FunctionalAdamW",
    "_FunctionalAdamax",
    "_FunctionalRMSprop",
    "_FunctionalRprop",
    "_FunctionalSGD",
    "_apply_optimizer_in_backward",
    "_get_in_backward_optimizers",
    "as_functional_optim",
]
