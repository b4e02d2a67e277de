"""Sharded tensors: put together of the ranks' shards, kept in modules, gathered."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torchestra as dist
from torchestra.errors import InvalidArgumentError, UnsupportedArgumentError
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.sharded import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    init_from_local_shards,
)
from worlds import KINDS, outcomes, run

WHOLE = torch.arange(60.0).view(6, 10)


def halves(rank: int, requires_grad: bool = False) -> list[Shard]:
    """Rows for each of two ranks."""
    tensor = WHOLE[3 * rank : 3 * rank + 3].clone().requires_grad_(requires_grad)
    return [Shard(tensor, ShardMetadata([3 * rank, 0], [3, 10], f"rank:{rank}/cpu"))]


def quarters(rank: int) -> list[Shard]:
    """Two pieces for each of two ranks, not in the order of the ranks."""
    return [
        Shard.from_tensor_and_offsets(WHOLE[row : row + 3, column : column + 5].clone(), [row, column], rank)
        for row, column in ((3 - 3 * rank, 0), (3 * rank, 5))
    ]


def gathered(name: str, dst: int) -> Any:
    sharded = init_from_local_shards({"halves": halves, "quarters": quarters}[name](dist.get_rank()), 6, 10)
    assert isinstance(sharded, ShardedTensor)
    assert sharded.shape == (6, 10)
    assert sharded.dtype == torch.float32
    assert len(sharded.metadata().shards_metadata) == (2 if name == "halves" else 4)
    out = torch.zeros(6, 10) if dist.get_rank() == dst else None
    sharded.gather(dst, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["halves", "quarters"])
@pytest.mark.parametrize("dst", [0, 1])
def test_the_parts_make_up_the_whole(kind: str, name: str, dst: int) -> None:
    told = run(kind, 2, gathered, name, dst)
    assert torch.equal(told[dst], WHOLE)
    assert told[1 - dst] is None


def test_the_size_may_be_a_list_and_the_group_some_ranks() -> None:
    def body() -> Any:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="this rank is <no member"):
                init_from_local_shards(halves(0), [6, 10], process_group=group)
            return None
        sharded = init_from_local_shards(halves(group.rank()), [6, 10], process_group=group)
        out = torch.zeros(6, 10) if group.rank() == 0 else None
        sharded.gather(0, out)
        return out

    assert torch.equal(run("threads", 3, body)[1], WHOLE)


class WithTable(nn.Module):
    """An ordinary layer beside a parameter that lies on several ranks."""

    def __init__(self, table: ShardedTensor, as_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)
        nn.init.ones_(self.layer.weight)
        if as_buffer:
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).softmax(dim=1)[:, :2]


def wrapped(as_buffer: bool, told: bool, options: dict[str, bool]) -> tuple[list[float], str]:
    module = WithTable(init_from_local_shards(halves(dist.get_rank()), 6, 10), as_buffer)
    if told:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, {"table"})
    model = DistributedDataParallel(module, **options)
    for step in range(2):
        model.zero_grad()
        samples = torch.full((2, 4), 1.0 + dist.get_rank()) * torch.arange(4.0)
        (model(samples) * torch.tensor([1.0, 2.0]) * (1 + dist.get_rank() + step)).sum().backward()
    assert isinstance(module.table, ShardedTensor)
    if not as_buffer:
        assert isinstance(module.table, nn.Parameter)
        assert module.table.grad is None
    return module.layer.weight.grad.view(-1).tolist(), type(module.table).__name__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_a_wrapped_module_keeps_it_to_itself(kind: str, as_buffer: bool, told: bool) -> None:
    first, second = run(kind, 2, wrapped, as_buffer, told, {})
    assert first == second
    assert any(first[0])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_with_every_kind_of_wrapper(options: dict[str, bool]) -> None:
    first, second = run("threads", 2, wrapped, False, False, options)
    assert first == second


def test_it_can_be_detached_and_cloned_and_nothing_else() -> None:
    def body() -> None:
        sharded = init_from_local_shards(halves(dist.get_rank(), requires_grad=True), 6, 10)
        assert sharded.requires_grad
        detached = sharded.detach()
        assert isinstance(detached, ShardedTensor)
        assert not detached.requires_grad
        assert detached.local_tensor().data_ptr() == sharded.local_tensor().data_ptr()
        cloned = detached.clone()
        assert cloned.local_tensor().data_ptr() != sharded.local_tensor().data_ptr()
        assert torch.equal(cloned.local_tensor(), sharded.local_tensor())
        assert repr(cloned).startswith("<ShardedTensor of size (6, 10), dtype torch.float32")
        with pytest.raises(TypeError, match=r"torch function '.*add.*' is not supported for ShardedTensor"):
            torch.add(sharded, 1)
        several = init_from_local_shards(quarters(dist.get_rank()), 6, 10)
        with pytest.raises(ValueError, match="Only single local shard is supported, and this rank has 2"):
            several.local_tensor()

    run("threads", 2, body)


# -- what is refused

META = ShardMetadata


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([0], [1, 2]), "should have the same number of elements, found 1 and 2"),
        (([-1], [1]), "shard_offsets should be >=0"),
        (([0], [-1]), "shard_sizes should be >=0"),
        (([0], [1], "cpu"), "placement must be of the form 'rank:<rank>/<device>', got 'cpu'"),
    ],
)
def test_metadata_that_make_no_sense(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardMetadata(*arguments)


def test_metadata_are_values() -> None:
    first, second = (META([0, 3], [2, 2], "rank:1/cpu") for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != META([0, 3], [2, 2], "rank:0/cpu")
    assert (first.placement.rank(), str(first.placement.device())) == (1, "cpu")
    assert copy.deepcopy(first) == first


def test_shards_that_are_not_what_they_say() -> None:
    with pytest.raises(ValueError, match="Shard tensor size does not match with metadata"):
        Shard(torch.zeros(3), META([0], [2]))
    with pytest.raises(
        ValueError, match="Local shard tensor device does not match with local Shard's placement"
    ):
        Shard(torch.zeros(2), META([0], [2], "rank:0/meta"))


def shards(
    *parts: tuple[int, int], dtype: torch.dtype = torch.float32, rank: int | None = None
) -> list[Shard]:
    """Parts of a vector, each from where to where."""
    where = dist.get_rank() if rank is None else rank
    return [
        Shard.from_tensor_and_offsets(torch.zeros(end - begin, dtype=dtype), [begin], where)
        for begin, end in parts
    ]


WRONG: dict[str, tuple[Any, str]] = {
    "no shards": (lambda rank: ([] if rank else shards((0, 4)), 4), "rank 1: must have local shards!"),
    "another's": (
        lambda rank: (shards((2 * rank, 2 * rank + 2), rank=0), 4),
        "rank 1: Local shard metadata's",
    ),
    "two dtypes": (
        lambda rank: (shards((0, 1)) + shards((1, 2), dtype=torch.int64) if rank else shards((2, 4)), 4),
        "rank 1: Local shards' tensor dtype property need to be the same on rank:1!",
    ),
    "dtypes by rank": (
        lambda rank: (shards((2 * rank, 2 * rank + 2), dtype=(torch.float32, torch.float64)[rank]), 4),
        "ShardedTensor dtype property does not match from different ranks!",
    ),
    "sizes by rank": (
        lambda rank: (shards((2 * rank, 2 * rank + 2)), 4 + rank),
        "ShardedTensor size property does not match from different ranks!",
    ),
    "overlap": (lambda rank: (shards((rank, rank + 3)), 4), "overlap"),
    "a gap": (lambda rank: (shards((3 * rank, 3 * rank + 2)), 5), "Total volume of shards: 4 does not match"),
    "too long": (lambda rank: (shards((2 * rank, 2 * rank + 2)), 3), "exceeds tensor dim"),
    "no size": (lambda rank: (shards((2 * rank, 2 * rank + 2)), "4"), "rank 0: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shards_are_an_error_on_every_rank(name: str) -> None:
    make, text = WRONG[name]

    def body() -> None:
        local, size = make(dist.get_rank())
        init_from_local_shards(local, size)

    for outcome in outcomes("threads", 2, body):
        assert isinstance(outcome.error, ValueError)
        assert text in outcome.message


def test_where_to_gather_must_be_told_on_one_rank() -> None:
    def body() -> None:
        sharded = init_from_local_shards(halves(dist.get_rank()), 6, 10)
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="must be specified on destination rank 0"):
                sharded.gather(0)
            with pytest.raises(ValueError, match=r"have size \(5,\), but should be \(6, 10\)"):
                sharded.gather(0, torch.zeros(5))
        else:
            with pytest.raises(ValueError, match="must NOT be specified on non-destination ranks"):
                sharded.gather(0, torch.zeros(6, 10))
        with pytest.raises(ValueError, match="remote references to shards are not served"):
            init_from_local_shards([], 6, 10, init_rrefs=True)

    run("threads", 2, body)


def from_everybodys_metadata() -> None:
    """By torch's private names: with a collective, and without when the metadata are known."""
    rank = dist.get_rank()
    first = ShardedTensor._init_from_local_shards(halves(rank), 6, 10)
    again = ShardedTensor._init_from_local_shards_and_global_metadata(halves(rank), first.metadata())
    out = torch.zeros(6, 10) if rank == 0 else None
    again.gather(0, out)
    assert out is None or torch.equal(out, WHOLE)
    with pytest.raises(InvalidArgumentError, match="the metadata place"):
        ShardedTensor._init_from_local_shards_and_global_metadata(quarters(rank), first.metadata())
    with pytest.raises(InvalidArgumentError, match="the metadata place"):
        ShardedTensor._init_from_local_shards_and_global_metadata([], first.metadata())


def test_torchs_private_makers() -> None:
    run("threads", 2, from_everybodys_metadata)


class Backwards(ShardingSpec):
    """Divides the first dimension, the last rank first: a rule of a program's own."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: Any) -> ShardedTensorMetadata:
        return ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]).build_metadata(
            tensor_sizes, tensor_properties
        )


def by_a_rule_of_its_own() -> Any:
    rank = dist.get_rank()
    local = WHOLE[3 * (1 - rank) : 3 * (1 - rank) + 3].clone()
    sharded = ShardedTensor._init_from_local_tensor(local, Backwards(), 6, 10)
    out = torch.zeros(6, 10) if rank == 0 else None
    sharded.gather(0, out)
    with pytest.raises(NotImplementedError, match="rank 1 must have one shard") if rank else nullcontext():
        ShardedTensor._init_from_local_tensor(local, ChunkShardingSpec(0, ["rank:0/cpu"]), 3, 10)
    with pytest.raises(UnsupportedArgumentError, match="the name 'rows'"):
        ChunkShardingSpec("rows", ["rank:0/cpu"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="must name a rank, got none"):
        ChunkShardingSpec(0, [])
    with pytest.raises(InvalidArgumentError, match="on a rank of the group, of 0 to 1"):
        ShardedTensor._init_from_local_tensor(local, ChunkShardingSpec(0, ["rank:2/cpu"]), 3, 10)
    with pytest.raises(InvalidArgumentError, match="must be contiguous"):
        ShardedTensor._init_from_local_tensor(local.t(), Backwards(), 20, 3)
    return out


def test_made_by_a_rule_nothing_is_sent_and_what_does_not_fit_is_refused() -> None:
    assert torch.equal(run("threads", 2, by_a_rule_of_its_own)[0], WHOLE)
