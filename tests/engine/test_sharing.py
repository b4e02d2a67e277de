"""Tensors moved to where ranks share memory: the same objects, all of a storage together, or none."""

from __future__ import annotations

import copy
import gc
import io
import os
from collections.abc import Callable, Iterator

import pytest
import torch

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from torchestra.store import HashStore
from worlds import mapped_files, run


@pytest.fixture(autouse=True)
def before() -> Iterator[set[str]]:
    """A world of one rank, in the test's own process; given are the arenas that were there before it."""
    there = mapped_files()
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    yield there
    if dist.is_initialized():
        dist.destroy_process_group()


def is_shared(tensor: torch.Tensor) -> bool:
    return dist.group.WORLD.communicator.engine.is_in_heap(tensor.data_ptr())


def heap_is_empty() -> bool:
    heap = dist.group.WORLD.communicator.engine.context.heap
    gc.collect()
    heap.give(heap.take(1), 1)
    heap.take(heap._arena.layout.heap_bytes)  # raises unless all of it is free
    return True


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 7),
        lambda: torch.randn(5, 7).t(),
        lambda: torch.randn(40)[3:30:3],
        lambda: torch.arange(9, dtype=torch.uint8)[5:],
        lambda: torch.randn(3, 1).expand(3, 4),
        lambda: torch.tensor(3.0),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, dtype=torch.complex128),
        lambda: torch.randn(4, requires_grad=True),
        lambda: torch.randn(4, dtype=torch.float64).detach(),
        lambda: torch.nn.Parameter(torch.randn(4)),
    ],
)
def test_a_tensor_stays_the_same_object_with_the_same_elements(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    if tensor._base is not None:
        tensor = tensor.detach()
    values, strides, leaf = tensor.detach().clone(), tensor.stride(), tensor.is_leaf
    number, kind = id(tensor), type(tensor)
    assert dist.share_(tensor) is tensor
    assert is_shared(tensor)
    assert (id(tensor), type(tensor), tensor.stride(), tensor.is_leaf) == (number, kind, strides, leaf)
    assert torch.equal(tensor, values)
    address = tensor.data_ptr()
    assert dist.share_(tensor).data_ptr() == address


def test_empty_tensors_are_left_alone() -> None:
    assert dist.share_(torch.empty(0, 3)).shape == (0, 3)


def test_parameters_stay_what_optimizers_and_graphs_know() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, twin)]
    inputs = torch.randn(6, 3)
    for step in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(inputs).square().sum()
            if step == 1 and each is model:
                assert dist.share_module_(model) is model  # also while a graph refers to them
            loss.backward()
            optimizer.step()
    assert all(map(is_shared, [*model.parameters(), *model.buffers()]))
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_tied_weights_stay_tied_and_gradients_move() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["b"].bias = torch.nn.Parameter(model["a"].bias.detach()[1:])  # another object, of the same memory
    model["a"](torch.ones(3)).sum().backward()
    gradient = model["a"].weight.grad
    dist.share_module_(model)
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.grad is gradient
    assert is_shared(gradient)
    with torch.no_grad():
        model["a"].bias.fill_(5)
    assert model["b"].bias.tolist() == [5, 5]


def test_what_would_stay_behind_is_refused_and_nothing_is_moved() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = model.state_dict()
    with pytest.raises(InvalidArgumentError, match=r"`0\.weight` shares its memory .* \(1 more users"):
        dist.share_module_(model)
    assert not any(map(is_shared, model.parameters()))
    del state
    array = torch.zeros(4)
    held = array.numpy()
    conjugated = torch.randn(2, dtype=torch.complex64).conj()
    refused: list[tuple[torch.Tensor, str]] = [
        (model[0].weight[1:], "more users"),
        (array, "NumPy"),
        (torch.zeros(3).share_memory_(), "other processes"),
        (conjugated, "conjugated"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(3).to_sparse(), "sparse"),
        (torch.nn.parameter.UninitializedParameter(), "no shape yet"),
    ]
    for tensor, why in refused:
        with pytest.raises(InvalidArgumentError, match=f"^share_: `tensor` .*{why}"):
            dist.share_(tensor)
    assert held.sum() == 0
    model[1].register_buffer("array", array)
    with pytest.raises(InvalidArgumentError, match=r"`1\.array` is in memory"):
        dist.share_module_(model)
    assert not any(map(is_shared, model.parameters()))


def test_a_full_heap_moves_nothing_or_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = dist.group.WORLD.communicator.engine.context.heap
    everything = heap._arena.layout.heap_bytes
    heap.take(everything - 4096)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(40, 40))
    with pytest.raises(InvalidArgumentError, match="bytes are left"):
        dist.share_module_(model)
    assert not any(map(is_shared, model.parameters()))
    with pytest.warns(RuntimeWarning, match="ordinary memory") as told, dist.use_shared_allocator():
        large, small, _ = torch.ones(5000), torch.ones(10), torch.ones(6000)
    assert len(told) == 1
    assert not is_shared(large)
    assert is_shared(small)
    assert large.sum() == 5000


def test_the_allocator_serves_what_makes_tensors_in_its_context() -> None:
    with dist.use_shared_allocator():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm1d(4))
        made = [torch.empty(3), torch.ones(2, 2), torch.tensor([1, 2]), torch.arange(5), torch.eye(3)]
        made += [made[0].new_zeros(4), torch.rand_like(made[1]), torch.ones(2, requires_grad=True)]
        computed, given = made[1] + made[1], torch.ones(2, out=(out := torch.zeros(2)))
        elsewhere = torch.ones(2, device="meta")
    after = torch.ones(2)
    assert all(map(is_shared, [*model.parameters(), *model.buffers(), *made, given]))
    assert given is out
    assert made[1].tolist() == [[1, 1], [1, 1]]
    assert made[2].tolist() == [1, 2]
    assert made[-1].requires_grad
    assert made[-1].is_leaf
    assert not is_shared(computed)
    assert not is_shared(after)
    assert elsewhere.is_meta


def test_a_seed_gives_the_same_numbers_in_the_context() -> None:
    def values() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return list(torch.nn.Linear(7, 5).parameters())

    ordinary = values()
    with dist.use_shared_allocator():
        shared = values()
    assert all(map(torch.equal, ordinary, shared))


def test_memory_comes_back_and_outlives_the_group(before: set[str]) -> None:
    tensor = dist.share_(torch.arange(1000.0))
    view = tensor[10:]
    del tensor
    copies = [view.clone(), copy.deepcopy(view)]
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    copies.append(torch.load(file))
    assert not any(map(is_shared, copies))
    with pytest.raises(RuntimeError, match="resiz"):
        dist.share_(torch.zeros(2)).resize_(1000)
    dist.destroy_process_group()
    gc.collect()
    assert all(torch.equal(each, view) for each in copies)
    assert mapped_files() - before
    del view
    gc.collect()
    assert not mapped_files() - before


def test_nothing_is_left_of_what_is_dropped() -> None:
    model = dist.share_module_(torch.nn.Linear(30, 30))
    del model
    assert heap_is_empty()


def test_a_forked_process_sees_the_same_memory() -> None:
    tensor = dist.share_(torch.zeros(3))
    pid = os.fork()
    if pid == 0:
        tensor[1] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert tensor.tolist() == [0, 7, 0]


def reduce_moved() -> tuple[bool, list[float]]:
    tensor = dist.share_(torch.full((300_000,), float(dist.get_rank() + 1)))
    dist.all_reduce(tensor)
    group = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(InvalidArgumentError, match="share_: this rank is"):
            dist.share_(torch.zeros(3), group)
    return dist.group.WORLD.communicator.engine.is_in_heap(tensor.data_ptr()), tensor[::299_999].tolist()


def test_ranks_reduce_what_was_moved() -> None:
    assert run("processes", 2, reduce_moved) == [(True, [3.0, 3.0])] * 2


def test_a_fake_world_has_no_other_memory() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.FakeStore())
    tensor = torch.ones(3)
    assert dist.share_(tensor) is tensor
    with dist.use_shared_allocator():
        assert torch.ones(3).tolist() == [1, 1, 1]
