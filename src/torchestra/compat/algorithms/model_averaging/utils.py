"""As ``torch.distributed.algorithms.model_averaging.utils``."""

from __future__ import annotations

from torchestra.algorithms.model_averaging.parameters import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]
