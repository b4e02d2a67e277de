"""The table of operations, and the fingerprint of a call, which ranks compare.

:data:`COLLECTIVES` has a row for each collective, under its public name. The rest of the package derives from
the rows: argument checks (tensors/arguments.py), the general method of a communicator, the methods in torch's
C++ form (process_group/), what a fake world leaves in tensors (engine/fake.py), and how other engines are
reached. A new collective is a row here and an algorithm in engine/local.py (and in engine/multihost/engine.py
for groups on several hosts): :func:`add` a row, or put it below.

A fingerprint is one word: kind, reduce operation, dtype and root. Needs no torch, so that it can be read from
outside of a job.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchestra.types import ReduceOp

if TYPE_CHECKING:
    import torch


class Kind(enum.IntEnum):
    """The codes of operations in fingerprints, by torch.distributed's names; 32 to 255 are free."""

    barrier = 0
    all_reduce = 1
    reduce = 2
    broadcast = 3
    all_gather = 4
    gather = 5
    scatter = 6
    reduce_scatter = 7
    all_to_all = 8
    send = 9
    recv = 10
    scan = 11
    exscan = 12
    sparse_all_reduce = 20


@dataclass(frozen=True)
class Parameter:
    """A parameter of a collective that takes tensors.

    Attributes:
        name: of it, in the public function and in error texts.
        is_list: it takes one tensor for each rank.
        on_root: only the root gives it.
    """

    name: str
    is_list: bool = False
    on_root: bool = False


class Shape(enum.Enum):
    """The rule that the shapes of an operation's tensors follow."""

    NONE = "there are no tensors"
    ALIKE = "every tensor has as many elements as every other, on all ranks"
    OWN = "the list's entry for this rank has as many elements as this rank's tensor; ranks may differ"
    OUTPUT_IS_WHOLE = "the output has the elements of the inputs of all ranks"
    INPUT_IS_WHOLE = "the input has the elements of the outputs of all ranks"
    PAIRS = "each pair of ranks agrees on how many elements go from one to the other"
    ROWS = "each pair of ranks agrees on how many rows go from one to the other (split sizes; default: equal)"


@dataclass(frozen=True)
class Collective:
    """A row of the table: a collective as everything that derives from it needs to know it.

    Attributes:
        name: of the public function, and of the communicator's method.
        kind: its code in fingerprints. These also hold the reduce operation, the dtype and the root; the
            count that ranks also compare is that of elements, or a hash of them where they differ.
        summary: one sentence for people.
        output, input: the tensors that it fills and those that it reads; the same parameter if it works in
            place, None if it takes no tensors.
        shape: the rule for their shapes. All tensors of a call have one dtype.
        algorithm: the name under which engines look up how they run it; default: its name.
        reduces: it takes a reduce operation ``op``.
        root: how the public function calls the root, ``src`` or ``dst``; "" if it has none.
        default_root: the root if none is given, by number in the group; None if one has to be given.
        splits: it takes ``output_split_sizes`` and ``input_split_sizes``.
        aliases: torch's newer names of the public function.
        method: torch's C++ name, that of ProcessGroup's method; default: its name.
        method_aliases: the other names of that method.
        options: the class in arguments/options.py that the method takes.
        coalesced: the method for several such operations as one; "" if there is none.
        multi_tensor: the method takes a list of several tensors of each rank.
        sparse: it takes sparse COO tensors as well.
        functional: the operator in ``torch.ops.torchestra``; "" if there is none.
        on_devices: NCCL and similar backends have it; if not, tensors of a device go through the host.
        in_place: it replaces the tensor that it reads.
        moves: it only moves elements between tensors, and so takes complex ones as pairs of reals.
    """

    name: str
    kind: int
    summary: str
    output: Parameter | None = None
    input: Parameter | None = None
    shape: Shape = Shape.ALIKE
    algorithm: str = ""
    reduces: bool = False
    root: str = ""
    default_root: int | None = None
    splits: bool = False
    aliases: tuple[str, ...] = ()
    method: str = ""
    method_aliases: tuple[str, ...] = ()
    options: str = "OperationOptions"
    coalesced: str = ""
    multi_tensor: bool = False
    sparse: bool = False
    functional: str = ""
    on_devices: bool = True
    in_place: bool = field(init=False, default=False)
    moves: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        for attribute in ("algorithm", "method"):
            if not getattr(self, attribute):
                object.__setattr__(self, attribute, self.name)
        in_place = self.output is not None and self.output is self.input
        object.__setattr__(self, "in_place", in_place)
        moves = self.output is not None and not self.reduces and not in_place
        object.__setattr__(self, "moves", moves)

    def fills(self, root: int | None, rank: int) -> bool:
        """Return whether a rank's outputs change: by reduce the root's, by broadcast all but the root's."""
        return not self.in_place or root is None or (root == rank) == self.reduces


COLLECTIVES: dict[str, Collective] = {}
"""Every collective of a whole group, by its public name."""


def add(row: Collective) -> Collective:
    """Put a row into the table and return it. A row of the same name is replaced."""
    COLLECTIVES[row.name] = row
    _KIND_NAMES.setdefault(int(row.kind), row.name)
    return row


_KIND_NAMES: dict[int, str] = {int(kind): kind.name for kind in Kind}
_TENSOR = Parameter("tensor")
_INPUT = Parameter("input")
_OUTPUT = Parameter("output")

ALL_REDUCE = add(
    Collective(
        "all_reduce",
        Kind.all_reduce,
        "Replace the tensor on every rank by the reduction of all ranks' tensors.",
        _TENSOR,
        _TENSOR,
        reduces=True,
        method="allreduce",
        options="AllreduceOptions",
        coalesced="allreduce_coalesced",
        multi_tensor=True,
        sparse=True,
        functional="all_reduce",
    )
)
ALL_REDUCE_LIST = replace(
    ALL_REDUCE,
    name="all_reduce_list",
    summary=":meth:`allreduce` of each tensor of the list on its own, as one operation; they have one dtype.",
    method="allreduce_coalesced",
    options="AllreduceCoalescedOptions",
    coalesced="",
    multi_tensor=False,
)
"""all_reduce of several tensors as one operation; not public, so not in the table."""

REDUCE = add(
    Collective(
        "reduce",
        Kind.reduce,
        "Replace the root's tensor by the reduction of all ranks' tensors.",
        _TENSOR,
        _TENSOR,
        algorithm="all_reduce",
        reduces=True,
        root="dst",
        options="ReduceOptions",
    )
)
BROADCAST = add(
    Collective(
        "broadcast",
        Kind.broadcast,
        "Replace every rank's tensor by the root's.",
        _TENSOR,
        _TENSOR,
        root="src",
        options="BroadcastOptions",
        multi_tensor=True,
        functional="broadcast",
    )
)
ALL_GATHER = add(
    Collective(
        "all_gather",
        Kind.all_gather,
        "Put every rank's tensor into one of the outputs; sizes may differ between ranks.",
        Parameter("tensor_list", is_list=True),
        _TENSOR,
        Shape.OWN,
        method="allgather",
        options="AllgatherOptions",
        coalesced="allgather_coalesced",
        multi_tensor=True,
    )
)
ALL_GATHER_INTO_TENSOR = add(
    Collective(
        "all_gather_into_tensor",
        Kind.all_gather,
        "Put every rank's tensor, one after the other, into the output.",
        Parameter("output_tensor"),
        Parameter("input_tensor"),
        Shape.OUTPUT_IS_WHOLE,
        aliases=("all_gather_single",),
        method="allgather_into_tensor",
        method_aliases=("_allgather_base", "all_gather_single"),
        options="AllgatherOptions",
        coalesced="allgather_into_tensor_coalesced",
        functional="all_gather_into_tensor",
    )
)
GATHER = add(
    Collective(
        "gather",
        Kind.gather,
        "Put every rank's tensor into one of the root's outputs.",
        Parameter("gather_list", is_list=True, on_root=True),
        _TENSOR,
        root="dst",
        default_root=0,
        options="GatherOptions",
    )
)
SCATTER = add(
    Collective(
        "scatter",
        Kind.scatter,
        "Put one of the root's tensors into each rank's.",
        _TENSOR,
        Parameter("scatter_list", is_list=True, on_root=True),
        root="src",
        default_root=0,
        options="ScatterOptions",
    )
)
REDUCE_SCATTER = add(
    Collective(
        "reduce_scatter",
        Kind.reduce_scatter,
        "Reduce the ranks' tensors for this rank into its output; sizes may differ between ranks.",
        _OUTPUT,
        Parameter("input_list", is_list=True),
        Shape.OWN,
        reduces=True,
        options="ReduceScatterOptions",
    )
)
REDUCE_SCATTER_TENSOR = add(
    Collective(
        "reduce_scatter_tensor",
        Kind.reduce_scatter,
        "Reduce the ranks' inputs, and put this rank's piece of the result into its output.",
        _OUTPUT,
        _INPUT,
        Shape.INPUT_IS_WHOLE,
        reduces=True,
        aliases=("reduce_scatter_single",),
        method_aliases=("_reduce_scatter_base", "reduce_scatter_single"),
        options="ReduceScatterOptions",
        coalesced="reduce_scatter_tensor_coalesced",
        functional="reduce_scatter_tensor",
    )
)
ALL_TO_ALL = add(
    Collective(
        "all_to_all",
        Kind.all_to_all,
        "Send each rank one tensor, and receive one from each.",
        Parameter("output_tensor_list", is_list=True),
        Parameter("input_tensor_list", is_list=True),
        Shape.PAIRS,
        method="alltoall",
        options="AllToAllOptions",
    )
)
ALL_TO_ALL_SINGLE = add(
    Collective(
        "all_to_all_single",
        Kind.all_to_all,
        "Send each rank a range of the input's rows, and receive a range of the output's from each.",
        _OUTPUT,
        _INPUT,
        Shape.ROWS,
        algorithm="all_to_all",
        splits=True,
        method="alltoall_base",
        method_aliases=("all_to_all_single",),
        options="AllToAllOptions",
        functional="all_to_all_single",
    )
)
SCAN = add(
    Collective(
        "scan",
        Kind.scan,
        "Replace the tensor of each rank by the reduction of those of the ranks up to it, its own included.",
        _TENSOR,
        _TENSOR,
        reduces=True,
        options="AllreduceOptions",
        on_devices=False,
    )
)
EXSCAN = add(
    Collective(
        "exscan",
        Kind.exscan,
        "Replace the tensor of each rank by the reduction of those of the ranks before it; rank 0's stays.",
        _TENSOR,
        _TENSOR,
        reduces=True,
        options="AllreduceOptions",
        on_devices=False,
    )
)
BARRIER = add(
    Collective(
        "barrier",
        Kind.barrier,
        "Return when every rank has called, and has finished what it called before.",
        shape=Shape.NONE,
        options="BarrierOptions",
    )
)

DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "complex32": 4,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}
"""The bytes of an element, by dtype. A dtype's code is its index in this table."""

DTYPE_NAMES = tuple(DTYPE_BYTES)
_OPS = {code: ReduceOp(name) for code, name in enumerate(ReduceOp._NAMES)}
_NO_OP = 255
_NO_DTYPE = 255
UNEVEN = 1 << 62
"""Added to a count that is the hash of several lengths, and not a number of elements."""


def pack(
    kind: int, dtype: torch.dtype | None = None, op: ReduceOp | None = None, root: int | None = None
) -> int:
    """Return the word META of a control block: kind, reduce operation, dtype and root."""
    op_code = _NO_OP if op is None else op.code
    dtype_code = _NO_DTYPE if dtype is None else DTYPE_NAMES.index(str(dtype)[6:])
    root_code = 0 if root is None else root + 1
    return int(kind) | op_code << 8 | dtype_code << 16 | root_code << 24


def unit_of(meta: int) -> int:
    """Return the bytes per element of a fingerprint's dtype, 1 if it has none."""
    dtype = dtype_name(meta)
    return 1 if dtype is None else DTYPE_BYTES[dtype]


def kind_name(meta: int) -> str:
    """Return the name of the operation."""
    code = meta & 0xFF
    return _KIND_NAMES.get(code, f"operation of kind {code}")


def op_name(meta: int) -> str | None:
    """Return the name of a reduction's reduce operation."""
    op = meta >> 8 & 0xFF
    return _OPS[op].name if op in _OPS else None


def dtype_name(meta: int) -> str | None:
    """Return the name of the tensors' dtype, if they have one."""
    dtype = meta >> 16 & 0xFF
    return DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else None


def root_of(meta: int) -> int | None:
    """Return the root of an operation that has one."""
    return (meta >> 24 & 0xFFFF) - 1 if meta >> 24 & 0xFFFF else None


def describe(meta: int, count: int) -> str:
    """Return a fingerprint in words: ``all_reduce(SUM, float32, 1024 elements)``."""
    op, dtype, root = op_name(meta), dtype_name(meta), root_of(meta)
    words = [] if op is None else [op]
    if dtype is not None:
        words.append(dtype)
        if count >= UNEVEN:
            words.append("uneven sizes")
        elif count >= 0:
            words.append(f"{count} element{'' if count == 1 else 's'}")
    if root is not None:
        words.append(f"root {root}")
    return f"{kind_name(meta)}({', '.join(words)})"


def describe_lengths(meta: int, count: int, sent: Sequence[int], expected: Sequence[int]) -> str:
    """Return the lengths in words, of which a fingerprint only has the hash; empty if there are none.

    Args:
        sent, expected: by rank, how many bytes go there and come from there.
    """
    kind, unit = meta & 0xFF, unit_of(meta)
    sent, expected = ([length // unit for length in lengths] for lengths in (sent, expected))
    if kind in (Kind.all_to_all, Kind.scatter):
        return f" that sends {sent} and expects {expected} elements by rank"
    if count < UNEVEN:
        return ""
    return f" of {sent if kind == Kind.reduce_scatter else expected} elements by rank"


def even_parts(memory: tuple[int, int], number: int) -> list[tuple[int, int]]:
    """Return the equal parts of a range of memory, (address, bytes)."""
    address, nbytes = memory
    length = nbytes // number
    return [(address + length * part, length) for part in range(number)]
