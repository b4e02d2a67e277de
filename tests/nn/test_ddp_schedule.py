"""When communication happens, and how much of it: read from what the group is asked to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Backwards, Branches, batch, convolutions, loss, mlp
from torch import nn

import torchestra as dist
from torchestra.communicator.communicator import Communicator
from torchestra.nn.parallel import DistributedDataParallel, bucket_reducer, reducer
from worlds import run

TINY_BUCKETS_MB = 100 / 2**20


class Recorder:
    """Stands for a communicator, and writes down what it is asked to do."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.events: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp, async_op: bool = False) -> dist.Work | None:
        self.events.append(f"all_reduce {op.name} {tensor.numel()}{' async' if async_op else ''}")
        return self._communicator.all_reduce(tensor, op, async_op)

    def all_reduce_list(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp, async_op: bool = False
    ) -> dist.Work | None:
        total = sum(tensor.numel() for tensor in tensors)
        self.events.append(f"all_reduce {op.name} {total}{' async' if async_op else ''}")
        return self._communicator.all_reduce_list(tensors, op, async_op)

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work | None:
        self.events.append(f"broadcast {str(tensor.dtype)[6:]}")
        return self._communicator.broadcast(tensor, root)


def record() -> list[str]:
    """From here on, what the default group of this rank is asked to do."""
    recorder = Recorder(dist.group.WORLD.communicator)
    dist.group.WORLD.communicator = recorder
    return recorder.events


def note_gradients(model: nn.Module, events: list[str]) -> None:
    """Write down when each gradient is computed, before the parameter has it."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(f"gradient {name}"))


@pytest.fixture(params=[1, 0], ids=["cores to spare", "no core to spare"])
def spare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many cores are left for reductions beside backward."""
    monkeypatch.setattr(reducer, "spare_cores", lambda ranks: request.param)
    return request.param


def test_buckets_are_reduced_while_backward_goes_on_if_there_is_a_core_for_it(spare: int) -> None:
    """Each bucket of 3 layers' gradients is on its way before the next layer's are computed.

    Without a core, all are reduced when backward has ended. After the first step the ranks agree on the order
    in which gradients have come.
    """

    def body() -> list[str]:
        events = record()
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS_MB / 10)
        note_gradients(model, events)
        events.clear()
        for _ in range(2):
            wrapped(torch.ones(2, 4)).sum().backward()
        return events

    gradients = [f"gradient {layer}.weight" for layer in (2, 1, 0)]
    reduced, beside = "all_reduce AVG 16", "all_reduce AVG 16 async"
    step = (
        [gradients[0], beside, gradients[1], beside, gradients[2], reduced]
        if spare
        else [*gradients, reduced, reduced, reduced]
    )
    assert run("threads", 2, body) == [[*step, "broadcast int64", *step]] * 2


def test_a_large_last_bucket_does_not_wait_for_the_end_of_backward(
    monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    monkeypatch.setattr(bucket_reducer, "_INLINE_BYTES", 63)

    def body() -> list[str]:
        events = record()
        model = nn.Linear(4, 4, bias=False)
        wrapped = DistributedDataParallel(model)
        note_gradients(model, events)
        events.clear()
        first = nn.Parameter(torch.ones(2, 4))
        first.register_hook(lambda _: events.append("gradient before the model"))
        wrapped(first * 1).sum().backward()
        assert events.pop() == "broadcast int64"
        return events

    expected = ["gradient weight", f"all_reduce AVG 16{' async' * spare}", "gradient before the model"]
    assert [sorted(events) for events in run("threads", 2, body)] == [sorted(expected)] * 2


def test_ranks_with_and_without_cores_to_spare_call_the_same_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dense and sparse buckets, and parameters that are not used."""
    monkeypatch.setattr(reducer, "spare_cores", lambda ranks: dist.get_rank())

    def body() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Mixed()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS_MB, find_unused_parameters=True)
        for step in range(3):
            wrapped.zero_grad()
            wrapped(torch.tensor([dist.get_rank(), step]), both=step != 1).sum().backward()
        return [each.grad.to_dense() for each in model.parameters()]

    one, other = run("threads", 2, body)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


class Mixed(nn.Module):
    """A sparse embedding between dense layers, one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, words: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.layers[0](self.words(words))
        return self.layers[2](self.layers[1](hidden) if both else hidden)


def test_buckets_start_in_their_order_and_after_the_first_step_it_is_the_gradients_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's gradients come in the reverse of the order that its registration promises."""
    monkeypatch.setattr(reducer, "spare_cores", lambda ranks: 1)

    def body() -> list[str]:
        events = record()
        model = Backwards()
        model.layers[0] = nn.Linear(6, 6, bias=False)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=TINY_BUCKETS_MB)
        note_gradients(model, events)
        events.clear()
        for _ in range(2):
            loss(wrapped(torch.ones(2, 6))).backward()
            events.append("step")
        return [event for event in events if "bias" not in event]

    for events in run("threads", 2, body):
        end = events.index("step")
        first, second = events[:end], events[end + 1 : -1]
        gradients = [f"gradient layers.{layer}.weight" for layer in range(4)]
        assert first[:3] == gradients[:3], "no bucket can start before the last layer's gradients are there"
        assert second[0] == gradients[0]
        assert second[1].startswith("all_reduce AVG 36"), "the layer without a bias is a bucket"
        assert second[2] == gradients[1]


@pytest.mark.parametrize(
    ("make", "expected"),
    [(mlp, ["float32"]), (convolutions, ["float32", "int64"]), (lambda: mlp().double(), ["float64"])],
    ids=["parameters", "buffers", "double"],
)
def test_the_state_travels_in_one_broadcast_per_dtype(
    make: Callable[[], nn.Module], expected: list[str]
) -> None:
    def body() -> list[str]:
        events = record()
        DistributedDataParallel(make())
        return events

    assert run("threads", 2, body) == [[f"broadcast {dtype}" for dtype in expected]] * 2


def test_nothing_is_sent_without_sync_of_the_state() -> None:
    def body() -> list[str]:
        events = record()
        DistributedDataParallel(mlp(), init_sync=False)
        return events

    assert run("threads", 2, body) == [[], []]


def ways_not_to_reduce(wrapped: DistributedDataParallel) -> None:
    samples = torch.ones(4, 6)
    with torch.no_grad():
        wrapped(samples)
    with torch.inference_mode():
        wrapped(samples)
    wrapped.eval()
    with torch.no_grad():
        wrapped(samples)
    wrapped.train()
    with wrapped.no_sync():
        loss(wrapped(samples)).backward()
    loss(wrapped.module(samples)).backward()
    wrapped(samples)  # and no backward


def test_evaluation_no_sync_and_the_bare_module_send_nothing() -> None:
    """Also after a step that was reduced."""

    def body() -> list[str]:
        events = record()
        wrapped = DistributedDataParallel(mlp())
        events.clear()
        with torch.no_grad():
            wrapped(torch.ones(4, 6))
        loss(wrapped.module(torch.ones(4, 6))).backward()
        loss(wrapped(torch.ones(4, 6))).backward()
        assert events == ["all_reduce AVG 486", "broadcast int64"]
        events.clear()
        ways_not_to_reduce(wrapped)
        return events

    assert run("threads", 2, body) == [[], []]


def test_finding_unused_parameters_costs_one_small_all_reduce() -> None:
    def body() -> list[str]:
        events = record()
        wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True)
        events.clear()
        loss(wrapped(torch.ones(4, 6), 0, 1)).backward()
        return events

    assert run("threads", 2, body) == [["all_reduce AVG 126", "all_reduce SUM 6"]] * 2


def test_gradients_in_the_memory_that_ranks_share_are_reduced_where_they_are() -> None:
    """With gradient_as_bucket_view, and gradients set to zero rather than None, none is ever copied."""

    def body() -> bool:
        wrapped = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
        loss(wrapped(torch.ones(4, 6))).backward()
        places = [each.grad.data_ptr() for each in wrapped.parameters()]
        wrapped.zero_grad(set_to_none=False)
        loss(wrapped(torch.ones(4, 6))).backward()
        heap = dist.group.WORLD.communicator.engine.context.heap
        assert [each.grad.data_ptr() for each in wrapped.parameters()] == places
        return all(heap.first_address <= place < heap.last_address for place in places)

    assert run("threads", 2, body) == [True, True]


def test_copies_of_gradients_are_the_programs_own() -> None:
    """Without gradient_as_bucket_view, a gradient that is kept is not overwritten by the next step."""

    def body() -> None:
        wrapped = DistributedDataParallel(mlp())
        loss(wrapped(batch(1))).backward()
        kept = [each.grad for each in wrapped.parameters()]
        before = copy.deepcopy(kept)
        wrapped.zero_grad()
        loss(wrapped(batch(1, seed=1))).backward()
        assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))

    run("threads", 2, body)
