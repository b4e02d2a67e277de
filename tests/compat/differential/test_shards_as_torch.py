"""Tensors in shards that are made by a rule: the same as torch's, and refused where torch refuses.

Both are given this rank's shard, a rule, and the size of the whole.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from compared import compare_calls
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

RULES = ("chunks", "shards")
PLACES = ("rank:0/cpu", "rank:1/cpu")


def _rule(side: Any, kind: str, argument: Any, listed: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that these are to be removed
        rules = importlib.import_module(f"{side.__name__}._shard.sharding_spec")
    if kind == "chunks":
        return rules.ChunkShardingSpec(argument, list(listed))
    return rules.EnumerableShardingSpec(
        [rules.ShardMetadata(list(offsets), list(sizes), PLACES[rank]) for offsets, sizes, rank in listed]
    )


def shard(
    side: Any, rank: int, local: Any, kind: str, argument: Any, listed: Any, size: Any, dtype: str = "float32"
) -> Any:
    """A sharded tensor, by all that tells one from another. ``local``: the shapes of the ranks' shards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = importlib.import_module(f"{side.__name__}._shard.sharded_tensor").ShardedTensor
    tensor = torch.full(local[rank], float(rank + 1)).to(getattr(torch, dtype))
    if dtype == "float32" and sum(local[0]) % 2:
        tensor.requires_grad_()
    made = sharded._init_from_local_tensor(tensor, _rule(side, kind, argument, listed), size)
    known = made.metadata()
    whole = torch.zeros(size, dtype=tensor.dtype) if rank == 0 else None
    made.gather(0, whole)
    properties = known.tensor_properties
    return (
        [
            (list(each.shard_offsets), list(each.shard_sizes), str(each.placement))
            for each in known.shards_metadata
        ],
        (tuple(known.size), str(properties.dtype), properties.requires_grad, str(properties.layout)),
        (made.local_tensor().data_ptr() == tensor.data_ptr(), len(made.local_shards()), tuple(made.shape)),
        whole if whole is None else whole.tolist(),
    )


def shard_that_fits(side: Any, rank: int, *arguments: Any) -> Any:
    """An error is a difference, though both may have one."""
    try:
        return shard(side, rank, *arguments)
    except Exception as error:
        return f"{side.__name__} has raised {error!r}"


def _pieces(length: int) -> tuple[int, int]:
    first = -(-length // 2)
    return first, length - first


@st.composite
def _fitting(draw: st.DrawFn) -> Any:
    size = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(-len(size), len(size) - 1))
    order = draw(st.sampled_from([(0, 1), (1, 0)]))  # whose is the first piece
    lengths = _pieces(size[dim])
    local = [list(size), list(size)]
    for piece, rank in enumerate(order):
        local[rank][dim] = lengths[piece]
    dtype = draw(st.sampled_from(["float32", "int64"]))
    if draw(st.sampled_from(RULES)) == "chunks":
        return shard_that_fits, (local, "chunks", dim, [PLACES[rank] for rank in order], size, dtype)
    offsets = [[0] * len(size), [0] * len(size)]
    offsets[1][dim] = lengths[0]
    listed = [(offsets[piece], local[rank], rank) for piece, rank in enumerate(order)]
    return shard_that_fits, (local, "shards", None, listed, size, dtype)


@given(program=st.lists(_fitting(), min_size=6, max_size=12))
@settings(max_examples=4, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
def test_that_fit(program: list[Any]) -> None:
    """Any dimension, also from the end, lengths that do not divide, empty pieces, ranks in either order."""
    compare_calls(program)


EVEN = ([3, 4], [3, 4])
HALVES = [([0, 0], [3, 4], 0), ([3, 0], [3, 4], 1)]


@pytest.mark.parametrize(
    "arguments",
    [
        (([2, 4], [2, 4]), "chunks", 0, PLACES, [6, 4]),
        (EVEN, "chunks", 2, PLACES, [6, 4]),
        (EVEN, "chunks", -3, PLACES, [6, 4]),
        (EVEN, "chunks", "B", PLACES, [6, 4]),
        (EVEN, "chunks", 1.5, PLACES, [6, 4]),
        (EVEN, "chunks", 0, ("rank:0/cpu", "rank:7/cpu"), [6, 4]),
        (EVEN, "chunks", 0, ("rank:0/cuda:0", "rank:1/cuda:0"), [6, 4]),
        (EVEN, "chunks", 0, PLACES + PLACES, [12, 4]),
        (EVEN, "shards", None, [], [6, 4]),
        (EVEN, "shards", None, HALVES, [7, 4]),
        (EVEN, "shards", None, HALVES, [5, 4]),
        (EVEN, "shards", None, [HALVES[0], ([2, 0], [3, 4], 1)], [6, 4]),
        (EVEN, "shards", None, [HALVES[0], ([3, 0], [3, 4], 0)], [6, 4]),
        (EVEN, "shards", None, [HALVES[0], ([3], [3], 1)], [6, 4]),
    ],
    ids=str,
)
def test_that_do_not_fit(arguments: Any) -> None:
    """What catches torch's error catches ours; the group goes on, with a tensor that fits."""
    compare_calls([(shard, arguments), (shard_that_fits, (EVEN, "chunks", 0, PLACES, [6, 4]))])
