"""SyncBatchNorm against BatchNorm on the batches of all ranks together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo  # what an optimizer imports when it is first made; here, so that ranks need not
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchestra as dist
from torchestra.nn import SyncBatchNorm
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.testing.faults import intercept
from worlds import KINDS, run

KIND_OF = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batches(counts: list[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Any]:
    """A batch for each rank, ``shape`` per sample; means differ between ranks and are not small."""
    generator = torch.Generator().manual_seed(sum(counts))
    return [
        (torch.randn(count, *shape, generator=generator, dtype=torch.float64) + 3 * rank + 10).to(dtype)
        for rank, count in enumerate(counts)
    ]


def reference_module(shape: tuple[int, ...], **options: Any) -> Any:
    module = KIND_OF[len(shape) + 1](shape[0], **options).double()
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, shape[0]))
            module.bias.copy_(torch.linspace(-1, 1, shape[0]))
    return module


def loss(output: torch.Tensor) -> torch.Tensor:
    """One whose gradient has nothing to do with the output being normalized."""
    return (output.sin() * output).sum()


def normalized(module: Any, batch: torch.Tensor) -> tuple[Any, ...]:
    """Return what comes out, the gradients of input and parameters, and the module's state afterwards."""
    batch = batch.detach().clone().requires_grad_()
    output = module(batch)
    loss(output).backward()
    parameters = [None if each is None else each.grad for each in (module.weight, module.bias)]
    return output.detach(), batch.grad, parameters, {k: v.clone() for k, v in module.state_dict().items()}


def check(kind: str, counts: list[int], shape: tuple[int, ...], options: dict[str, Any]) -> None:
    module = reference_module(shape, **options)
    everything = batches(counts, shape)
    expected = normalized(copy.deepcopy(module), torch.cat(everything))
    told = run(kind, len(counts), on_rank, module, everything)
    close = {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(torch.cat([output for output, *_ in told]), expected[0], **close)
    torch.testing.assert_close(torch.cat([grad for _, grad, *_ in told]), expected[1], **close)
    for index in range(2):
        parts = [parameters[index] for _, _, parameters, _ in told]
        if expected[2][index] is None:
            assert parts == [None] * len(counts)
        else:
            torch.testing.assert_close(sum(parts), expected[2][index], **close)
    for *_, state in told:
        torch.testing.assert_close(state, expected[3], **close)
        for name, value in state.items():
            assert torch.equal(value, told[0][3][name])


def on_rank(module: Any, everything: list[torch.Tensor]) -> tuple[Any, ...]:
    converted = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
    assert isinstance(converted, SyncBatchNorm)
    return normalized(converted, everything[dist.get_rank()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "counts", [[4, 4], [3, 1, 6], [0, 5, 2], [1, 1]], ids=["even", "uneven", "one empty", "one sample each"]
)
def test_as_if_the_batches_were_one(kind: str, counts: list[int]) -> None:
    check(kind, counts, (3, 4, 5), {})


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"track_running_stats": False},
        {"affine": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3,), (2, 5), (3, 4, 5), (2, 2, 3, 2)])
def test_every_option_and_dimension(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    check("threads", [3, 2], shape, options)


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(lambda counts: sum(counts) > 1),
    channels=st.integers(1, 4),
    extent=st.lists(st.integers(1, 3), max_size=3),
)
def test_any_shapes(counts: list[int], channels: int, extent: list[int]) -> None:
    check("threads", counts, (channels, *extent), {})


def test_averages_over_many_steps_then_evaluation() -> None:
    """Cumulative statistics, and evaluation by them without any communication."""
    shape = (3, 4)
    module = reference_module(shape, momentum=None)
    steps = [batches([2, 3], shape), batches([1, 0], shape), batches([4, 4], shape)]

    def body() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        converted = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))
        for everything in steps:
            converted(everything[dist.get_rank()])
        converted.eval()
        alone = converted(steps[0][0]) if dist.get_rank() == 0 else torch.empty(0)
        return converted.state_dict(), alone

    for everything in steps:
        module(torch.cat(everything))
    module.eval()
    for rank, (state, alone) in enumerate(run("threads", 2, body)):
        torch.testing.assert_close(state, module.state_dict(), atol=1e-12, rtol=1e-9)
        if rank == 0:
            torch.testing.assert_close(alone, module(steps[0][0]), atol=1e-12, rtol=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Rank 0's input is moved, one number after the other; the losses of both ranks are looked at."""
    everything = batches([2, 3], (2, 2))

    def body() -> tuple[torch.Tensor, list[float]]:
        module = SyncBatchNorm.convert_sync_batchnorm(reference_module((2, 2)))
        mine = everything[dist.get_rank()]
        gradient = normalized(module, mine)[1]
        slopes = []
        for index in range(everything[0].numel()):
            losses = []
            for step in (-1e-5, 1e-5):
                moved = mine.clone()
                if dist.get_rank() == 0:
                    moved.view(-1)[index] += step
                total = loss(module(moved)).detach()
                dist.all_reduce(total)
                losses.append(total.item())
            slopes.append((losses[1] - losses[0]) / 2e-5)
        return gradient, slopes

    (gradient, slopes), _ = run("threads", 2, body)
    torch.testing.assert_close(
        gradient.view(-1), torch.tensor(slopes, dtype=torch.float64), atol=1e-6, rtol=1e-6
    )


def test_small_variances_beside_large_means_do_not_cancel() -> None:
    def body() -> torch.Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return SyncBatchNorm(2)(torch.randn(64, 2, generator=generator) * 0.01 + 1000)

    output = torch.cat(run("threads", 2, body)).detach()
    torch.testing.assert_close(output.var(dim=0, correction=0), torch.full((2,), 0.909), atol=0.02, rtol=0)
    torch.testing.assert_close(output.mean(dim=0), torch.zeros(2), atol=2e-3, rtol=0)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_half_precision_inputs(parameters: torch.dtype) -> None:
    everything = batches([3, 2], (2, 4))
    expected = normalized(reference_module((2, 4)), torch.cat(everything))

    def body() -> tuple[Any, ...]:
        module = SyncBatchNorm.convert_sync_batchnorm(reference_module((2, 4)).to(parameters))
        return normalized(module, everything[dist.get_rank()].bfloat16())

    told = run("threads", 2, body)
    assert told[0][0].dtype == told[0][1].dtype == torch.bfloat16
    assert told[0][2][0].dtype == told[0][2][1].dtype == parameters
    outputs = torch.cat([output for output, *_ in told]).double()
    torch.testing.assert_close(outputs, expected[0], atol=0.1, rtol=0.05)


def test_channels_last_memory_stays_so() -> None:
    everything = [batch.to(memory_format=torch.channels_last) for batch in batches([2, 2], (3, 4, 5))]
    expected = normalized(reference_module((3, 4, 5)), torch.cat(everything))

    def body() -> tuple[Any, ...]:
        module = SyncBatchNorm.convert_sync_batchnorm(reference_module((3, 4, 5)))
        return normalized(module, everything[dist.get_rank()])

    told = run("threads", 2, body)
    assert told[0][0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(torch.cat([gradient for _, gradient, *_ in told]), expected[1])


def test_a_group_normalizes_by_itself() -> None:
    everything = batches([2, 3, 4], (2,))
    expected = normalized(reference_module((2,)), torch.cat(everything[1:]))[0]

    def body() -> torch.Tensor:
        group = dist.new_group([1, 2])
        module = SyncBatchNorm.convert_sync_batchnorm(reference_module((2,)), group)
        return normalized(module, everything[dist.get_rank()])[0]

    alone, *together = run("threads", 3, body)
    torch.testing.assert_close(torch.cat(together), expected)
    torch.testing.assert_close(alone, normalized(reference_module((2,)), everything[0])[0])


def test_without_a_group_it_is_an_ordinary_batchnorm() -> None:
    batch = batches([5], (2, 3))[0]
    ours, torchs = (
        normalized(each, batch)
        for each in (
            SyncBatchNorm.convert_sync_batchnorm(reference_module((2, 3))),
            reference_module((2, 3)),
        )
    )
    torch.testing.assert_close(ours, torchs, atol=0, rtol=0)


def test_empty_batches_everywhere_change_nothing() -> None:
    def body() -> tuple[list[int], float, int]:
        module = SyncBatchNorm(3)
        batch = torch.empty(0, 3, 2, requires_grad=True)
        output = module(batch)
        output.sum().backward()
        return list(batch.grad.shape), module.running_mean.sum().item(), module.num_batches_tracked.item()

    assert run("threads", 2, body) == [([0, 3, 2], 0, 0)] * 2


def test_two_collectives_per_step() -> None:
    """And one where no gradient of the input is wanted."""

    def body(wanted: bool) -> list[str]:
        communicator = dist.group.WORLD.communicator
        calls: list[str] = []
        intercept(communicator, calls.append, lambda _: None)
        SyncBatchNorm(3)(torch.randn(4, 3, requires_grad=wanted)).square().sum().backward()
        return calls

    assert run("threads", 2, body, True) == [["all_gather_into_tensor", "all_reduce"]] * 2
    assert run("threads", 2, body, False) == [["all_gather_into_tensor"]] * 2


def trained(samples: list[torch.Tensor], model: nn.Module, optimizer_of: Any) -> list[torch.Tensor]:
    optimizer = optimizer_of(model)
    for step in range(4):
        optimizer.zero_grad()
        output = model(torch.cat([batch + step for batch in samples]))
        output.square().mean(dim=(1, 2)).sum().backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


def network() -> nn.Module:
    layers = (nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Conv1d(3, 2, 1), nn.BatchNorm1d(2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*layers).double()


NETWORK = network()


def wrapped(everything: list[torch.Tensor], lr: float) -> list[torch.Tensor]:
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(NETWORK)))
    return trained(
        [everything[dist.get_rank()]], model, lambda each: torch.optim.SGD(each.parameters(), lr=lr)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 0, 2]], ids=["even", "one empty"])
def test_a_wrapped_model_trains_as_on_one_process(kind: str, counts: list[int]) -> None:
    """The loss is a sum, so the averaged gradient is the whole one divided by the number of ranks."""
    everything = batches(counts, (2, 5))
    expected = trained(
        everything, copy.deepcopy(NETWORK), lambda each: torch.optim.SGD(each.parameters(), lr=0.02 / 3)
    )
    for found in run(kind, 3, wrapped, everything, 0.02):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-7)


# -- conversion


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(4)
        self.first = nn.Sequential(nn.Linear(4, 4), shared)
        self.second = nn.Sequential(shared, nn.ModuleDict({"deep": nn.BatchNorm2d(3, affine=False)}))


def test_all_batchnorms_are_replaced_and_keep_what_they_have() -> None:
    model = Twice().eval()
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert {type(each) for each in model.modules()} & {nn.BatchNorm1d, nn.BatchNorm2d} == set()
    assert model.first[1] is model.second[0]
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(each is before[name] for name, each in model.named_parameters())
    torch.testing.assert_close(model.state_dict(), state)
    assert not any(each.training for each in model.modules())


def test_a_batchnorm_itself_is_replaced() -> None:
    module = nn.BatchNorm3d(5, eps=0.5, momentum=None, track_running_stats=False)
    converted = SyncBatchNorm.convert_sync_batchnorm(module)
    assert isinstance(converted, SyncBatchNorm)
    assert isinstance(converted, nn.SyncBatchNorm)
    assert (converted.eps, converted.momentum, converted.track_running_stats) == (0.5, None, False)
    assert converted.weight is module.weight


def test_torchs_own_is_replaced_too() -> None:
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.SyncBatchNorm(2))
    assert type(converted) is SyncBatchNorm


def test_what_is_refused() -> None:
    def body() -> None:
        with pytest.raises(
            ValueError, match=r"Expected more than 1 value per channel when training, got one"
        ):
            SyncBatchNorm(2)(torch.zeros(dist.get_rank(), 2))
        with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
            SyncBatchNorm(2)(torch.zeros(2))
        with pytest.raises(ValueError, match="number of input channels should be non-zero"):
            SyncBatchNorm(2)(torch.zeros(2, 0))
        with pytest.raises(ValueError, match=r"expected 2 channels, got input of shape \[2, 3\]"):
            SyncBatchNorm(2)(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="is not initialized yet"):
            SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())

    run("threads", 2, body)
