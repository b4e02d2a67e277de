"""Values that no parameter of some type takes, chosen by what the parameter is annotated with.

:data:`VALUES` has one of each kind of thing that a program may pass by mistake. :func:`wrong_values` picks
those for a parameter that its annotation does not allow, and, of those that it does allow, some that lie
outside of any range (:data:`OUT_OF_RANGE`).
"""

from __future__ import annotations

import collections.abc
import decimal
import numbers
import types
import typing
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal, TypeVar, Union

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchestra as dist


class Hostile:
    """Cannot be shown, compared, or asked whether it is true."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no ==")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("no bool")


class ManyLines:
    """Is shown in many lines."""

    def __repr__(self) -> str:
        return "many\nlines\n" * 1000


def _foreign_group() -> object:
    return torch._C._distributed_c10d.ProcessGroup(0, 2)


VALUES: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "2": lambda: 2,
    "-1": lambda: -1,
    "huge": lambda: 10**50,
    "1.0": lambda: 1.0,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "complex": lambda: 1j,
    "decimal": lambda: decimal.Decimal("1.5"),
    "empty str": lambda: "",
    "str": lambda: "sum",
    "two lines": lambda: "a\nb",
    "NUL": lambda: "\0",
    "surrogate": lambda: "\ud800",
    "long str": lambda: "x" * 100_000,
    "bytes": lambda: b"\0\xff",
    "empty list": list,
    "list of None": lambda: [None, None],
    "list of str": lambda: ["a", "b"],
    "list of floats": lambda: [1.0, 1.0],
    "list of bools": lambda: [True, True],
    "list of lists": lambda: [[0], [1]],
    "list of tensors": lambda: [torch.ones(2), torch.ones(2)],
    "list with a hole": lambda: [torch.ones(2), None],
    "list of hostile": lambda: [Hostile()],
    "tuple": lambda: (1, "a"),
    "dict": lambda: {"a": 1},
    "set": lambda: {"a"},
    "generator": lambda: (each for each in (0, 1)),
    "range of floats": lambda: np.array([0.5, 1.5]),
    "tensor": lambda: torch.ones(2),
    "float tensor": lambda: torch.tensor(1.5),
    "class": lambda: int,
    "function": lambda: len,
    "module": lambda: types,
    "object": object,
    "many lines": ManyLines,
    "hostile": Hostile,
    "timedelta": lambda: timedelta(seconds=1),
    "torch's op": lambda: torch._C._distributed_c10d.ReduceOp.SUM,
    "torch's group": _foreign_group,
    "dtype": lambda: torch.float32,
    "exception": lambda: ValueError("x"),
}


def _resized_away() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


# Tensors all right, but none that can be sent. (Which shapes fit is for the tests of each operation.)
ODD_TENSORS: dict[str, Callable[[], object]] = {
    "on no device": lambda: torch.ones(2, device="meta"),
    "fake": _fake,
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "without its memory": _resized_away,
    "without any memory": lambda: torch._efficientzerotensor(2),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "masked": lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "functional": lambda: torch._to_functional_tensor(torch.ones(2)),
}
# By rank, a group that it was in until it was destroyed.
destroyed_groups: dict[int, object] = {}
GROUPS: dict[str, Callable[[], object]] = {"destroyed": lambda: destroyed_groups[dist.get_rank()]}

DURATIONS: dict[str, Callable[[], object]] = {
    "negative": lambda: -1,
    "a little negative": lambda: -0.5,
    "not a number": lambda: float("nan"),
    "endless": lambda: float("inf"),
    "1e300": lambda: 1e300,
    "10**400": lambda: 10**400,
    "negative timedelta": lambda: timedelta(days=-1),
    "timedelta.max": lambda: timedelta.max,
}
CALL_DURATIONS = {label: make for label, make in DURATIONS.items() if label != "negative"}  # -1: unset
RANKS: dict[str, Callable[[], object]] = {
    "rank 7": lambda: 7,
    "rank -2": lambda: -2,
    "huge rank": lambda: 10**50,
}
TAGS: dict[str, Callable[[], object]] = {
    "tag -1": lambda: -1,
    "tag 2**63": lambda: 1 << 63,
    "huge tag": lambda: 10**50,
}
RANK_LISTS: dict[str, Callable[[], object]] = {
    "ranks twice": lambda: [0, 0],
    "rank 7": lambda: [0, 7],
    "rank -1": lambda: [-1, 0],
    "huge": lambda: [10**50],
    "none": list,
    "range": lambda: range(7),
}
SPLITS: dict[str, Callable[[], object]] = {
    "negative": lambda: [5, -1],
    "too many": lambda: [1, 1, 2],
    "too few": lambda: [4],
    "wrong sum": lambda: [1, 2],
    "huge": lambda: [10**50, 0],
}
RECEIVED = {label: make for label, make in SPLITS.items() if label != "wrong sum"}
TENSOR_LISTS: dict[str, Callable[[], object]] = {
    "none": list,
    "too few": lambda: [torch.ones(2)],
    "too many": lambda: [torch.ones(2)] * 3,
}
HOSTS: dict[str, Callable[[], object]] = {
    "empty": lambda: "",
    "with NUL": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "too long": lambda: "a" * 300 + ".example",
    "dots": lambda: "a..b",
}
PORTS: dict[str, Callable[[], object]] = {"-1": lambda: -1, "65536": lambda: 65536, "huge": lambda: 10**50}

# By the name that a parameter has wherever it means this; some with the function's name before it.
OUT_OF_RANGE: dict[str, dict[str, Callable[[], object]]] = {
    **dict.fromkeys(("src", "dst", "group_src", "group_dst", "dstRank", "srcRank", "root"), RANKS),
    **dict.fromkeys(("global_rank", "group_rank", "peer", "group_peer"), RANKS),
    **dict.fromkeys(("ranks", "ranks_to_exclude"), RANK_LISTS),
    **dict.fromkeys(("output_split_sizes", "input_split_sizes"), SPLITS),
    **dict.fromkeys(("all_gather.tensor_list", "reduce_scatter.input_list"), TENSOR_LISTS),
    **dict.fromkeys(("all_to_all.input_tensor_list", "all_to_all.output_tensor_list"), TENSOR_LISTS),
    # Only the ranks together can tell what the rows that one receives must add up to.
    "all_to_all_single.output_split_sizes": RECEIVED,
    "all_to_all_single_autograd.output_split_sizes": RECEIVED,
    # Made directly, a group may have any numbers in the world.
    "ProcessGroup.ranks": {label: make for label, make in RANK_LISTS.items() if label != "rank 7"},
    "exclude": {label: RANK_LISTS[label] for label in ("rank 7", "rank -1", "huge", "range")},
    **dict.fromkeys(
        ("rpc_sync.timeout", "rpc_async.timeout", "remote.timeout", "to_here.timeout"), CALL_DURATIONS
    ),
    "tag": TAGS,
    "group": GROUPS,
    "timeout": DURATIONS,
    "host_name": HOSTS,
    "port": PORTS,
}


# They return a tensor as it is, or only keep it.
TAKES_ODD_TENSORS = ("wait_tensor", "P2POp")
# They only tell of a group, allocate, or note something that is refused when it is used.
TAKES_DESTROYED_GROUPS = {
    *("P2POp", "coalescing_manager", "empty", "flight_record", "full", "get_backend", "get_backend_config"),
    *(
        "get_group_rank",
        "get_global_rank",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "group_rank",
    ),
    *("expand_group", "from_group", "new_subgroups", "ones", "set_pg_timeout", "zeros"),
}
# What is traced with, and of what torch makes ordinary tensors: the functional collectives take these.
TRACED = ("on no device", "fake", "without any memory", "functional")


def fits(hint: Any, value: object) -> bool:
    """Return whether an annotation allows a value."""
    if isinstance(hint, TypeVar) and isinstance(hint.__bound__, type):
        hint = hint.__bound__
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return True
    if hint is None or hint is type(None):
        return value is None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(each, value) for each in arguments)
    if origin is Literal:
        return any(type(each) is type(value) and each == value for each in arguments)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (list, tuple, collections.abc.Sequence):
        if not isinstance(value, (list, tuple, range)):
            return False
        if origin is tuple and len(arguments) == 2 and arguments[1] is not ...:
            return len(value) == 2 and all(map(fits, arguments, value))
        return all(fits(arguments[0], each) for each in value)
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, dict) and all(
            fits(arguments[0], key) and fits(arguments[1], each) for key, each in value.items()
        )
    if origin is type:
        return isinstance(value, type)
    if hint is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def wrong_values(function: str, parameter: str, hint: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Label and maker of each value that the parameter must refuse."""
    for label, make in VALUES.items():
        if not fits(hint, make()):
            yield label, make
    ranges = OUT_OF_RANGE.get(f"{function}.{parameter}", OUT_OF_RANGE.get(parameter, {}))
    if hint is torch.Tensor and function not in TAKES_ODD_TENSORS:
        yield from (odd for odd in ODD_TENSORS.items() if parameter != "self" or odd[0] not in TRACED)
    if ranges is GROUPS and function in TAKES_DESTROYED_GROUPS:
        return
    for label, make in ranges.items():
        if fits(hint, make()):
            yield f"out of range: {label}", make
