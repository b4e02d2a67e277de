"""Functional optimizers by torch's names."""

from __future__ import annotations

import pytest
import torch

from torchestra.compat.optim import _FunctionalSGD, as_functional_optim, utils


@pytest.mark.parametrize("kind", utils.functional_optim_map)
def test_they_do_what_torchs_optimizers_do(kind: type[torch.optim.Optimizer]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.arange(1.0, 4)) for _ in range(2))
    functional, optimizer = as_functional_optim(kind, lr=0.1), kind([theirs], lr=0.1)
    for step in range(3):
        gradient = torch.tensor([1.0, -2.0, step])
        functional.step_param(ours, gradient.clone())
        theirs.grad = gradient
        optimizer.step()
    assert torch.equal(ours, theirs)


def test_others_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "functional_optim_map", dict(utils.functional_optim_map))
    with pytest.raises(ValueError, match="does not have a functional counterpart"):
        as_functional_optim("own")
    utils.register_functional_optim("own", _FunctionalSGD)
    assert isinstance(as_functional_optim("own", lr=0.1), _FunctionalSGD)


def test_without_parameters_there_is_none() -> None:
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        _FunctionalSGD([], lr=0.1)
