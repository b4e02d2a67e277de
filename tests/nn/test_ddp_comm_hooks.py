"""Communication hooks: when they are called, with what, and what becomes of what they return."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import MODELS, Branches, batch, expected_gradients, gradients, loss, mlp, seeded, share
from torch import nn

import torchestra as dist
from torchestra.errors import GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel import BuiltinCommHookType, DistributedDataParallel, GradBucket
from worlds import outcomes, run

VIEWS = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
TINY_BUCKETS_MB = 100 / 2**20
Future = torch.futures.Future


def average(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Return what happens without a hook, with a chained future."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


def in_a_new_tensor(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """The averages of float32 come in float64, in memory of their own."""
    sent = bucket.buffer().to(torch.complex128 if bucket.buffer().is_complex() else torch.float64)
    work = dist.all_reduce(sent, dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] + 0)


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def mine(samples: torch.Tensor) -> torch.Tensor:
    return share(samples, dist.get_rank(), dist.get_world_size())


@VIEWS
@pytest.mark.parametrize("hook", [average, in_a_new_tensor])
@pytest.mark.parametrize("name", MODELS)
def test_a_hook_that_averages_is_as_good_as_none(name: str, hook: Any, views: bool) -> None:
    model, samples = seeded(MODELS[name]), batch(2)
    dtype = next(model.parameters()).dtype

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=views, bucket_cap_mb=TINY_BUCKETS_MB
        )
        wrapped.register_comm_hook(None, hook)
        for _ in range(3):
            wrapped.zero_grad()
            loss(wrapped(mine(samples).to(dtype))).backward()
        return gradients(wrapped)

    expected = expected_gradients(model, samples, 2)
    for found in run("threads", 2, body):
        for tensor, reference in zip(found, expected, strict=True):
            if reference is None:
                assert tensor is None
                continue
            tolerance = 2e-2 if tensor.dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(tensor, reference, rtol=tolerance, atol=tolerance)


@VIEWS
def test_gradients_are_what_the_future_holds(views: bool) -> None:
    """Nothing is sent unless the hook does it."""

    def hook(state: list[int], bucket: GradBucket) -> Future[torch.Tensor]:
        state.append(bucket.index())
        future: Future[torch.Tensor] = Future()
        future.set_result(torch.zeros_like(bucket.buffer()))
        return future.then(lambda done: done.value() + 2).then(lambda done: done.value() * 3)

    def body() -> None:
        wrapped = DistributedDataParallel(mlp(), gradient_as_bucket_view=views)
        state: list[int] = []
        wrapped.register_comm_hook(state, hook)
        if dist.get_rank() == 0:
            wrapped(batch(1)).sum().backward()
            return
        wrapped(batch(1)).sum().backward()
        assert state == [0]
        for parameter in wrapped.parameters():
            assert bool((parameter.grad == 6).all())

    run("threads", 2, body)


def test_a_bucket_tells_what_is_in_it() -> None:
    seen: list[tuple[int, bool, list[torch.Size], int]] = []

    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        parameters = bucket.parameters()
        for gradient, parameter in zip(bucket.gradients(), parameters, strict=True):
            assert torch.equal(gradient, parameter.grad)
            assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
        shapes = [each.shape for each in parameters]
        assert bucket.buffer().dim() == 1
        seen.append((bucket.index(), bucket.is_last(), shapes, bucket.buffer().numel()))
        assert repr(bucket).startswith(f"<GradBucket {bucket.index()}")
        other = torch.ones_like(bucket.buffer())
        bucket.set_buffer(other)
        assert bucket.buffer() is other
        assert all(bool((gradient == 1).all()) for gradient in bucket.gradients())
        return done(bucket.buffer())

    def body() -> None:
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS_MB)
        wrapped.register_comm_hook(None, hook)
        wrapped(batch(1)).sum().backward()
        assert all(bool((each.grad == 1).all()) for each in model.parameters())

    run("threads", 1, body)
    shape = torch.Size([6, 6])
    assert seen == [(0, False, [shape], 36), (1, False, [shape], 36), (2, True, [shape], 36)]


def test_gradients_of_a_bucket_have_the_layout_of_their_parameters() -> None:
    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad)
        return done(bucket.buffer())

    def body() -> None:
        wrapped = DistributedDataParallel(MODELS["convolutions"]())
        wrapped.register_comm_hook(None, hook)
        loss(wrapped(batch(1))).backward()

    run("threads", 1, body)


@VIEWS
def test_hooks_and_unused_parameters(views: bool) -> None:
    model = seeded(Branches)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), find_unused_parameters=True, gradient_as_bucket_view=views
        )
        wrapped.register_comm_hook(None, average)
        for _ in range(2):
            wrapped.zero_grad()
            loss(wrapped(batch(1), dist.get_rank())).backward()
        return gradients(wrapped)

    found = run("threads", 2, body)
    for rank in (0, 1):
        loss(model(batch(1), rank)).backward()
    for each in found:
        torch.testing.assert_close(each[0], model.branches[0].weight.grad / 2)
        torch.testing.assert_close(each[2], model.branches[1].weight.grad / 2)
        assert each[4:] == [None, None]


class Annotated:
    """Hooks whose annotations are as they should be."""

    def method(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return done(bucket.buffer())

    @staticmethod
    def of_any_future(state: object, bucket: GradBucket) -> torch.futures.Future:
        return done(bucket.buffer())


@pytest.mark.parametrize(
    "hook", [average, Annotated().method, Annotated.of_any_future, lambda a, b: done(b.buffer())]
)
def test_hooks_of_the_right_form_are_taken(hook: Any) -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped.register_comm_hook(None, hook)
        loss(wrapped(batch(1))).backward()
        assert wrapped._get_ddp_logging_data()["comm_hook"] == hook.__qualname__

    run("threads", 1, body)


def takes_a_number(state: object, bucket: int) -> Future[torch.Tensor]:
    return Future()


def returns_a_number(state: object, bucket: GradBucket) -> int:
    return 1


def takes_no_bucket(state: object) -> Future[torch.Tensor]:
    return Future()


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (1, TypeError, r"Communication hook must be callable\."),
        (takes_a_number, ValueError, r"Communication hook: bucket annotation should be dist\.GradBucket\."),
        (
            returns_a_number,
            ValueError,
            r"Communication hook: return annotation should be torch\.futures\.Future\[torch\.Tensor\]\.",
        ),
        (takes_no_bucket, ValueError, "must take a state and a bucket"),
    ],
)
def test_hooks_of_another_form_are_refused_and_that_is_logged(
    hook: Any, error: type[Exception], message: str
) -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        with pytest.raises(error, match=message) as caught:
            wrapped.register_comm_hook(state=None, hook=hook)
        data = wrapped._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert str(caught.value) in data["error"]
        assert "comm_hook" not in data
        wrapped.register_comm_hook(None, average)

    run("threads", 1, body)


RETURNS: dict[str, tuple[Callable[[GradBucket], Any], str]] = {
    "no future": (lambda bucket: 1, r"must return a torch\.futures\.Future object, but got int"),
    "a list": (lambda bucket: done([bucket.buffer()]), r"must hold a tensor, got list; .*\.value\(\)\[0\]"),
    "too little": (lambda bucket: done(torch.ones(1)), "must hold 486 elements .*, got 1 with"),
    "sparse": (lambda bucket: done(bucket.buffer().to_sparse()), r"must hold .*, got 486 with torch\.sparse"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_what_a_hook_must_not_return(what: str) -> None:
    make, message = RETURNS[what]

    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped.register_comm_hook(None, lambda state, bucket: make(bucket))
        with pytest.raises(GradientReductionError, match=message):
            loss(wrapped(batch(1))).backward()

    run("threads", 1, body)


def raises_at_once(state: Any, bucket: GradBucket) -> Any:
    raise KeyError("in the hook")


def raises_later(state: Any, bucket: GradBucket) -> Any:
    future: Future[Any] = Future()
    future.set_exception(KeyError("in the hook"))
    return future


@pytest.mark.parametrize("hook", [raises_at_once, raises_later])
def test_what_a_hook_raises_comes_out_of_backward(hook: Any) -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped.register_comm_hook(None, hook)
        with pytest.raises(KeyError, match="in the hook"):
            loss(wrapped(batch(1))).backward()
        with pytest.raises(GradientReductionError):
            wrapped(batch(1))

    run("threads", 1, body)


def test_a_hook_whose_future_is_never_done_ends_with_the_groups_time() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped.register_comm_hook(None, lambda state, bucket: Future())
        with pytest.raises(dist.CollectiveTimeoutError, match="communication hook is not done after 0"):
            loss(wrapped(batch(1))).backward()

    run("threads", 1, body, timeout=0.2)


def test_a_peer_that_fails_in_its_hook_ends_the_others_wait() -> None:
    zero, one = outcomes("processes", 2, body_with_a_hook_that_fails_on_rank_1)
    assert isinstance(one.error, KeyError)
    assert isinstance(zero.error, dist.GroupAbortedError), "torch's own futures make a RuntimeError of it"
    assert "rank 1 left the reduction of gradients with KeyError" in zero.message


def body_with_a_hook_that_fails_on_rank_1() -> None:
    wrapped = DistributedDataParallel(mlp())
    wrapped.register_comm_hook(None, raises_at_once if dist.get_rank() else average)
    loss(wrapped(batch(1))).backward()


def test_there_is_one_hook_at_most() -> None:
    def body() -> None:
        message = r"register_comm_hook or register_builtin_comm_hook can only be called once\."
        for register in (
            lambda wrapped: wrapped.register_comm_hook(None, average),
            lambda wrapped: wrapped._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
        ):
            wrapped = DistributedDataParallel(mlp())
            register(wrapped)
            with pytest.raises(RuntimeError, match=message):
                wrapped.register_comm_hook(None, average)
            with pytest.raises(RuntimeError, match=message):
                wrapped._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
            loss(wrapped(batch(1))).backward()

    run("threads", 1, body)


def test_a_hook_is_not_registered_in_the_middle_of_a_reduction() -> None:
    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        wrapped.module[0].weight.register_post_accumulate_grad_hook(
            lambda _: wrapped.register_comm_hook(None, average)
        )
        with pytest.raises(GradientReductionError, match="should be registered before calling backward"):
            loss(wrapped(batch(1))).backward()

    run("threads", 1, body)


@VIEWS
@pytest.mark.parametrize("kind", BuiltinCommHookType)
def test_hooks_that_come_with_the_package(kind: BuiltinCommHookType, views: bool) -> None:
    model, samples = seeded(mlp), batch(2)

    def body() -> list[torch.Tensor | None]:
        wrapped = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=views)
        wrapped._register_builtin_comm_hook(kind)
        loss(wrapped(mine(samples))).backward()
        assert wrapped._get_ddp_logging_data()["comm_hook"] == str(kind)
        return gradients(wrapped)

    tolerance = 1e-5 if kind is BuiltinCommHookType.ALLREDUCE else 2e-3
    expected = expected_gradients(model, samples, 2)
    for found in run("threads", 2, body):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        exact = all(torch.equal(one, one.half().float()) for one in found)
        assert exact is (kind is BuiltinCommHookType.FP16_COMPRESS), "what was sent had 16 bits"


def test_another_kind_of_built_in_hook_is_refused() -> None:
    def body() -> None:
        with pytest.raises(InvalidArgumentError, match=r"must be a torchestra\.BuiltinCommHookType, got 0"):
            DistributedDataParallel(mlp())._register_builtin_comm_hook(0)

    run("threads", 1, body)
