"""As ``torch.distributed.optim.utils``, and its functional optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim

from torchestra.errors import InvalidArgumentError
from torchestra.optim import FunctionalOptimizer

__all__ = [
    "_FunctionalAdadelta",
    "_FunctionalAdagrad",
    "_FunctionalAdam",
    "_FunctionalAdamW",
    "_FunctionalAdamax",
    "_FunctionalRMSprop",
    "_FunctionalRprop",
    "_FunctionalSGD",
    "as_functional_optim",
    "functional_optim_map",
    "register_functional_optim",
]


class _Functional(FunctionalOptimizer):
    """:class:`torchestra.optim.FunctionalOptimizer` of one class, by torch's arguments."""

    of: type[optim.Optimizer]

    def __init__(
        self, params: Iterable[torch.Tensor], *args: Any, _allow_empty_param_list: bool = False, **kwargs: Any
    ) -> None:
        params = list(params)
        if not params and not _allow_empty_param_list:
            raise InvalidArgumentError("optimizer got an empty parameter list")
        super().__init__(self.of, params, *args, **kwargs)


def _functional(of: type[optim.Optimizer]) -> type[_Functional]:
    return type(f"_Functional{of.__name__}", (_Functional,), {"of": of})


_FunctionalAdadelta = _functional(optim.Adadelta)
_FunctionalAdagrad = _functional(optim.Adagrad)
_FunctionalAdam = _functional(optim.Adam)
_FunctionalAdamW = _functional(optim.AdamW)
_FunctionalAdamax = _functional(optim.Adamax)
_FunctionalRMSprop = _functional(optim.RMSprop)
_FunctionalRprop = _functional(optim.Rprop)
_FunctionalSGD = _functional(optim.SGD)

functional_optim_map: dict[Any, Callable[..., Any]] = {each.of: each for each in _Functional.__subclasses__()}
"""The functional optimizer for each optimizer class of torch."""


def register_functional_optim(key: Any, optim: Callable[..., Any]) -> None:
    """Register an optimizer for :func:`as_functional_optim`, unless the key has one."""
    functional_optim_map.setdefault(key, optim)


def as_functional_optim(optim_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a functional optimizer that learns its parameters from its steps.

    Raises:
        InvalidArgumentError: the class has no functional counterpart.
    """
    if optim_cls not in functional_optim_map:
        raise InvalidArgumentError(f"Optimizer {optim_cls} does not have a functional counterpart!")
    return functional_optim_map[optim_cls]([], *args, _allow_empty_param_list=True, **kwargs)
