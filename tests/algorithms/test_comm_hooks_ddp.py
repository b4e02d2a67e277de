"""The ready-made hooks in a DistributedDataParallel that trains."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer imports when it is first made; here, so that ranks need not
from torch import nn

import torchestra as dist
from torchestra.algorithms.model_averaging import PeriodicModelAverager
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.nn.parallel.comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torchestra.nn.parallel.comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torchestra.nn.parallel.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torchestra.nn.parallel.comm_hooks.optimizer_overlap_hooks import (
    OptimizerHookState,
    hook_then_optimizer,
)
from torchestra.nn.parallel.comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torchestra.nn.parallel.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torchestra.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from worlds import KINDS, run

# Several buckets, rebuilt after the first step.
OPTIONS = {"bucket_cap_mb": 0.001}
PRECISIONS = {
    "ALLREDUCE": 1e-6,
    "FP16_COMPRESS": 2e-3,
    "BF16_COMPRESS": 2e-2,
    "QUANTIZE_PER_TENSOR": 2e-2,
    "QUANTIZE_PER_CHANNEL": 2e-2,
}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(),
            nn.Linear(12, 2),
        )  # fmt: skip


NETWORK = network()


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = torch.randn(8, 8, generator=generator)
    return samples, samples[:, :2].sin() + samples[:, 2:4]


def backward(model: nn.Module, rank: int, step: int) -> float:
    samples, targets = data(rank, step)
    loss = nn.functional.mse_loss(model(samples), targets)
    loss.backward()
    return loss.item()


def train(model: nn.Module, steps: int) -> None:
    for step in range(steps):
        backward(model, dist.get_rank(), step)


def alone(size: int, steps: int, optimizer_class: Any = torch.optim.SGD, **options: Any) -> list[Any]:
    """The parameters that one process gets with the ranks' samples together."""
    model = copy.deepcopy(NETWORK)
    optimizer = optimizer_class(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            samples, targets = data(rank, step)
            (nn.functional.mse_loss(model(samples), targets) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def one_step_each(name: str, as_views: bool) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(copy.deepcopy(NETWORK), gradient_as_bucket_view=as_views, **OPTIONS)
    register_ddp_comm_hook(DDPCommHookType[name], model)
    found = []
    for step in range(3):
        model.zero_grad()
        backward(model, dist.get_rank(), step)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def averaged_gradients(size: int, step: int) -> list[torch.Tensor]:
    parts = []
    for rank in range(size):
        model = copy.deepcopy(NETWORK)
        backward(model, rank, step)
        parts.append([parameter.grad for parameter in model.parameters()])
    return [torch.stack(each).mean(dim=0) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_gradients_are_averaged_to_the_hooks_precision(kind: str, as_views: bool, name: str) -> None:
    told = run(kind, 2, one_step_each, name, as_views)
    for step in range(3):
        close(told[0][step], averaged_gradients(2, step), PRECISIONS[name])
        assert all(map(torch.equal, told[0][step], told[1][step]))


def losses(rank: int | None, steps: int, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    model = DistributedDataParallel(copy.deepcopy(NETWORK), **OPTIONS)
    hook = powerSGD_hook
    if options.pop("half", False):
        hook = bf16_compress_wrapper(powerSGD_hook)
    if rank is not None:
        state = PowerSGDState(None, rank, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **options})
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        found.append(backward(model, dist.get_rank(), step))
        optimizer.step()
    return found, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"half": True}, {"batch_tensors_with_same_shape": True}], ids=str)
def test_power_sgd_learns_nearly_as_well(options: dict[str, Any]) -> None:
    def body(rank: int | None) -> tuple[float, float, list[torch.Tensor]]:
        found, parameters = losses(rank, 80, **options)
        return sum(found[:5]), sum(found[-5:]), parameters

    begin, full, _ = run("threads", 2, body, None)[0]
    told = run("threads", 2, body, 1)
    assert full < 0.5 * begin
    assert told[0][1] < 1.25 * full
    assert all(map(torch.equal, told[0][2], told[1][2]))


@pytest.mark.parametrize("name", [each.name for each in DDPCommHookType])
def test_each_kind_can_be_registered_by_name(name: str) -> None:
    """Those that begin later average in full at first; the one that does nothing leaves gradients alone."""
    told = run("threads", 2, one_step_each, name, False)
    if name != "NOOP":
        for step in range(3):
            close(told[0][step], averaged_gradients(2, step), PRECISIONS.get(name, 1e-6))
        return
    for rank in range(2):
        model = copy.deepcopy(NETWORK)
        backward(model, rank, 0)
        close(told[rank][0], [parameter.grad for parameter in model.parameters()])


def test_a_hook_by_name_may_be_given_options() -> None:
    def body() -> int:
        model = DistributedDataParallel(copy.deepcopy(NETWORK))
        DDPCommHookType.POWER_SGD.value(model=model, state=dist.group.WORLD, start_powerSGD_iter=2)
        for step in range(3):
            backward(model, dist.get_rank(), step)
        return 1

    assert run("threads", 2, body) == [1, 1]


def test_post_local_sgd_trains_pairs_apart_and_brings_them_together() -> None:
    """Against a simulation: gradients are means of pairs, parameters means of all in every third step."""
    warmup, period, steps, lr = 2, 3, 10, 0.1

    def body() -> list[torch.Tensor]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = DistributedDataParallel(copy.deepcopy(NETWORK), **OPTIONS)
        model.register_comm_hook(
            PostLocalSGDState(None, pairs[dist.get_rank() // 2], warmup), post_localSGD_hook
        )
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=lr), PeriodicModelAverager(period, warmup)
        )
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, dist.get_rank(), step)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    models = [copy.deepcopy(NETWORK) for _ in range(2)]
    for step in range(steps):
        for model in models:
            model.zero_grad()
        for rank in range(4):
            backward(models[rank // 2], rank, step)
        with torch.no_grad():
            for left, right in zip(*(model.parameters() for model in models), strict=True):
                gradients = [left.grad / 2, right.grad / 2]
                if step < warmup:
                    gradients = [sum(gradients) / 2] * 2
                left -= lr * gradients[0]
                right -= lr * gradients[1]
                if step >= warmup and (step - warmup) % period == 0:
                    middle = (left + right) / 2
                    left.copy_(middle)
                    right.copy_(middle)
    told = run("threads", 4, body)
    for rank, found in enumerate(told):
        close(found, [parameter.detach() for parameter in models[rank // 2].parameters()])
    assert not torch.equal(told[0][0], told[2][0])


# -- ZeRO while backward goes on

MAKERS = {"at the end": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


def overlapped(
    name: str, shard: bool, wrapped: bool, ddp_options: dict[str, Any]
) -> tuple[list[torch.Tensor], int, list[int]]:
    """Parameters after three updates, steps without an update, and how much each rank has to update."""
    model = DistributedDataParallel(copy.deepcopy(NETWORK), **OPTIONS, **ddp_options)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
    hook = fp16_compress_hook if wrapped else allreduce_hook
    model.register_comm_hook(None, MAKERS[name](hook, model, zero, shard))
    idle = 0
    while idle < 5:
        model.zero_grad()
        backward(model, dist.get_rank(), 0)
        if not all(map(torch.equal, model.parameters(), NETWORK.parameters())):
            break
        idle += 1
    for step in (1, 2):
        model.zero_grad()
        zero.step()  # does nothing
        backward(model, dist.get_rank(), step)
    share = sum(parameter.numel() for parameter in zero.optim.param_groups[0]["params"])
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        state = zero.state_dict()["state"]
        assert len(state) == len(list(model.parameters()))
        assert all(each["step"] == 3 for each in state.values())
    return [parameter.detach() for parameter in model.parameters()], idle, [share]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [False, True], ids=["whole buckets", "cut buckets"])
@pytest.mark.parametrize("name", MAKERS)
def test_parameters_are_updated_while_backward_goes_on(kind: str, name: str, shard: bool) -> None:
    size = 3
    expected = alone(size, 3, torch.optim.Adam, lr=0.01)
    told = run(kind, size, overlapped, name, shard, False, {})
    close(told[0][0], expected, 1e-4)
    for found, idle, _ in told:
        assert idle == 2
        assert all(map(torch.equal, found, told[0][0]))
    total = sum(parameter.numel() for parameter in NETWORK.parameters())
    assert sum(share for *_, (share,) in told) == total


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "ddp_options",
    [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_with_other_kinds_of_models(name: str, ddp_options: dict[str, bool]) -> None:
    expected = alone(2, 3, torch.optim.Adam, lr=0.01)
    for found, idle, _ in run("threads", 2, overlapped, name, True, False, ddp_options):
        assert idle <= 3
        close(found, expected, 1e-4)


@pytest.mark.parametrize("name", MAKERS)
def test_around_a_hook_that_compresses(name: str) -> None:
    expected = alone(2, 3, torch.optim.Adam, lr=0.01)
    for found, *_ in run("threads", 2, overlapped, name, False, True, {}):
        close(found, expected, 5e-3)


@pytest.mark.parametrize("name", MAKERS)
def test_a_joined_rank_goes_on_to_update_its_share(name: str) -> None:
    """Ranks have 4 and 6 inputs, of which the first two steps update nothing."""

    def body() -> list[torch.Tensor]:
        model = DistributedDataParallel(copy.deepcopy(NETWORK), **OPTIONS)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
        model.register_comm_hook(None, MAKERS[name](allreduce_hook, model, zero))
        with model.join():
            for step in range(4 + 2 * dist.get_rank()):
                model.zero_grad()
                backward(model, dist.get_rank(), step)
        return [parameter.detach() for parameter in model.parameters()]

    alone = copy.deepcopy(NETWORK)
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(2, 6):
        optimizer.zero_grad()
        for rank in range(2 if step < 4 else 1):
            samples, targets = data(rank if step < 4 else 1, step)
            (nn.functional.mse_loss(alone(samples), targets) / 2).backward()
        optimizer.step()
    told = run("threads", 2, body)
    close(told[0], [parameter.detach() for parameter in alone.parameters()], 1e-4)
    assert all(map(torch.equal, *told))


def test_what_the_zero_hooks_refuse() -> None:
    def body() -> None:
        model = DistributedDataParallel(copy.deepcopy(NETWORK))
        plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for make in MAKERS.values():
            with pytest.raises(ValueError, match="must be constructed with `overlap_with_ddp=True` to use"):
                make(allreduce_hook, model, plain)
        some = ZeroRedundancyOptimizer(
            list(model.parameters())[:2], torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, some))
        with pytest.raises(RuntimeError, match="was not passed into the ZeroRedundancyOptimizer constructor"):
            train(model, 4)

    run("threads", 2, body)


def test_a_hook_does_not_keep_its_model_alive() -> None:
    def body() -> bool:
        model = DistributedDataParallel(copy.deepcopy(NETWORK))
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        hook = hook_with_zero_step_interleaved(allreduce_hook, model, zero)
        gone = weakref.ref(model)
        del model
        gc.collect()
        return gone() is None and callable(hook)

    assert run("threads", 2, body) == [True, True]


# -- other optimizers that step with the hook


class PlainSteps:
    """A functional optimizer, as small as can be."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        with torch.no_grad():
            param -= 0.1 * grad


def stepped(functional: bool, half: bool) -> list[torch.Tensor]:
    model = DistributedDataParallel(copy.deepcopy(NETWORK), **OPTIONS)
    optimizer: Any = PlainSteps() if functional else torch.optim.SGD(model.parameters(), lr=0.1)
    hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer))
    model.register_comm_hook(None, fp16_compress_wrapper(hook) if half else hook)
    for step in range(3):
        model.zero_grad()
        backward(model, dist.get_rank(), step)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("functional", [False, True])
def test_an_optimizer_steps_when_a_bucket_is_averaged(functional: bool) -> None:
    expected = alone(2, 3, lr=0.1)
    for found in run("threads", 2, stepped, functional, False):
        close(found, expected)


def test_only_the_parameters_that_it_is_told_to() -> None:
    def body() -> list[bool]:
        model = DistributedDataParallel(copy.deepcopy(NETWORK), **OPTIONS)
        every = list(model.parameters())
        state = OptimizerHookState(torch.optim.SGD(every, lr=0.1), every[2:4])
        model.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
        backward(model, dist.get_rank(), 0)
        return [torch.equal(*pair) for pair in zip(every, NETWORK.parameters(), strict=True)]

    assert run("threads", 2, body) == [[True, True, False, False, True, True, True, True]] * 2


def test_what_has_no_such_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Class .*list.* must implement method step_param"):
        OptimizerHookState([])
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        OptimizerHookState(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
