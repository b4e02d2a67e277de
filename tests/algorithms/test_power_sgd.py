"""PowerSGD: what it approximates, what it remembers, and what it sends."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from buckets import SHAPES, apply, bucket, gradients, identical, mean
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from torchestra.nn.parallel.comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torchestra.nn.parallel.comm_hooks.interface import GradBucket
from torchestra.nn.parallel.comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    orthogonalize,
    powerSGD_hook,
)
from worlds import KINDS, run

HOOKS = {"per matrix": powerSGD_hook, "batched": batched_powerSGD_hook}


def state(rank: int = 1, **options: Any) -> PowerSGDState:
    """A state whose first compressed step is the next."""
    made = PowerSGDState(None, rank, **{"start_powerSGD_iter": 2, "min_compression_rate": 0.01, **options})
    made.iter = made.start_powerSGD_iter
    return made


def steps(name: str, rank: int, count: int, options: dict[str, Any]) -> tuple[list[Any], Any, bool]:
    settings = state(rank, **options)
    found = [apply(HOOKS[name], settings, gradients(dist.get_rank(), step)) for step in range(count)]
    return found, settings.error_dict.get(0), identical(torch.stack(found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HOOKS)
def test_what_is_lost_in_a_step_comes_in_a_later_one(kind: str, name: str) -> None:
    """With error feedback, the sums over all steps differ by what the ranks still remember."""
    size, count = 3, 6
    told = run(kind, size, steps, name, 1, count, {})
    remembered = torch.stack([error for _, error, _ in told]).mean(dim=0)
    expected = sum(mean(size, step) for step in range(count))
    for found, _, alike in told:
        assert alike
        assert not torch.allclose(sum(found), expected, atol=1e-2)  # it does lose something
        torch.testing.assert_close(sum(found) + remembered, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_full_rank_nothing_is_lost(name: str, dtype: torch.dtype) -> None:
    def body() -> tuple[torch.Tensor, torch.Tensor]:
        settings = state(100)
        return apply(HOOKS[name], settings, gradients(dist.get_rank()).to(dtype)), settings.error_dict[0]

    for found, _ in run("threads", 2, body):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), mean(2), atol=1e-5, rtol=1e-4)


def test_a_mean_of_low_rank_is_exact() -> None:
    def body() -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        left, right = (torch.randn(n, 2, generator=generator) for n in (9, 8))
        return apply(powerSGD_hook, state(2), (left @ right.T).view(-1) * (dist.get_rank() + 1), [(9, 8)])

    first, second = run("threads", 2, body)
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(n, 2, generator=generator) for n in (9, 8))
    torch.testing.assert_close(first.view(9, 8), left @ right.T * 1.5, atol=1e-5, rtol=1e-4)
    assert torch.equal(first, second)


def test_a_warm_start_finds_the_best_approximation_in_a_few_steps() -> None:
    """Against the singular value decomposition, for a matrix that stays the same."""
    rank = 2

    def body(warm: bool) -> list[float]:
        settings = state(rank, use_error_feedback=False, warm_start=warm)
        full = mean(2, numel=20 * 12).view(20, 12)
        best = torch.linalg.svdvals(full)[rank:].norm().item()
        losses = []
        for _ in range(30):
            mine = gradients(dist.get_rank(), numel=20 * 12)
            found = apply(powerSGD_hook, settings, mine, [(20, 12)]).view(20, 12)
            losses.append((found - full).norm().item() / best)
        return losses

    warm, cold = run("threads", 2, body, True)[0], run("threads", 2, body, False)[0]
    assert warm[-1] == pytest.approx(1, abs=0.01)
    assert warm[-1] < warm[0]
    assert min(cold) > 1.01
    assert len(set(cold)) == len(cold)  # a new random start in every step


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_zero_gradients_stay_zero_and_do_not_stop_what_comes_after(name: str, rank: int) -> None:
    def body() -> tuple[float, torch.Tensor, torch.Tensor | None]:
        settings = state(rank)
        nothing = apply(HOOKS[name], settings, torch.zeros_like(gradients(0))).abs().max().item()
        total = sum(apply(HOOKS[name], settings, gradients(0)) for _ in range(40))
        return nothing, total, settings.error_dict[0]

    for nothing, total, error in run("threads", 2, body):
        assert nothing == 0
        assert total.isfinite().all()
        torch.testing.assert_close(total + error, 40 * gradients(0), atol=1e-3, rtol=1e-3)
        assert error.norm() < 0.7 * (40 * gradients(0)).norm()


def test_matrices_of_one_shape_may_be_multiplied_together() -> None:
    shapes = [(6, 5), (4, 5), (6, 5), (7,), (6, 5)]
    numel = sum(torch.Size(shape).numel() for shape in shapes)

    def body(together: bool) -> torch.Tensor:
        settings = state(9, batch_tensors_with_same_shape=together)
        return apply(powerSGD_hook, settings, gradients(dist.get_rank(), numel=numel), shapes)

    for together in (False, True):
        for found in run("threads", 2, body, together):
            torch.testing.assert_close(found, mean(2, numel=numel), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("wrapper", "precision"), [(fp16_compress_wrapper, 2**-9), (bf16_compress_wrapper, 2**-6)]
)
def test_in_half_precision(wrapper: Any, precision: float) -> None:
    def body() -> torch.Tensor:
        return apply(wrapper(powerSGD_hook), state(100), gradients(dist.get_rank()))

    for found in run("threads", 2, body):
        assert (found - mean(2)).abs().max() < 4 * precision * mean(2).abs().max()


def test_two_all_reduces_per_bucket_and_as_few_numbers_as_said() -> None:
    def body() -> tuple[list[int], tuple[float, int, int]]:
        settings = state(1, min_compression_rate=2)
        sent = []
        communicator = dist.group.WORLD.communicator
        general = communicator.all_reduce

        def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            sent.append(tensor.numel())
            return general(tensor, *args, **options)

        communicator.all_reduce = counting
        apply(powerSGD_hook, settings, gradients(0, numel=30 * 20 + 8), [(30, 20), (8,)])
        powerSGD_hook(settings, bucket(gradients(0, numel=8), [(8,)], index=1)).wait()
        return sent, settings.compression_stats()

    for sent, (rate, before, after) in run("threads", 2, body):
        assert sent == [30 + 8, 20, 8]
        assert (before, after) == (30 * 20 + 16, 30 + 20 + 16)
        assert rate == before / after


def test_the_first_steps_are_averaged_in_full() -> None:
    def body() -> list[torch.Tensor]:
        settings = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        return [apply(powerSGD_hook, settings, gradients(dist.get_rank(), step)) for step in range(3)]

    for found in run("threads", 2, body):
        for step in range(2):
            torch.testing.assert_close(found[step], mean(2, step))
        assert not torch.allclose(found[2], mean(2, 2))


def test_several_buckets_at_once_keep_the_order_of_operations() -> None:
    """The second all_reduce of a bucket comes before the first one of the next, on every rank."""

    def body() -> list[torch.Tensor]:
        settings = state(100)
        made = [bucket(gradients(dist.get_rank(), index), SHAPES, index, index == 3) for index in range(4)]
        futures = [powerSGD_hook(settings, each) for each in made]
        return [future.wait().clone() for future in futures]

    for found in run("threads", 3, body):
        for index, each in enumerate(found):
            torch.testing.assert_close(each, mean(3, index), atol=1e-5, rtol=1e-4)


class ChannelsLast(GradBucket):
    def gradients(self) -> list[torch.Tensor]:
        return [self.buffer().as_strided((4, 3, 2, 2), (12, 1, 6, 3))]


def test_strides_in_another_order() -> None:
    """The gradients of channels-last weights are matrices too."""

    def body() -> torch.Tensor:
        flat = gradients(dist.get_rank(), numel=4 * 3 * 2 * 2)
        return powerSGD_hook(state(100), ChannelsLast(0, flat, [torch.empty(4, 3, 2, 2)], True)).wait()

    for found in run("threads", 2, body):
        torch.testing.assert_close(found, mean(2, numel=48), atol=1e-5, rtol=1e-4)


def test_integers_are_averaged_in_full() -> None:
    def body() -> torch.Tensor:
        return apply(powerSGD_hook, state(), torch.full((12,), 2 * dist.get_rank()), [(4, 3)])

    assert all((found == 1).all() for found in run("threads", 2, body))


# -- the state


def test_a_state_is_pickled_without_its_group() -> None:
    def body() -> None:
        before = state(2, random_seed=3)
        apply(powerSGD_hook, before, gradients(dist.get_rank()))
        after = pickle.loads(pickle.dumps(before))
        assert after.process_group is dist.group.WORLD
        for slot in vars(before):
            if slot.endswith("_dict"):
                torch.testing.assert_close(getattr(after, slot), getattr(before, slot))
            elif slot not in ("process_group", "rng"):
                assert getattr(after, slot) == getattr(before, slot)
        assert after.rng.randint(1000) == before.rng.randint(1000)

    run("threads", 2, body)


@pytest.mark.parametrize("options", [{"use_error_feedback": False}, {"warm_start": False}, {}])
def test_what_is_remembered_must_not_begin_before_buckets_are_final(options: dict[str, bool]) -> None:
    for first in (0, 1):
        with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or"):
            PowerSGDState(None, start_powerSGD_iter=first, **options)
    PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        PowerSGDState(None, matrix_approximation_rank=0)


def test_a_state_serves_one_model() -> None:
    def body(feedback: bool) -> None:
        settings = state(use_error_feedback=feedback)
        apply(powerSGD_hook, settings, gradients(0, numel=8), [(8,)])
        with pytest.raises(ValueError, match="bucket 0 is not what it was when it was compressed before"):
            apply(powerSGD_hook, settings, gradients(0, numel=9), [(9,)])

    for feedback in (False, True):
        run("threads", 2, body, feedback)


# -- the mathematics


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    deficiency=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_columns_become_orthonormal_even_of_deficient_matrices(
    rows: int, columns: int, deficiency: int, dtype: torch.dtype, seed: int
) -> None:
    columns = min(rows, columns)
    rank = max(columns - deficiency, 0)
    generator = torch.Generator().manual_seed(seed)
    factors = (torch.randn(2, n, rank, generator=generator) for n in (rows, columns))
    matrices = next(factors) @ next(factors).transpose(1, 2)
    found = matrices.to(dtype)
    orthogonalize(found)
    tolerance = 16 * torch.finfo(dtype).eps
    identity = torch.eye(columns).expand(2, -1, -1)
    torch.testing.assert_close(
        (found.transpose(1, 2).double() @ found.double()).float(), identity, atol=tolerance, rtol=0
    )
    if dtype is torch.float64:
        precise = found.float()
        torch.testing.assert_close(
            precise @ (precise.transpose(1, 2) @ matrices), matrices, atol=1e-4, rtol=1e-4
        )
