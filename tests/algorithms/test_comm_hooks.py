"""The ready-made communication hooks that average in full, in halves, in bytes, and among some ranks."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch
from buckets import apply, bucket, gradients, identical, mean
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from torchestra.nn.parallel.comm_hooks.debugging_hooks import noop_hook
from torchestra.nn.parallel.comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torchestra.nn.parallel.comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torchestra.nn.parallel.comm_hooks.quantization_hooks import (
    dequantize,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantize,
)
from worlds import KINDS, run

ROUNDINGS = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
HOOKS = {
    "allreduce": (allreduce_hook, torch.float32),
    "fp16": (fp16_compress_hook, torch.float16),
    "bf16": (bf16_compress_hook, torch.bfloat16),
    "fp16 around allreduce": (fp16_compress_wrapper(allreduce_hook), torch.float16),
    "bf16 around allreduce": (bf16_compress_wrapper(allreduce_hook), torch.bfloat16),
    "per tensor": (quantization_pertensor_hook, None),
    "per channel": (quantization_perchannel_hook, None),
}


def averaged(name: str, with_group: bool) -> tuple[torch.Tensor, bool]:
    group = dist.new_group() if with_group else None
    found = apply(HOOKS[name][0], group, gradients(dist.get_rank()))
    return found, identical(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_averages_to_its_precision_and_alike_on_all_ranks(kind: str, name: str) -> None:
    size = 3
    expected = mean(size)
    dtype = HOOKS[name][1]
    if dtype is None:
        ranges = [(each.max() - each.min()).item() for each in map(gradients, range(size))]
        allowed = max(ranges) / 510 * 1.001
    else:
        largest = max(each.abs().max().item() for each in map(gradients, range(size)))
        allowed = 2 * ROUNDINGS[dtype] * largest
    for found, alike in run(kind, size, averaged, name, kind == "threads"):
        assert alike
        assert (found - expected).abs().max() <= allowed


def test_half_precision_is_added_up_in_single() -> None:
    """The sum of the ranks' gradients would not be a number in float16; their average is."""

    def body(hook: Any) -> float:
        return apply(hook, None, torch.full((8,), 6e4), [(8,)])[0].item()

    for hook in (fp16_compress_hook, fp16_compress_wrapper(allreduce_hook)):
        assert run("threads", 4, body, hook) == [pytest.approx(6e4, rel=1e-3)] * 4


def test_what_float16_cannot_hold_becomes_infinite_and_bfloat16_can() -> None:
    def body() -> list[float]:
        return [apply(hook, None, torch.full((4,), 1e5), [(4,)])[0].item() for hook in halves]

    halves = (fp16_compress_hook, bf16_compress_hook)
    assert run("threads", 2, body) == [[float("inf"), pytest.approx(1e5, rel=2**-7)]] * 2


def test_without_communication_each_rank_keeps_its_own() -> None:
    def body() -> bool:
        mine = gradients(dist.get_rank())
        return torch.equal(apply(noop_hook, None, mine.clone()), mine)

    assert run("threads", 2, body) == [True, True]


def test_a_wrapped_hook_sees_half_precision_and_the_bucket_is_as_before_afterwards() -> None:
    def body() -> None:
        seen = []

        def look(state: Any, halved: Any) -> Any:
            seen.append(halved.buffer().dtype)
            seen.extend(gradient.dtype for gradient in halved.gradients())
            return allreduce_hook(state, halved)

        flat = torch.ones(6)
        made = bucket(flat, [(2, 3)])
        result = bf16_compress_wrapper(look)(None, made).wait()
        assert seen == [torch.bfloat16, torch.bfloat16]
        assert result is flat
        assert made.buffer() is flat

    run("threads", 2, body)


# -- quantization


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
    channel=st.integers(1, 50),
)
def test_quantized_numbers_are_off_by_half_a_step_at_most(numbers: list[float], channel: int) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    found = dequantize(quantize(tensor, channel), len(numbers), channel).double()
    assert torch.equal(found[tensor == 0], torch.zeros(int((tensor == 0).sum()), dtype=torch.float64))
    for part, back in zip(tensor.double().split(channel), found.split(channel), strict=True):
        if part.numel():
            step = (part.max().clamp_min(0) - part.min().clamp_max(0)) / 255
            # Denormal numbers have fewer bits, so that the step itself is rounded.
            assert (part - back).abs().max() <= 0.5001 * step + 2**-140


def test_what_is_not_finite_stays_visible() -> None:
    for bad in (float("nan"), float("inf")):
        tensor = torch.tensor([1.0, bad, 2.0, 3.0])
        found = dequantize(quantize(tensor, 2), 4, 2)
        assert not found[:2].isfinite().any()
        assert torch.allclose(found[2:], tensor[2:], atol=0.01)


def test_small_gradients_survive_beside_large_ones_in_another_channel() -> None:
    def body() -> tuple[float, float]:
        flat = torch.cat([torch.full((512,), 1e-3), torch.full((512,), 1e3)])
        per_tensor = apply(quantization_pertensor_hook, None, flat.clone(), [(1024,)])
        per_channel = apply(quantization_perchannel_hook, None, flat.clone(), [(1024,)])
        return per_tensor[0].item(), per_channel[0].item()

    for per_tensor, per_channel in run("threads", 2, body):
        assert per_tensor == 0
        assert per_channel == pytest.approx(1e-3, rel=1e-3)


# -- post-local SGD


def local_steps(subgroups: bool | None, locally: bool) -> list[float]:
    """The averages of the ranks' numbers in three steps, the last two of them local."""
    subgroup = None
    if subgroups:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        subgroup = groups[dist.get_rank() // 2]
    state = PostLocalSGDState(None, subgroup, 1, post_local_gradient_allreduce=locally)
    found = []
    for _ in range(3):
        flat = torch.full((4,), float(dist.get_rank()))
        found.append(apply(post_localSGD_hook, state, flat, [(4,)])[0].item())
    assert state.iter == 1
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_averaged_by_all_then_by_the_subgroup(kind: str) -> None:
    assert run(kind, 4, local_steps, True, True) == [[1.5, 0.5, 0.5]] * 2 + [[1.5, 2.5, 2.5]] * 2


def test_or_from_then_on_not_at_all() -> None:
    assert run("threads", 4, local_steps, None, False) == [[1.5, rank, rank] for rank in range(4)]


def test_the_subgroup_is_by_default_that_of_the_host() -> None:
    assert run("processes", 2, local_steps, None, True) == [[0.5, 0.5, 0.5]] * 2


def test_a_step_counts_once_however_many_buckets_it_has() -> None:
    state = PostLocalSGDState(None, None, 10)
    for is_last in (False, False, True):
        state.maybe_increase_iter(bucket(torch.zeros(1), [(1,)], is_last=is_last))
    assert state.iter == 1


@pytest.mark.parametrize(
    "name", ["", ".default_hooks", ".powerSGD_hook", ".post_localSGD_hook", ".ddp_zero_hook"]
)
def test_modules_have_an_alias_in_the_place_that_torch_has_for_them(name: str) -> None:
    alias = importlib.import_module(f"torchestra.algorithms.ddp_comm_hooks{name}")
    assert alias is importlib.import_module(f"torchestra.nn.parallel.comm_hooks{name}")


def test_a_state_that_was_pickled_by_the_alias_can_be_read() -> None:
    state = PostLocalSGDState(None, None, 7)
    pickled = pickle.dumps(state, protocol=2)
    renamed = pickled.replace(b"torchestra.nn.parallel.comm_hooks", b"torchestra.algorithms.ddp_comm_hooks")
    assert renamed != pickled
    assert pickle.loads(renamed).start_localSGD_iter == 7
