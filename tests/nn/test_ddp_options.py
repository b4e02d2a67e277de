"""Arguments and methods of the wrapper that change what is averaged, when, and in what precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_models import Branches, batch, convolutions, gradients, loss, mlp, seeded, share
from torch import nn

import torchestra as dist
from torchestra.errors import GradientReductionError
from torchestra.nn.parallel import BufferCommHookLocation, DistributedDataParallel, MixedPrecision
from torchestra.optim.in_backward import apply_optimizer_in_backward
from worlds import run

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
TINY_BUCKETS_MB = 100 / 2**20


def mine(samples: torch.Tensor) -> torch.Tensor:
    return share(samples, dist.get_rank(), dist.get_world_size())


# -- parameters that are left out


def test_ignored_parameters_and_buffers_are_the_ranks_own() -> None:
    def body() -> tuple[float, float, int]:
        model = convolutions()
        ignored = ["6.weight", "2.running_mean"]
        with torch.no_grad():
            model[6].weight.fill_(dist.get_rank())
        model[2].running_mean.fill_(dist.get_rank())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        assert wrapped.parameters_to_ignore == set(ignored)
        mean = model[2].running_mean[0].item()
        loss(wrapped(batch(1, seed=dist.get_rank()))).backward()
        everybodys = model[6].weight.grad.clone()
        dist.all_reduce(everybodys, dist.ReduceOp.AVG)
        assert not torch.equal(everybodys, model[6].weight.grad)
        assert model[6].weight._ddp_ignored
        return model[6].weight[0, 0].item(), mean, len(wrapped.reducer.parameters)

    assert run("threads", 2, body) == [(0, 0, 7), (1, 1, 7)]


def test_ranks_may_differ_in_what_is_ignored() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6 + dist.get_rank()))
        names = ["1.weight", "1.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        loss(DistributedDataParallel(model)(batch(1))).backward()

    run("threads", 2, body)


class Untouchable(torch.Tensor):
    """A tensor that is in no one place, as a sharded one: whoever looks at its data fails."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in {"data_ptr", "copy_", "clone", "register_post_accumulate_grad_hook"}:
            raise AssertionError(f"{func.__name__} of a tensor that is to be ignored")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_ignored_parameter_may_be_anything() -> None:
    def body() -> None:
        model = nn.Linear(6, 6)
        model.sharded = nn.Parameter(torch.ones(2).as_subclass(Untouchable), requires_grad=True)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, {"sharded"})
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
        )
        loss(wrapped(batch(1))).backward()

    run("threads", 2, body)


# -- precision


class Looks(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("buffer", torch.randn(1, 2))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: torch.Tensor, *, also: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen = {each.dtype for each in (x, also["x"], *self.parameters())}
        return self.layer(x) + self.frozen


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16, buffer_dtype=torch.bfloat16)


@VIEWS
@pytest.mark.parametrize("to_none", [False, True])
def test_mixed_precision_is_of_forward_and_backward_only(views: bool, to_none: bool) -> None:
    def body() -> None:
        own = seeded(Looks)
        wrapped = DistributedDataParallel(own, mixed_precision=LOW, gradient_as_bucket_view=views)
        assert own.buffer.dtype is torch.bfloat16
        assert own.count.dtype is torch.int64
        for parameter in own.parameters():
            assert parameter._mp_param.dtype is torch.bfloat16
            assert parameter._fp_param.dtype is torch.float32
        alone = seeded(Looks)
        x = batch(1)
        alone(x, also={"x": x}).float().sum().backward()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
        for step in range(4):
            with wrapped.no_sync() if step == 2 else torch.enable_grad():
                wrapped(x, also={"x": x}).float().sum().backward()
            assert own.seen == {torch.bfloat16}
            assert {each.dtype for each in own.parameters()} == {torch.float32}
            assert own.frozen.grad is None
            times = 2 if step == 3 else 1
            for found, expected in zip(own.layer.parameters(), alone.layer.parameters(), strict=True):
                assert found.grad.dtype is torch.float32
                torch.testing.assert_close(found.grad, times * expected.grad, rtol=2e-2, atol=5e-2)
            if step != 2:
                optimizer.step()
                wrapped.zero_grad(set_to_none=to_none)
        with torch.no_grad():
            assert wrapped(x, also={"x": x}).dtype is torch.bfloat16
        assert {each.dtype for each in own.parameters()} == {torch.float32}
        assert all(
            each.dtype is torch.float32 for name, each in wrapped.state_dict().items() if "layer" in name
        )

    run("threads", 2, body)


def test_mixed_precision_sends_low_precision_and_leaves_ignored_parameters_alone() -> None:
    def body() -> None:
        own = Branches(2)
        ignored = ["branches.1.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, ignored)
        wrapped = DistributedDataParallel(
            own, mixed_precision=MixedPrecision(param_dtype=torch.float16), find_unused_parameters=True
        )
        assert not hasattr(own.branches[1].weight, "_mp_param")
        loss(wrapped(batch(1, seed=dist.get_rank()), 0).float()).backward()
        gradient = own.branches[0].weight.grad
        assert torch.equal(gradient, gradient.half().float())
        assert own.branches[1].bias.dtype is torch.float32, "not used, and raised again all the same"
        with pytest.raises(GradientReductionError, match="can only be called once"):
            wrapped.register_comm_hook(None, lambda state, bucket: None)

    run("threads", 2, body)


def test_a_copy_has_the_precision_too() -> None:
    def body() -> None:
        copied = copy.deepcopy(DistributedDataParallel(mlp(), mixed_precision=LOW))
        output = copied(batch(1))
        assert output.dtype is torch.bfloat16
        loss(output).backward()
        assert {each.grad.dtype for each in copied.parameters()} == {torch.float32}

    run("threads", 1, body)


# -- buffers


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before = self.count.clone()
        self.count += 1 + dist.get_rank()
        return self.layer(x)


@pytest.mark.parametrize("futures", [False, True])
@pytest.mark.parametrize("location", BufferCommHookLocation)
def test_a_buffer_hook_replaces_the_broadcast(location: BufferCommHookLocation, futures: bool) -> None:
    def body() -> list[tuple[float, float]]:
        def add_up(state: str, buffers: dict[str, torch.Tensor]) -> Any:
            assert (state, list(buffers)) == ("state", ["count"])
            work = dist.all_reduce(buffers["count"], async_op=True)
            if futures:
                return [work.get_future()]
            return work.wait() and None

        wrapped = DistributedDataParallel(Counts())
        wrapped._register_buffer_comm_hook("state", add_up, location)
        found = []
        for _ in range(2):
            output = wrapped(batch(1))
            if futures and location is BufferCommHookLocation.PRE_FORWARD:
                # What forward does to a buffer on its way is not to be told.
                loss(output).backward()
                continue
            loss(output).backward()
            found.append((wrapped.module.before[0].item(), wrapped.module.count[0].item()))
        return found

    zero, one = run("threads", 2, body)
    if location is BufferCommHookLocation.POST_FORWARD:
        assert zero == one == [(0, 3), (3, 9)]
    elif not futures:
        assert zero == [(0, 1), (3, 4)]
        assert one == [(0, 2), (3, 5)]


def test_a_buffer_hook_may_broadcast_as_usual() -> None:
    def body() -> list[float]:
        wrapped = DistributedDataParallel(Counts())
        wrapped._register_buffer_comm_hook(
            wrapped, lambda ddp, buffers: ddp._default_broadcast_coalesced(list(buffers.values()))
        )
        for _ in range(2):
            loss(wrapped(batch(1))).backward()
        with pytest.raises(TypeError, match="buffer communication hook must be callable, got 1"):
            wrapped._register_buffer_comm_hook(None, 1)
        return wrapped.module.count.tolist()

    assert run("threads", 2, body) == [[2, 2], [2, 2]]


# -- optimizers in backward


@VIEWS
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_that_step_in_backward(optimizer: type[torch.optim.Optimizer], views: bool) -> None:
    """Fused, or given to the parameters before or after wrapping: all train like an optimizer after it."""
    model, samples = seeded(mlp), batch(2)

    def body() -> None:
        def wrap(own: nn.Module) -> DistributedDataParallel:
            return DistributedDataParallel(own, gradient_as_bucket_view=views, bucket_cap_mb=TINY_BUCKETS_MB)

        options = {"lr": 0.03, "weight_decay": 0.1}
        plain, fused, before, after = (copy.deepcopy(model) for _ in range(4))
        apply_optimizer_in_backward(optimizer, before.parameters(), options)
        wrapped = [wrap(each) for each in (plain, fused, before, after)]
        wrapped[1]._register_fused_optim(optimizer, **options)
        apply_optimizer_in_backward(optimizer, after.parameters(), options)
        own = optimizer(plain.parameters(), **options)
        for _ in range(4):
            for each in wrapped:
                loss(each(mine(samples))).backward()
            own.step()
            own.zero_grad()
            wrapped[1].zero_grad()
            for other in (fused, before, after):
                torch.testing.assert_close(list(other.parameters()), list(plain.parameters()))
            assert gradients(before) == gradients(after) == [None] * 6

    run("threads", 2, body)


def test_some_parameters_only_are_updated_in_backward() -> None:
    def body() -> None:
        own = mlp()
        wrapped = DistributedDataParallel(own)
        former = [each.detach().clone() for each in own.parameters()]
        wrapped._register_fused_optim(torch.optim.SGD, 0.1, optim_params=[own[0].weight])
        loss(wrapped(batch(1))).backward()
        changed = [not torch.equal(one, other) for one, other in zip(own.parameters(), former, strict=True)]
        assert changed == [True, *[False] * 5]
        with pytest.raises(RuntimeError, match=r"LBFGS.* does not support overlapped DDP"):
            DistributedDataParallel(mlp())._register_fused_optim(torch.optim.LBFGS)

    run("threads", 1, body)


# -- what is reduced


def test_buckets_of_unused_parameters_are_skipped_if_all_ranks_skip_them() -> None:
    def body() -> list[int]:
        found = []
        for skip in (False, True):
            wrapped = DistributedDataParallel(
                Branches(2),
                find_unused_parameters=True,
                bucket_cap_mb=TINY_BUCKETS_MB,
                skip_all_reduce_unused_params=skip,
            )
            for _ in range(3):
                loss(wrapped(batch(1), 0)).backward()
            found.append(wrapped._get_ddp_logging_data()["num_buckets_reduced"])
            assert wrapped.module.branches[1].weight.grad is None
            assert wrapped.module.branches[0].weight.grad is not None
        return found

    zero, one = run("threads", 2, body)
    assert zero == one
    assert zero[1] < zero[0]


def test_buckets_may_be_given_their_sizes_one_by_one() -> None:
    def body() -> list[int]:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
        wrapped = DistributedDataParallel(model, bucket_cap_mb_list=[1 / 1024, 2 / 1024, 3 / 1024])
        for _ in range(2):
            wrapped(torch.ones(1, 16)).sum().backward()
        return [bucket.nbytes for bucket in wrapped.reducer.buckets]

    assert run("threads", 2, body) == [[1024, 2048, 3072]] * 2


class Mesh:
    """Stand for a device mesh."""

    def __init__(self, ndim: int, group: dist.ProcessGroup) -> None:
        self.ndim = ndim
        self._group = group

    def get_group(self, mesh_dim: int = 0) -> dist.ProcessGroup:
        assert mesh_dim == 0
        return self._group


def test_a_mesh_may_stand_for_its_group() -> None:
    def body() -> None:
        group = dist.new_group()
        mesh = Mesh(1, group)
        wrapped = DistributedDataParallel(mlp(), device_mesh=mesh)
        assert wrapped.device_mesh is mesh
        assert wrapped.process_group is group
        loss(wrapped(batch(1))).backward()
        with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
            DistributedDataParallel(mlp(), process_group=group, device_mesh=mesh)
        with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
            DistributedDataParallel(mlp(), device_mesh=Mesh(2, group))

    run("threads", 2, body)


def test_torchs_methods_for_several_devices_have_one() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        x = batch(1)
        for (inputs,), (kwargs,) in (wrapped.scatter(x, {"a": 1}, []), wrapped.to_kwargs(x, {"a": 1}, "cpu")):
            assert inputs is x
            assert kwargs == {"a": 1}
        assert wrapped.gather([x], "cpu") is x

    run("threads", 1, body)


@pytest.mark.filterwarnings("ignore:`check_reduction` has no effect:FutureWarning")
def test_arguments_without_effect_are_taken() -> None:
    def body() -> None:
        loss(
            DistributedDataParallel(mlp(), check_reduction=True, batched_grad_copy=True)(batch(1))
        ).backward()

    run("threads", 1, body)


def test_buffers_are_synchronised_at_construction_or_not_at_all() -> None:
    def body() -> list[float]:
        found = []
        for options in ({"broadcast_buffers": False}, {"forward_sync_buffers": False}, {}):
            model = Counts()
            model.count.fill_(dist.get_rank())
            wrapped = DistributedDataParallel(model, **options)
            assert wrapped.broadcast_buffers is (not options)
            found.append(model.count[0].item())
        return found

    assert run("threads", 2, body) == [[0, 0, 0], [1, 0, 0]]


# -- another group


def test_after_an_error_the_wrapper_goes_on_with_another_group() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp(), bucket_cap_mb=TINY_BUCKETS_MB)
        loss(wrapped(batch(1))).backward()
        handle = wrapped.module[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(wrapped(batch(1))).backward()
        handle.remove()
        pair = dist.new_group([0, 1])
        wrapped._update_process_group(pair)
        if dist.get_rank() < 2:
            wrapped.zero_grad()
            loss(wrapped(batch(1, seed=dist.get_rank()))).backward()
            mean = wrapped.module[0].weight.grad.clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=pair)
            torch.testing.assert_close(mean, wrapped.module[0].weight.grad)

    run("threads", 3, body)


def test_without_its_hooks_a_wrapper_has_no_part_in_backward() -> None:
    def body() -> int:
        model = mlp()
        first = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS_MB)
        handle = model[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(first(batch(1))).backward()
        handle.remove()
        first._remove_autograd_hooks()
        second = DistributedDataParallel(model)
        loss(second(batch(1))).backward()
        return second.statistics().steps

    assert run("threads", 2, body) == [1, 1]
