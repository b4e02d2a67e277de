"""Averages the parameters of models that train apart: periodically, and in a hierarchy of groups."""

from torchestra.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torchestra.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torchestra.algorithms.model_averaging.parameters import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]
