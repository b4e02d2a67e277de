"""The fake world: any rank of a world of any size, alone; nothing waits, and contents are as documented."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchestra as dist
import torchestra.functional as funcol
from torchestra.nn.parallel import DistributedDataParallel

RANK, SIZE = 2, 4


@pytest.fixture
def _fake() -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=SIZE, store=dist.FakeStore())
    yield
    dist.destroy_process_group()


fake = pytest.mark.usefixtures("_fake")


@fake
def test_what_a_rank_is_told() -> None:
    assert dist.get_rank() == RANK
    assert dist.get_world_size() == SIZE
    assert dist.get_backend() == "fake"
    pair, others = dist.new_group([0, RANK]), dist.new_group([0, 1])
    assert isinstance(pair, dist.ProcessGroup)
    assert pair.rank() == 1
    assert isinstance(others, dist.NonMember)


@fake
@pytest.mark.parametrize("async_op", [False, True])
def test_contents(async_op: bool) -> None:
    def done(work: dist.Work | None) -> None:
        assert (work is not None) == async_op
        if work is not None:
            assert work.is_completed()
            work.wait()

    mine = torch.tensor([1.0, 2.0])
    whole = torch.arange(8.0)
    tensor = mine.clone()
    for operation in (
        dist.all_reduce,
        lambda t, **k: dist.reduce(t, 0, **k),
        lambda t, **k: dist.broadcast(t, 0, **k),
    ):
        done(operation(tensor, async_op=async_op))
        assert torch.equal(tensor, mine)
    outputs = [torch.zeros(2) for _ in range(SIZE)]
    done(dist.all_gather(outputs, mine, async_op=async_op))
    assert all(torch.equal(output, mine) for output in outputs)
    output = torch.zeros(2 * SIZE)
    done(dist.all_gather_into_tensor(output, mine, async_op=async_op))
    assert torch.equal(output, mine.repeat(SIZE))
    done(dist.gather(mine, outputs := [torch.zeros(2) for _ in range(SIZE)], dst=RANK, async_op=async_op))
    assert all(torch.equal(output, mine) for output in outputs)
    done(dist.gather(mine, dst=0, async_op=async_op))
    done(dist.scatter(tensor, list(whole.chunk(SIZE)), src=RANK, async_op=async_op))
    assert torch.equal(tensor, whole.chunk(SIZE)[RANK])
    done(dist.scatter(tensor, src=0, async_op=async_op))
    assert torch.equal(tensor, whole.chunk(SIZE)[RANK])
    piece = torch.zeros(2)
    done(dist.reduce_scatter_tensor(piece, whole, async_op=async_op))
    assert torch.equal(piece, whole.chunk(SIZE)[RANK])
    done(dist.reduce_scatter(piece.zero_(), list(whole.chunk(SIZE)), async_op=async_op))
    assert torch.equal(piece, whole.chunk(SIZE)[RANK])
    output = torch.zeros(8)
    done(dist.all_to_all_single(output, whole, async_op=async_op))
    assert torch.equal(output, whole)
    done(dist.all_to_all_single(output, whole, [1, 1, 2, 4], [2, 2, 2, 2], async_op=async_op))
    assert output.tolist() == [0, 2, 4, 5, 6, 7, 0, 0]
    outputs = [torch.zeros(3) for _ in range(SIZE)]
    done(dist.all_to_all(outputs, list(whole.chunk(SIZE)), async_op=async_op))
    assert outputs[1].tolist() == [2, 3, 0]
    done(dist.barrier(async_op=async_op))


@fake
def test_messages() -> None:
    tensor = torch.ones(2)
    dist.send(tensor, 0)
    assert dist.recv(tensor, 0) == 0
    assert dist.recv(tensor) == RANK + 1
    sent, received = dist.isend(tensor, 1), dist.irecv(tensor, 1)
    assert sent is not None
    assert received is not None
    assert sent.is_completed()
    assert received.source_rank() == 1
    assert tensor.tolist() == [1, 1]


@fake
def test_bad_arguments_are_refused_as_ever() -> None:
    for call, message in (
        (lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2)), "output_tensor has 3 elements"),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(8)), "input has 8 elements"),
        (
            lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
            "one tensor for each of the group's 4 ranks",
        ),
        (
            lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX),
            "does not support ReduceOp.MAX on complex",
        ),
        (lambda: dist.scatter(torch.zeros(2), src=RANK), "must be specified on the source"),
        (lambda: dist.gather(torch.zeros(2), [torch.zeros(2)], dst=0), "must not be specified"),
        (lambda: dist.all_to_all_single(torch.zeros(8), torch.zeros(8), [8, 0, 0, 1]), "adds up to 9"),
        (lambda: dist.broadcast(torch.zeros(2), 7), "global rank 7 is not part of group"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"of type torch\.Tensor"):
        dist.all_reduce([1.0])  # type: ignore[arg-type]


def made_on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def made_fake(*shape: int) -> torch.Tensor:
    return FakeTensorMode().from_tensor(torch.empty(shape))


@fake
@pytest.mark.parametrize("make", [made_on_meta, made_fake])
def test_tensors_without_contents(make: Callable[..., torch.Tensor]) -> None:
    """For plans of shapes and memory."""
    tensor = make(2, 3)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    assert tensor.shape == (2, 3)


def test_plans_on_meta_tensors() -> None:
    dist.init_process_group("fake", rank=RANK, world_size=SIZE)
    try:
        tensor, wide = torch.empty(2, 3, device="meta"), torch.empty(8, 3, device="meta")
        dist.all_gather_into_tensor(wide, tensor)
        dist.reduce_scatter_tensor(tensor, wide)
        dist.all_to_all_single(wide, wide, [1, 2, 3, 2], [2, 2, 2, 2])
        gathered = funcol.all_gather_tensor(tensor, 1, dist.group.WORLD)  # type: ignore[arg-type]
        assert gathered.shape == (2, 12)
    finally:
        dist.destroy_process_group()


def test_a_world_of_a_million_ranks_costs_nothing() -> None:
    started = time.process_time()
    size, rank = 1 << 20, 777_777
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        mesh = dist.init_device_mesh("cpu", (1024, 1024), mesh_dim_names=("dp", "tp"))
        assert mesh.get_coordinate() == divmod(rank, 1024)
        dp, tp = mesh.get_all_groups()
        assert dp.ranks == range(rank % 1024, size, 1024)
        assert tp.ranks == range(rank // 1024 * 1024, (rank // 1024 + 1) * 1024)
        assert tp.to_group_rank(rank) == rank % 1024
        assert dp.to_global_rank(5) == 5 * 1024 + rank % 1024
        odd = dist.new_group(range(1, size, 2))
        assert isinstance(odd, dist.ProcessGroup)
        assert odd.rank() == rank // 2
        assert hash(mesh) == hash(dist.init_device_mesh("cpu", (1024, 1024), mesh_dim_names=("dp", "tp")))
        x = torch.rand(4)
        assert torch.equal(funcol.all_reduce(x, "sum", mesh["tp"]) + 0, x)
        assert make_fx(lambda t: funcol.all_gather_tensor(t, 0, mesh["tp"]), tracing_mode="fake")(x)(
            x
        ).shape == (4096,)
        assert mesh.flatten().get_group() is dist.group.WORLD
    finally:
        dist.destroy_process_group()
    # A list or table of all ranks takes a tenth of a second each; there would be a dozen of them.
    assert time.process_time() - started < 5


def test_a_program_may_be_traced_as_any_rank() -> None:
    shapes = []
    for rank in (0, 3):
        dist.init_process_group("fake", rank=rank, world_size=4)
        module = DistributedDataParallel(torch.nn.Linear(3, 2))
        module(torch.ones(1, 3)).sum().backward()
        gradient = module.module.weight.grad
        assert gradient is not None
        shapes.append(gradient.shape)
        dist.destroy_process_group()
    assert shapes == [(2, 3)] * 2


def test_rank_and_world_size_must_be_given() -> None:
    for arguments in ({}, {"rank": 0}, {"rank": 4, "world_size": 4}):
        with pytest.raises(ValueError, match="needs rank= and world_size="):
            dist.init_process_group("fake", **arguments)  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_a_fake_store_waits_for_nothing() -> None:
    store = dist.FakeStore()
    store.wait(["never"])
    assert store.check(["never"])
    assert store.get("never") == b""
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.multi_get(["key", "never"]) == [b"value", b""]
    assert store.add("count", 2) == 2
    assert store.queue_pop("queue") == b""
    store.queue_push("queue", "x")
    assert store.queue_pop("queue") == b"x"
    assert store.num_keys() == 2
    prefixed = dist.PrefixStore("a", store)
    assert prefixed.get("b") == b""
