"""Parameters whose gradients are averaged together later: some, or all, so that there are no buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import batch, convolutions, expected_gradients, gradients, loss, mlp, seeded, share
from torch import nn

import torchestra as dist
from torchestra.algorithms.join import Join
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel import BuiltinCommHookType, DistributedDataParallel, MixedPrecision
from torchestra.optim.in_backward import apply_optimizer_in_backward
from worlds import outcomes, run


def mine(samples: torch.Tensor) -> torch.Tensor:
    return share(samples, dist.get_rank(), dist.get_world_size())


def delayed(model: nn.Module, *chosen: str, **options: Any) -> DistributedDataParallel:
    """Averages these, or all, when the gradient of the first parameter is there."""
    named = dict(model.named_parameters())
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[(name, named[name]) for name in chosen or named],
        param_to_hook_all_reduce=next(iter(named.values())),
        **options,
    )


@pytest.mark.parametrize("everything", [False, True])
def test_delayed_parameters_are_averaged_with_the_chosen_one(everything: bool) -> None:
    models = [seeded(mlp, seed) for seed in range(2)]
    samples = batch(2)

    def body() -> list[list[torch.Tensor | None]]:
        model = models[dist.get_rank()]
        chosen = [] if everything else ["4.weight", "4.bias"]
        wrapped = delayed(model, *chosen)
        found = []
        for how in ("none", "zero", "zero"):
            wrapped.zero_grad(set_to_none=how == "none")
            loss(wrapped(mine(samples))).backward()
            found.append(gradients(model))
        return found

    reference = expected_gradients(seeded(mlp, 0), samples, 2)
    for steps in run("threads", 2, body):
        for step in steps:
            torch.testing.assert_close(step, reference)


def test_delayed_parameters_and_the_chosen_one_come_together() -> None:
    def body() -> None:
        model = mlp()
        named = list(model.named_parameters())
        for options in (
            {"delay_all_reduce_named_params": named},
            {"param_to_hook_all_reduce": named[0][1]},
        ):
            with pytest.raises(ValueError, match="need to be set at the same time"):
                DistributedDataParallel(model, **options)
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        with pytest.raises(InvalidArgumentError, match="some parameters of one dtype"):
            DistributedDataParallel(
                mixed,
                delay_all_reduce_named_params=list(mixed.named_parameters()),
                param_to_hook_all_reduce=mixed[0].weight,
            )

    run("threads", 1, body)


# -- all of them


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_what_was_done_is_told(options: dict[str, Any]) -> None:
    def body() -> None:
        wrapped = delayed(mlp(), **options)
        for _ in range(2):
            loss(wrapped(batch(1))).backward()
        told = wrapped.statistics()
        nbytes = sum(each.nbytes for each in wrapped.parameters())
        assert (told.steps, told.bytes_reduced, told.buckets) == (2, 2 * nbytes, 0)
        assert told.forward_seconds > 0
        assert told.backward_seconds > 0
        assert told.communication_seconds >= told.wait_seconds > 0
        assert wrapped._get_ddp_logging_data()["world_size"] == 2
        wrapped._set_ddp_runtime_logging_sample_rate(1)
        wrapped._check_reducer_finalized()

    run("threads", 2, body)


def test_buffers_are_rank_0s_as_without() -> None:
    def body() -> list[torch.Tensor]:
        wrapped = delayed(convolutions())
        for _ in range(2):
            loss(wrapped(batch(2, seed=dist.get_rank()))).backward()
        wrapped.eval()
        wrapped(batch(2))
        return [buffer.clone() for buffer in wrapped.buffers()]

    first, second = run("threads", 2, body)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def fused(model: DistributedDataParallel) -> None:
    model._register_fused_optim(torch.optim.SGD, lr=0.1)


def builtin(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)


def hooked(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("register", [fused, builtin, hooked])
def test_a_communication_hook_that_nothing_would_call_is_refused(
    register: Callable[[DistributedDataParallel], None],
) -> None:
    def body() -> None:
        wrapped = delayed(mlp())
        with pytest.raises(InvalidArgumentError, match="no communication hook averages; leave that argument"):
            register(wrapped)
        loss(wrapped(batch(1))).backward()

    run("threads", 2, body)


def test_mixed_precision_of_nothing_is_refused() -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match="leave one of the two arguments out"):
            delayed(mlp(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        delayed(mlp(), "4.weight", mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))

    run("threads", 2, body)


@pytest.mark.parametrize("chosen", [(), ("4.weight",)])
def test_an_optimizer_that_would_step_before_the_average_is_refused(chosen: tuple[str, ...]) -> None:
    def body() -> None:
        model = mlp()
        apply_optimizer_in_backward(torch.optim.SGD, [model[4].weight], {"lr": 0.1})
        with pytest.raises(InvalidArgumentError, match="steps in backward, before its gradient is averaged"):
            delayed(model, *chosen)(batch(1))

    run("threads", 2, body)


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("joinables", [1, 2])
def test_ranks_may_have_different_numbers_of_inputs(by_all: bool, joinables: int) -> None:
    """As with a wrapper that delays nothing."""

    def body(wrap: Callable[[nn.Module], DistributedDataParallel]) -> tuple[list[Any], list[torch.Tensor]]:
        wrapped = wrap(copy.deepcopy(model))
        # A second one that has no steps of its own: then a joined rank gets the averages too.
        also = [DistributedDataParallel(nn.Linear(1, 1))][: joinables - 1]
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        seen = []
        with Join([wrapped, *also], divide_by_initial_world_size=by_all):
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                loss(wrapped(batch(1, seed=10 * dist.get_rank() + step))).backward()
                if also:
                    loss(also[0](torch.ones(1, 1))).backward()
                seen.append(gradients(wrapped.module))
                optimizer.step()
        return seen, [each.detach().clone() for each in wrapped.parameters()]

    model = seeded(mlp)  # here, since threads share the generator
    expected = run("threads", 2, body, DistributedDataParallel)
    torch.testing.assert_close(run("threads", 2, body, delayed), expected)


def test_where_it_is_some_a_join_context_is_refused_unless_it_does_nothing() -> None:
    def body() -> None:
        wrapped = delayed(mlp(), "4.weight")
        with pytest.raises(InvalidArgumentError, match="pass enable=False"):
            wrapped.join()
        with wrapped.join(enable=False):
            loss(wrapped(batch(1))).backward()
        with Join([wrapped]):
            wrapped(batch(1))

    for outcome in outcomes("threads", 2, body):
        assert isinstance(outcome.error, InvalidArgumentError)


def test_who_has_no_part_in_backward_any_more_averages_nothing() -> None:
    def body() -> None:
        wrapped = delayed(mlp())
        output = wrapped(batch(1))
        wrapped._remove_autograd_hooks()
        if dist.get_rank() == 0:
            loss(output).backward()

    run("threads", 2, body)
