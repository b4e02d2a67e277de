"""``rebuild()`` after ``shrink()``, with every hook and mode of DistributedDataParallel.

After it a wrapper does, bit for bit, what one does that is constructed in the new group; where gradients are
averaged exactly that is what one process computes alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ddp_models import Backwards, Branches, batch, convolutions, expected_gradients, loss, mlp, share
from torch import nn

import torchestra as dist
from torchestra.algorithms.model_averaging import PeriodicModelAverager
from torchestra.nn import SyncBatchNorm
from torchestra.nn.parallel import BuiltinCommHookType, DistributedDataParallel
from torchestra.nn.parallel.comm_hooks import DDPCommHookType, ddp_zero_hook, register_ddp_comm_hook
from torchestra.nn.parallel.comm_hooks.default_hooks import allreduce_hook
from torchestra.nn.parallel.comm_hooks.optimizer_overlap_hooks import (
    OptimizerHookState,
    hook_then_optimizer,
)
from torchestra.nn.parallel.comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torchestra.nn.parallel.comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torchestra.nn.parallel.mixed_precision import MixedPrecision
from torchestra.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torchestra.optim.in_backward import apply_optimizer_in_backward
from worlds import WORLD_SECONDS, outcomes, run, store_barrier

TINY_BUCKETS_MB = 100 / 2**20
RATE = 0.05
DDP = DistributedDataParallel
SGD = torch.optim.SGD


class Gone(Exception):
    """End the rank that is lost."""


class Trained(NamedTuple):
    """A wrapper, what steps it if anything has to be called for that, and what to rebuild besides it."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer | None = None
    also: Callable[[], None] = lambda: None


class Case(NamedTuple):
    """Make a module, and train it.

    Attributes:
        module: makes it.
        train: wraps it.
        tolerance: how far a step may be from what one process computes; None: that is not comparable.
    """

    module: Callable[[], nn.Module]
    train: Callable[[nn.Module], Trained]
    tolerance: float | None = 1e-6


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DDP(module, bucket_cap_mb=TINY_BUCKETS_MB, **options)


def plain(**options: Any) -> Callable[[nn.Module], Trained]:
    def train(module: nn.Module) -> Trained:
        return Trained(wrap(module, **options), SGD(module.parameters(), RATE))

    return train


def hooked(register: Callable[[DistributedDataParallel], None], **options: Any) -> Callable[..., Trained]:
    def train(module: nn.Module) -> Trained:
        trained = plain(**options)(module)
        register(trained.model)
        return trained

    return train


def low_rank(hook: Any, **settings: Any) -> Callable[..., Trained]:
    settings = {"matrix_approximation_rank": 16, "min_compression_rate": 0.01, **settings}
    return hooked(
        lambda model: model.register_comm_hook(
            PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, **settings), hook
        )
    )


def post_local(subgroup: bool) -> Callable[[nn.Module], Trained]:
    def train(module: nn.Module) -> Trained:
        model = wrap(module)
        chosen = dist.group.WORLD if subgroup else None
        model.register_comm_hook(PostLocalSGDState(dist.group.WORLD, chosen, 2), post_localSGD_hook)
        averager = PeriodicModelAverager(2, warmup_steps=2)
        optimizer = PostLocalSGDOptimizer(SGD(module.parameters(), RATE), averager)

        def follow() -> None:
            averager.process_group, averager.step = dist.group.WORLD, 0

        return Trained(model, optimizer, follow)

    return train


def delayed(*names: str) -> Callable[[nn.Module], Trained]:
    def train(module: nn.Module) -> Trained:
        named = dict(module.named_parameters())
        chosen = [(name, named[name]) for name in names or named]
        options = {"delay_all_reduce_named_params": chosen, "param_to_hook_all_reduce": named["0.weight"]}
        return plain(**options)(module)

    return train


def normalized() -> nn.Module:
    return SyncBatchNorm.convert_sync_batchnorm(convolutions(), dist.group.WORLD)


def buffer_hook(module: nn.Module) -> Trained:
    def from_rank_0(state: dict[str, Any], buffers: Any) -> None:
        for buffer in buffers.values():
            dist.broadcast(buffer, group_src=0, group=state["group"])

    trained = plain()(module)
    trained.model._register_buffer_comm_hook({"group": dist.group.WORLD}, from_rank_0)
    return trained


def fused(module: nn.Module) -> Trained:
    model = wrap(module)
    model._register_fused_optim(SGD, lr=RATE)
    return Trained(model)


def in_backward(module: nn.Module) -> Trained:
    apply_optimizer_in_backward(SGD, module.parameters(), {"lr": RATE})
    return Trained(wrap(module))


def overlapped(module: nn.Module) -> Trained:
    model = wrap(module)
    state = OptimizerHookState(SGD(module.parameters(), RATE))
    model.register_comm_hook(dist.group.WORLD, hook_then_optimizer(allreduce_hook, state))
    return Trained(model)


def zero_in_hook(make: Any, shard_buckets: bool) -> Callable[[nn.Module], Trained]:
    def train(module: nn.Module) -> Trained:
        model = wrap(module)
        zero = ZeroRedundancyOptimizer(module.parameters(), SGD, overlap_with_ddp=True, lr=RATE, momentum=0.9)
        hook = make(allreduce_hook, model, zero, shard_buckets)
        model.register_comm_hook(dist.group.WORLD, hook)
        return Trained(model)

    return train


def zero(as_views: bool) -> Callable[[nn.Module], Trained]:
    def train(module: nn.Module) -> Trained:
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), SGD, parameters_as_bucket_view=as_views, lr=RATE
        )
        return Trained(wrap(module), optimizer, optimizer.rebuild)

    return train


class ABranch(Branches):
    """Uses one of its branches only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, 1)


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
CASES: dict[str, Case] = {
    "plain": Case(Backwards, plain()),
    "views": Case(Backwards, plain(gradient_as_bucket_view=True)),
    "buffers": Case(convolutions, plain()),
    "static graph": Case(Backwards, plain(static_graph=True)),
    "static graph, unused": Case(ABranch, plain(static_graph=True)),
    "unused": Case(ABranch, plain(find_unused_parameters=True)),
    "unused, skipped": Case(ABranch, plain(find_unused_parameters=True, skip_all_reduce_unused_params=True)),
    "mixed precision": Case(mlp, plain(mixed_precision=HALF), 2e-2),
    "mixed precision, views": Case(
        mlp, plain(mixed_precision=HALF, gradient_as_bucket_view=True, static_graph=True), 2e-2
    ),
    "some delayed": Case(mlp, delayed("2.weight", "2.bias", "4.weight")),
    "all delayed": Case(mlp, delayed()),
    "SyncBatchNorm": Case(normalized, plain(), None),
    "buffer hook": Case(convolutions, buffer_hook),
    "PowerSGD": Case(mlp, low_rank(powerSGD_hook), 1e-4),
    "PowerSGD, lossy": Case(mlp, low_rank(powerSGD_hook, matrix_approximation_rank=1), None),
    "PowerSGD, batched": Case(Backwards, low_rank(batched_powerSGD_hook), 1e-4),
    "post-local SGD": Case(mlp, post_local(subgroup=True)),
    "post-local SGD, same host": Case(mlp, post_local(subgroup=False)),
    "fused optimizer": Case(mlp, fused),
    "optimizers in backward": Case(mlp, in_backward),
    "overlapped optimizer": Case(mlp, overlapped),
    "ZeRO": Case(mlp, zero(as_views=False)),
    "ZeRO, views": Case(mlp, zero(as_views=True)),
    **{
        f"ZeRO, {make.__name__}, {shard}": Case(mlp, zero_in_hook(make, shard), None)
        for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved)
        for shard in (False, True)
    },
    **{
        f"{kind}": Case(mlp, hooked(lambda model, kind=kind: model._register_builtin_comm_hook(kind)), 1e-3)
        for kind in BuiltinCommHookType
    },
    **{
        f"{kind} of {given}": Case(
            mlp,
            hooked(
                lambda model, kind=kind, given=given: register_ddp_comm_hook(
                    kind, model, dist.group.WORLD if given == "a group" else None
                )
            ),
            1e-2,
        )
        for kind in DDPCommHookType
        for given in ("a group", "the default group")
        if kind is not DDPCommHookType.NOOP
    },
}


def step(trained: Trained, number: int) -> None:
    samples = share(batch(dist.get_world_size(), seed=number), dist.get_rank(), dist.get_world_size())
    loss(trained.model(samples)).backward()
    if trained.optimizer is not None:
        trained.optimizer.step()
    trained.model.zero_grad()


def share_state(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)


def lose_rank_1(case: Case) -> Trained:
    """Train with three ranks, of which one leaves; the survivors' wrapper, rebuilt and with one state."""
    trained = case.train(case.module())
    for number in range(4):
        step(trained, number)
    store_barrier()
    if dist.get_rank() == 1:
        raise Gone
    with pytest.raises(dist.GroupAbortedError):
        step(trained, 4)
    assert dist.group.WORLD is not None
    dist.group.WORLD.shrink()
    trained.model.rebuild()
    trained.model.zero_grad()
    trained.also()
    share_state(trained.model.module)
    return trained


def alone(module: nn.Module, number: int) -> list[torch.Tensor]:
    """The parameters after a step, as one process computes it."""
    grads = expected_gradients(module, batch(2, seed=number), 2)
    pairs = zip(module.parameters(), grads, strict=True)
    return [each.detach() if grad is None else each.detach() - RATE * grad for each, grad in pairs]


@pytest.mark.parametrize("name", CASES)
def test_a_rebuilt_wrapper_is_like_one_made_in_the_new_group(name: str) -> None:
    case = CASES[name]

    def body() -> None:
        trained = lose_rank_1(case)
        module = case.module()
        module.load_state_dict(trained.model.module.state_dict())
        fresh = case.train(module)
        assert [each.dtype for each in trained.model.parameters()] == [
            each.dtype for each in module.parameters()
        ]
        for number in range(5, 10):
            expected = None if case.tolerance is None else alone(module, number)
            step(trained, number)
            step(fresh, number)
            for mine, other in zip(
                trained.model.module.state_dict().values(), module.state_dict().values(), strict=True
            ):
                assert mine.equal(other)
            if expected is not None:
                torch.testing.assert_close(
                    list(module.parameters()),
                    expected,
                    atol=case.tolerance,
                    rtol=case.tolerance,
                )

    ended = outcomes("threads", 3, body)
    assert isinstance(ended[1].error, Gone)
    ended[0].result()
    ended[2].result()


@pytest.mark.parametrize("hook", [None, powerSGD_hook, post_localSGD_hook])
def test_ranks_that_have_failed_in_different_steps_go_on_together(hook: Any) -> None:
    """One has new buckets and has counted a step; the other has neither."""
    both_have_stepped = threading.Barrier(2, timeout=WORLD_SECONDS)

    def body() -> None:
        model = Backwards()
        wrapped = wrap(model)
        if hook is powerSGD_hook:
            wrapped.register_comm_hook(PowerSGDState(None, 1, 2, 0.01), hook)
        elif hook is not None:
            wrapped.register_comm_hook(PostLocalSGDState(None, None, 2), hook)
        trained = Trained(wrapped, SGD(model.parameters(), RATE))
        step(trained, 0)
        if dist.get_rank() == 1:
            raise Gone
        both_have_stepped.wait()
        if dist.get_rank() == 0:
            with pytest.raises(dist.GroupAbortedError):
                step(trained, 1)
            assert wrapped.reducer.rebuilt is not None
            if hook is not None:
                wrapped.reducer._bucket_reducer._hook[
                    1
                ].iter += 1  # as if the group had failed after the hook
        else:
            assert wrapped.reducer.rebuilt is None
        dist.group.WORLD.shrink()
        wrapped.rebuild()
        wrapped.zero_grad()
        share_state(model)
        expected = alone(model, 2)
        step(trained, 2)
        torch.testing.assert_close(list(model.parameters()), expected, atol=1e-6, rtol=1e-6)
        for number in range(3, 6):
            step(trained, number)
        for parameter in model.parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, src=0)
            assert first.equal(parameter)

    ended = outcomes("threads", 3, body)
    ended[0].result()
    ended[2].result()


def test_a_rebuilt_wrapper_accumulates_and_joins() -> None:
    def body() -> None:
        trained = lose_rank_1(CASES["views"])
        model, rank = trained.model, dist.get_rank()
        expected = expected_gradients(model.module, batch(2, seed=7), 2)
        samples = share(batch(2, seed=7), rank, 2)
        with model.no_sync():
            loss(model(samples)).backward()
        loss(model(samples)).backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * grad)
        model.zero_grad()
        with model.join():
            for _ in range(1 + 2 * rank):
                loss(model(samples)).backward()
        model.zero_grad()
        loss(model(samples)).backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        assert model._get_ddp_logging_data()["world_size"] == 2

    ended = outcomes("threads", 3, body)
    ended[0].result()
    ended[2].result()


def test_a_saved_state_of_a_divided_optimizer_goes_on_in_the_new_group() -> None:
    """Momentum that a lost rank has kept is lost, but not what was collected before."""

    def body() -> None:
        module = mlp()
        model = wrap(module)
        optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=RATE, momentum=0.9)
        trained = Trained(model, optimizer, optimizer.rebuild)
        whole = SGD((copied := copy.deepcopy(module)).parameters(), lr=RATE, momentum=0.9)
        for number in range(3):
            for mine, grad in zip(
                copied.parameters(), expected_gradients(copied, batch(3, seed=number), 3), strict=True
            ):
                mine.grad = grad
            whole.step()
            step(trained, number)
        optimizer.consolidate_state_dict(to=0)
        saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved, src=0)
        store_barrier()
        if dist.get_rank() == 1:
            raise Gone
        with pytest.raises(dist.GroupAbortedError):
            dist.barrier()
        dist.group.WORLD.shrink()
        model.rebuild()
        optimizer.rebuild()
        optimizer.load_state_dict(saved[0])
        for mine, grad in zip(
            copied.parameters(), expected_gradients(copied, batch(2, seed=3), 2), strict=True
        ):
            mine.grad = grad
        whole.step()
        step(trained, 3)
        torch.testing.assert_close(list(module.parameters()), list(copied.parameters()))

    ended = outcomes("threads", 3, body)
    ended[0].result()
    ended[2].result()


def test_a_group_that_nothing_can_replace_is_named_with_the_one_in_its_place() -> None:
    """A hook that holds the group in its closure goes on with the old one, and hears that plainly."""
    rebuilt = threading.Barrier(2, timeout=WORLD_SECONDS)

    def body() -> None:
        group = dist.group.WORLD

        def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return allreduce_hook(group, bucket)

        trained = lose_rank_1(Case(mlp, hooked(lambda model: model.register_comm_hook(None, hook))))
        rebuilt.wait()
        # Whose hook fails first ends the reduction for the other.
        errors = (dist.GroupDestroyedError, dist.GroupAbortedError)
        with pytest.raises(errors, match=r"shrunk group '.*'; '.*~1' is in its place"):
            step(trained, 5)

    ended = outcomes("threads", 3, body)
    ended[0].result()
    ended[2].result()


def test_a_wrapper_in_a_join_context_is_not_rebuilt() -> None:
    def body() -> None:
        model = wrap(mlp())
        with model.join(), pytest.raises(dist.InvalidArgumentError, match="in a join context over"):
            model.rebuild()

    run("threads", 1, body)


def test_wrapping_anew_after_a_failed_step_keeps_the_full_precision() -> None:
    def body() -> None:
        module = mlp()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        wrapped = DDP(module, mixed_precision=HALF, init_sync=False)
        handle = module[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(wrapped(batch(1))).backward()
        handle.remove()
        wrapped._remove_autograd_hooks()
        again = DDP(module, mixed_precision=HALF)
        loss(again(batch(1))).backward()
        assert all(mine.equal(old) for mine, old in zip(module.parameters(), before, strict=True))

    run("threads", 1, body)
