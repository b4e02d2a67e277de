"""Mistakes in arguments: a clear error before anything is sent, and the group goes on."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.errors import (
    CollectiveMismatchError,
    GroupDestroyedError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NotInitializedError,
)
from torchestra.types import ReduceOp
from torchestra.world.registry import thread_rank
from warm_programs import FinalizedWarm, run_warm, without_leaks
from worlds import run


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


# In a group of two: the call, the type of the error, and what it must say.
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no tensor": (
        lambda: dist.all_reduce([1.0]),
        InvalidArgumentTypeError,
        r"all_reduce: Invalid function argument. Expected parameter `tensor` of type torch.Tensor",
    ),
    "a number": (
        lambda: dist.broadcast(3, 0),
        TypeError,
        r"Expected parameter `tensor` of type torch.Tensor but got int instead",
    ),
    "sparse": (
        lambda: dist.broadcast(sparse(), 0),
        InvalidArgumentError,
        r"`tensor` has unsupported layout torch.sparse_coo: .* only supports dense tensors",
    ),
    "another device": (
        lambda: dist.all_gather_into_tensor(ones(6), torch.ones(3, device="meta")),
        InvalidArgumentError,
        r"`input_tensor` is on unsupported device type meta; move it to the CPU first",
    ),
    "another device in a list": (
        lambda: dist.all_gather([ones(3), torch.ones(3, device="meta")], ones(3)),
        InvalidArgumentError,
        r"`tensor_list\[1\]` is on unsupported device type meta",
    ),
    "another device, moved": (
        lambda: dist.all_to_all_single(ones(4), torch.ones(4, device="meta")),
        InvalidArgumentError,
        "unsupported device type meta",
    ),
    "no reduce operation": (
        lambda: dist.all_reduce(ones(3), "sum"),
        InvalidArgumentTypeError,
        r"all_reduce: `op` must be a torchestra.ReduceOp, got 'sum'",
    ),
    "no factor": (
        lambda: dist.all_reduce(ones(3), ReduceOp.PREMUL_SUM),
        InvalidArgumentError,
        r"PREMUL_SUM needs a factor; use ReduceOp.premul_sum\(factor\)",
    ),
    "bits of floats": (
        lambda: dist.all_reduce(ones(3), ReduceOp.BAND),
        InvalidArgumentError,
        "BAND is not defined for tensors of dtype torch.float32",
    ),
    "average of booleans": (
        lambda: dist.reduce(ones(3, dtype=torch.bool), 0, ReduceOp.AVG),
        InvalidArgumentError,
        "reduce: AVG is not defined for tensors of dtype torch.bool",
    ),
    "largest complex": (
        lambda: dist.reduce_scatter_tensor(
            ones(3, dtype=torch.complex64), ones(6, dtype=torch.complex64), ReduceOp.MAX
        ),
        InvalidArgumentError,
        "reduce_scatter_tensor does not support ReduceOp.MAX on complex tensors",
    ),
    "factor for integers": (
        lambda: dist.all_reduce(ones(3, dtype=torch.int32), ReduceOp.premul_sum(2)),
        InvalidArgumentError,
        "PREMUL_SUM is not defined for tensors of dtype torch.int32",
    ),
    "sum of small floats": (
        lambda: dist.all_reduce(torch.zeros(4).to(torch.float8_e5m2)),
        InvalidArgumentError,
        "SUM is not defined for tensors of dtype torch.float8_e5m2",
    ),
    "root too large": (
        lambda: dist.broadcast(ones(3), 2),
        InvalidArgumentError,
        r"`src`: global rank 2 is not part of group 'default', which has global ranks \[0, 1\]",
    ),
    "root negative": (
        lambda: dist.reduce(ones(3), -1),
        InvalidArgumentError,
        r"`dst`: global rank -1 is not part of",
    ),
    "root a string": (lambda: dist.broadcast(ones(3), "0"), TypeError, r"`src` must be an int, got '0'"),
    "root a list": (lambda: dist.broadcast(ones(3), [0]), TypeError, r"`src` must be an int, got \[0\]"),
    "no root": (
        lambda: dist.broadcast(ones(3)),
        InvalidArgumentError,
        "broadcast: give `src` or `group_src`",
    ),
    "two roots": (
        lambda: dist.reduce(ones(3), 0, group_dst=0),
        InvalidArgumentError,
        "reduce: give `dst` or `group_dst`, not both",
    ),
    "group root too large": (
        lambda: dist.broadcast(ones(3), group_src=2),
        InvalidArgumentError,
        "`group_src` is 2, but the group has ranks 0 to 1",
    ),
    "group root a float": (
        lambda: dist.gather(ones(3), group_dst=0.0),
        InvalidArgumentTypeError,
        "`group_dst` must be an int, got 0.0",
    ),
    "no group": (
        lambda: dist.barrier(group="world"),
        InvalidArgumentTypeError,
        "barrier: `group` must be a ProcessGroup, got 'world'",
    ),
    "list too short": (
        lambda: dist.all_gather([ones(3)], ones(3)),
        InvalidArgumentError,
        "`tensor_list` must have one tensor for each of the group's 2 ranks, got 1",
    ),
    "no list": (
        lambda: dist.all_gather(ones(2, 3), ones(3)),
        InvalidArgumentTypeError,
        r"Expected parameter `tensor_list` of type List\[torch.Tensor\] but got Tensor",
    ),
    "list of numbers": (
        lambda: dist.reduce_scatter(ones(1), [1.0, 2.0]),
        InvalidArgumentTypeError,
        r"Expected parameter `input_list\[0\]` of type torch.Tensor but got float",
    ),
    "other dtype in the list": (
        lambda: dist.all_gather([ones(3), ones(3, dtype=torch.int32)], ones(3)),
        InvalidArgumentError,
        r"tensors with different dtypes: `tensor_list\[1\]` has dtype torch.int32, expected torch.float32",
    ),
    "own piece of another size": (
        lambda: dist.all_gather([ones(4), ones(4)], ones(3)),
        InvalidArgumentError,
        r"this rank's own, has 4 elements, expected 3",
    ),
    "own input of another size": (
        lambda: dist.reduce_scatter(ones(3), [ones(4), ones(4)]),
        InvalidArgumentError,
        r"this rank's own, has 4 elements, expected 3",
    ),
    "output too small": (
        lambda: dist.all_gather_into_tensor(ones(5), ones(3)),
        InvalidArgumentError,
        "output_tensor has 5 elements, expected the input's 3 times the group's 2 ranks",
    ),
    "output of another dtype": (
        lambda: dist.all_gather_into_tensor(ones(6, dtype=torch.float64), ones(3)),
        InvalidArgumentError,
        "`output_tensor` has dtype torch.float64, expected torch.float32",
    ),
    "input too small": (
        lambda: dist.reduce_scatter_tensor(ones(3), ones(5)),
        InvalidArgumentError,
        "input has 5 elements, expected the output's 3 times the group's 2 ranks",
    ),
    "missing list at the root": (
        lambda: dist.gather(ones(3), None, dist.get_rank()),
        InvalidArgumentError,
        "gather: `gather_list` must be specified on the destination rank",
    ),
    "list away from the root": (
        lambda: dist.gather(ones(3), [ones(3)] * 2, 1 - dist.get_rank()),
        InvalidArgumentError,
        "`gather_list` must not be specified on ranks other than the destination",
    ),
    "sizes in the gather list": (
        lambda: dist.gather(ones(3), [ones(3), ones(2)], dist.get_rank()),
        InvalidArgumentError,
        r"`gather_list\[1\]` has 2 elements, expected 3",
    ),
    "missing scatter list": (
        lambda: dist.scatter(ones(3), None, dist.get_rank()),
        InvalidArgumentError,
        "scatter: `scatter_list` must be specified on the source rank",
    ),
    "scatter list away from the root": (
        lambda: dist.scatter(ones(3), [ones(3)] * 2, 1 - dist.get_rank()),
        InvalidArgumentError,
        "`scatter_list` must not be specified on ranks other than the source",
    ),
    "dtypes in the scatter list": (
        lambda: dist.scatter(ones(3), [ones(3), ones(3, dtype=torch.int8)], dist.get_rank()),
        InvalidArgumentError,
        r"`scatter_list\[1\]` has dtype torch.int8, expected torch.float32",
    ),
    "all_to_all, two dtypes": (
        lambda: dist.all_to_all([ones(1), ones(1, dtype=torch.int8)], [ones(1), ones(1)]),
        InvalidArgumentError,
        r"`output_tensor_list\[1\]` has dtype torch.int8, expected torch.float32",
    ),
    "rows that cannot be divided": (
        lambda: dist.all_to_all_single(ones(3), ones(3)),
        InvalidArgumentError,
        "dimension 0 has length 3, which the group's 2 ranks do not divide; give `input_split_sizes`",
    ),
    "splits that do not add up": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 1]),
        InvalidArgumentError,
        "`input_split_sizes` adds up to 3, but dimension 0 has length 4",
    ),
    "negative splits": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [5, -1], [2, 2]),
        InvalidArgumentError,
        r"`output_split_sizes` must be non-negative ints, got \[5, -1\]",
    ),
    "splits for another number of ranks": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [2, 2], [1, 1, 2]),
        InvalidArgumentError,
        r"`input_split_sizes` must list one length for each of 2 ranks, got \[1, 1, 2\]",
    ),
    "splits that are no ints": (
        lambda: dist.all_to_all_single(ones(4), ones(4), [2.0, 2.0], [2, 2]),
        InvalidArgumentError,
        "`output_split_sizes` must be non-negative ints",
    ),
    "rows of other lengths": (
        lambda: dist.all_to_all_single(ones(4, 2), ones(4, 3)),
        CollectiveMismatchError,
        r"all_to_all\(float32\) that sends \[6, 6\] and expects \[4, 4\] elements by rank",
    ),
    "negative time-out": (
        lambda: dist.barrier(timeout=-1),
        InvalidArgumentError,
        "timeout must not be negative, got -1",
    ),
    "time-out of the wrong type": (
        lambda: dist.barrier(timeout="1s"),
        InvalidArgumentError,
        "Expected timeout argument to be of type datetime.timedelta, or a number of seconds, got '1s'",
    ),
    "negative length": (
        lambda: dist.empty(-1),
        InvalidArgumentError,
        r"lengths must not be negative, got \(-1,\)",
    ),
    "more than there is": (
        lambda: dist.empty(1 << 60),
        InvalidArgumentError,
        "no 4611686018427387904 bytes are left in this rank's heap",
    ),
    "rank that is no member": (
        lambda: dist.get_group_rank(dist.group.WORLD, 7),
        InvalidArgumentError,
        r"global rank 7 is not part of group 'default', which has global ranks \[0, 1\]",
    ),
    "group rank that does not exist": (
        lambda: dist.get_global_rank(dist.group.WORLD, 2),
        InvalidArgumentError,
        "group rank 2 is not part of group 'default', which has 2 ranks",
    ),
    "groups of unknown ranks": (
        lambda: dist.new_group([0, 2]),
        InvalidArgumentError,
        r"new_group: Rank 2 is out of range. Valid ranks are 0 to 1 \(world_size=2\)",
    ),
    "groups of repeated ranks": (
        lambda: dist.new_group([1, 1]),
        InvalidArgumentError,
        r"new_group: ranks list must not contain duplicate entries, got \[1, 1\]",
    ),
    "groups of nobody": (
        lambda: dist.new_group([]),
        InvalidArgumentError,
        "new_group: ranks must not be empty",
    ),
    "groups of another backend": (
        lambda: dist.new_group(backend="native"),
        InvalidArgumentError,
        "new_group: backend 'native' differs from the default group's 'threads'",
    ),
    "init twice": (
        dist.init_process_group,
        InvalidArgumentError,
        "trying to initialize the default process group twice! Call destroy_process_group",
    ),
    "unknown reduce operation": (
        lambda: ReduceOp("MEDIAN"),
        InvalidArgumentError,
        "unknown reduce operation 'MEDIAN'; known are SUM",
    ),
}  # fmt: skip


def make_all_mistakes(quickly: bool) -> list[str]:
    """Every mistake on every rank, and a sum after each; what did not fail as it should."""
    wrong = []
    if quickly:  # let every operation take its fast path first, if it has one
        dist.all_reduce(ones(3))
        dist.broadcast(ones(3), 0)
        dist.all_gather_into_tensor(ones(6), ones(3))
        dist.reduce_scatter_tensor(ones(3), ones(6))
        dist.all_to_all_single(ones(6), ones(6))
    for name, (call, kind, message) in MISTAKES.items():
        try:
            call()
        except Exception as error:
            with_message = pytest.raises(kind, match=message)
            try:
                with with_message:
                    raise error
            except BaseException as failure:
                wrong.append(f"{name}: {failure}")
        else:
            wrong.append(f"{name}: nothing was raised")
        tensor = ones(3)
        dist.all_reduce(tensor)
        if tensor.tolist() != [2.0] * 3:
            wrong.append(f"{name}: the group is out of step")
    return wrong


@pytest.mark.parametrize("quickly", [False, True])
def test_mistakes_are_refused_and_the_group_goes_on(quickly: bool) -> None:
    for wrong in run("threads", 2, make_all_mistakes, quickly):
        assert wrong == []


def mistakes_of_one_rank() -> None:
    """The other rank waits meanwhile."""
    if dist.get_rank() == 1:
        for name in ("sparse", "root too large", "list too short", "rows that cannot be divided"):
            with pytest.raises(InvalidArgumentError):
                MISTAKES[name][0]()
    tensor = ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


def test_a_rank_that_was_refused_can_join_the_others_after_all() -> None:
    run("threads", 2, mistakes_of_one_rank)


def use_what_is_destroyed() -> None:
    group = dist.new_group()
    dist.all_reduce(ones(3), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    for async_op in (False, True):
        with pytest.raises(GroupDestroyedError, match=r"all_reduce.*has destroyed group '1'"):
            dist.all_reduce(ones(3), group=group, async_op=async_op)
        with pytest.raises(GroupDestroyedError, match=r"barrier.*has destroyed group '1'"):
            dist.barrier(group, async_op=async_op)
    with pytest.raises(NotInitializedError, match="is not a group of this rank, or was destroyed already"):
        dist.destroy_process_group(group)
    dist.all_reduce(ones(3))
    world = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    assert dist.group.WORLD is None
    assert not dist.is_initialized()
    with pytest.raises(GroupDestroyedError, match="has destroyed group 'default'"):
        dist.all_reduce(ones(3), group=world)
    for call in (
        lambda: dist.all_reduce(ones(3)),
        dist.barrier,
        dist.get_rank,
        dist.get_world_size,
        dist.new_group,
        dist.destroy_process_group,
        lambda: dist.empty(3),
        dist.get_backend,
    ):
        with pytest.raises(NotInitializedError, match="Default process group has not been initialized"):
            call()


def test_nothing_can_be_done_with_a_group_that_was_destroyed() -> None:
    run("threads", 2, use_what_is_destroyed)


def test_nothing_can_be_done_before_the_beginning() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(ones(3))
    assert not dist.is_initialized()
    assert dist.is_available()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"backend": "smoke"}, InvalidArgumentError, "unknown backend 'smoke'; there are native, threads"),
        ({"backend": "mpi"}, InvalidArgumentError, "no backend 'mpi'; leave it out: ranks that mpiexec has"),
        ({"backend": "cpu:ucc"}, InvalidArgumentError, "no backend 'cpu:ucc'; leave it out"),
        ({"backend": 3}, TypeError, "`backend` must be a str or None, got 3"),
        ({"timeout": -1}, InvalidArgumentError, "timeout must not be negative"),
        ({"timeout": "soon"}, InvalidArgumentTypeError, "Expected timeout argument to be of type"),
        ({"pg_options": {}}, InvalidArgumentError, "pg_options"),
        ({"device_id": torch.device("cpu")}, InvalidArgumentError, "bound to a device|CUDA devices"),
        ({"store": dist.HashStore(), "init_method": "env://"}, InvalidArgumentError, "or `store`, not"),
        ({"store": dist.HashStore(), "rank": 2, "world_size": 2}, InvalidArgumentError, "rank must be"),
        ({"store": dist.HashStore(), "rank": 0}, InvalidArgumentError, "world size parameter missing"),
        ({"store": dist.HashStore(), "world_size": 2}, InvalidArgumentError, "rank parameter missing"),
        ({"init_method": "smoke://there"}, InvalidArgumentError, "smoke"),
    ],
)  # fmt: skip
def test_bad_arguments_of_init(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()
    with thread_rank(0, 1, dist.HashStore()):  # a good call works after a bad one
        dist.init_process_group()
        assert dist.get_world_size() == 1


def test_an_environment_without_rank_or_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidArgumentError, match="environment variable RANK expected, but not set"):
        dist.init_process_group()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidArgumentError, match="environment variable WORLD_SIZE expected, but not set"):
        dist.init_process_group()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(InvalidArgumentError, match="environment variable MASTER_ADDR expected, but not set"):
        dist.init_process_group()


def test_mistakes_cost_nothing_at_exit() -> None:
    """A program that ends with an error while a group is open ends, and prints the error."""
    program = """
        import torch, torchestra as dist
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        dist.broadcast(torch.ones(3), 5)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = run_warm(command, capture_output=True, text=True, timeout=60, kind=FinalizedWarm)
    assert ended.returncode == 1
    assert without_leaks(ended.stderr).rstrip().splitlines()[-1] == (
        "torchestra.errors.InvalidArgumentError: broadcast: `src`: global rank 5 is not part of group"
        " 'default', which has global ranks [0]"
    )
