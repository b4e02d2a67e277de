"""Tensors that look like any other but have no memory of their own, or less than they say, reach no kernel.

Every operation is given every kind of them in every place, after it has gone well with a plain tensor (so
that the fast paths are open too). Before there was a gate, many of these calls ended the process, on
every rank. Operations on fake and meta tensors alone have fake results, as torch's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._C import _functorch
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.masked import masked_tensor

import torchestra as dist
from torchestra.engine.operations import Kind
from torchestra.errors import InvalidArgumentError
from torchestra.rpc.messages import encode
from torchestra.tensors.packed_objects import PackedObjects
from worlds import guard_absent_devices, run

COUNT = 8

# For the whole test, not where such a tensor is made: filters are the process's, and ranks are threads of it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _absent_devices_are_guarded() -> None:
    """Of torch 2.10 a FakeTensorMode of a rank that has ended would crash the next rank's."""
    guard_absent_devices()


class Wrapper(torch.Tensor):
    """As quantization libraries and tracers make them."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return func(*args, **(kwargs or {}))


def plain() -> torch.Tensor:
    return torch.ones(COUNT)


def resized(length: int) -> torch.Tensor:
    tensor = plain()
    tensor.untyped_storage().resize_(length)
    return tensor


def view_of_shrunk() -> torch.Tensor:
    whole = torch.ones(2 * COUNT)
    view = whole[COUNT:]
    whole.untyped_storage().resize_(4 * COUNT)  # as much as the view needs, but not where it is
    return view


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return plain()


def functional_subclass() -> torch.Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(plain())  # type: ignore[no-any-return]


@contextmanager
def batched() -> Iterator[torch.Tensor]:
    level = _functorch._vmap_increment_nesting(2, "error")
    try:
        yield _functorch._add_batch_dim(torch.ones(2, COUNT), 0, level)
    finally:
        _functorch._vmap_decrement_nesting()


KINDS: dict[str, Callable[[], Any]] = {
    "fake": fake,
    "functional": lambda: torch._to_functional_tensor(plain()),
    "functional subclass": functional_subclass,
    "zero": lambda: torch._efficientzerotensor(COUNT),
    "masked": lambda: masked_tensor(plain(), plain() > 0),
    "quantized": lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.quint8),
    "freed": lambda: resized(0),
    "shrunk": lambda: resized(4 * COUNT - 4),
    "view of shrunk": view_of_shrunk,
    "meta": lambda: torch.ones(COUNT, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(COUNT // 2)] * 2),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(COUNT // 2)] * 2, layout=torch.jagged),
    "batched": batched,
    "wrapper": lambda: Wrapper(plain()),
    "csr": lambda: torch.eye(COUNT).to_sparse_csr(),
    "bsr": lambda: torch.eye(COUNT).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: plain().to_mkldnn(),
    "lazy": torch.nn.UninitializedParameter,
    "complex functional": lambda: torch._to_functional_tensor(torch.ones(COUNT, dtype=torch.complex64)),
}

FAKE = ("fake", "meta")

# By kind of operation: a call for each of its arguments, with the given tensor there and plain ones besides.
Call = Callable[[torch.Tensor], Any]
TWICE, HALF = 2 * COUNT, COUNT // 2


def other() -> int:
    return 1 - dist.get_rank()


OPERATIONS: dict[tuple[Kind, str], Call] = {
    (Kind.all_reduce, "tensor"): dist.all_reduce,
    (Kind.all_reduce, "queued"): lambda odd: dist.all_reduce(odd, async_op=True),
    (Kind.all_reduce, "coalesced"): lambda odd: dist.all_reduce_coalesced([plain(), odd]),
    (Kind.reduce, "tensor"): lambda odd: dist.reduce(odd, 0),
    (Kind.scan, "tensor"): dist.scan,
    (Kind.exscan, "tensor"): dist.exscan,
    (Kind.broadcast, "tensor"): lambda odd: dist.broadcast(odd, 0),
    (Kind.all_gather, "input"): lambda odd: dist.all_gather([plain(), plain()], odd),
    (Kind.all_gather, "output"): lambda odd: dist.all_gather([plain(), odd], plain()),
    (Kind.all_gather, "flat input"): lambda odd: dist.all_gather_into_tensor(torch.ones(TWICE), odd),
    (Kind.all_gather, "flat output"): lambda odd: dist.all_gather_into_tensor(odd, torch.ones(HALF)),
    (Kind.gather, "input"): lambda odd: dist.gather(
        odd, [plain(), plain()] if dist.get_rank() == 0 else None, 0
    ),
    (Kind.scatter, "output"): lambda odd: dist.scatter(
        odd, [plain(), plain()] if dist.get_rank() == 0 else None, 0
    ),
    (Kind.reduce_scatter, "output"): lambda odd: dist.reduce_scatter(odd, [plain(), plain()]),
    (Kind.reduce_scatter, "input"): lambda odd: dist.reduce_scatter(plain(), [plain(), odd]),
    (Kind.reduce_scatter, "flat output"): lambda odd: dist.reduce_scatter_tensor(odd, torch.ones(TWICE)),
    (Kind.reduce_scatter, "flat input"): lambda odd: dist.reduce_scatter_tensor(torch.ones(HALF), odd),
    (Kind.all_to_all, "output"): lambda odd: dist.all_to_all([plain(), odd], [plain(), plain()]),
    (Kind.all_to_all, "input"): lambda odd: dist.all_to_all([plain(), plain()], [plain(), odd]),
    (Kind.all_to_all, "flat output"): lambda odd: dist.all_to_all_single(odd, plain()),
    (Kind.all_to_all, "flat input"): lambda odd: dist.all_to_all_single(plain(), odd),
}
MESSAGES: dict[str, tuple[Call, Call]] = {
    "send": (lambda odd: dist.send(odd, other()), lambda odd: dist.recv(odd, other())),
    "isend": (lambda odd: dist.isend(odd, other()), lambda odd: dist.irecv(odd, other()).wait()),
}


@contextmanager
def made(kind: str) -> Iterator[torch.Tensor]:
    tensor = KINDS[kind]()
    if isinstance(tensor, torch.Tensor):
        yield tensor
        return
    with tensor as inside:
        yield inside


def refused(call: Call, odd: torch.Tensor, what: str) -> None:
    said = "nothing was raised"
    try:
        call(odd)
    except Exception as error:
        if isinstance(error, InvalidArgumentError) and "\n" not in str(error):
            return
        said = f"{type(error).__name__}: {error}"
    raise AssertionError(f"{what}: {said}")  # without what has the tensor, which not even pytest can show


def every_operation() -> None:
    for (operation, where), call in OPERATIONS.items():
        if (work := call(plain())) is not None:  # and opens the fast path
            work.wait()
        for kind in KINDS:
            if kind in FAKE and (where in ("tensor", "queued") or operation in (Kind.gather, Kind.scatter)):
                continue  # which is by itself there, and not refused: see below
            with made(kind) as odd:
                refused(call, odd, f"{operation.name}, {where}: {kind}")
    for name, (send, receive) in MESSAGES.items():
        for first in (0, 1):
            (send if dist.get_rank() == first else receive)(plain())
        for kind in KINDS:
            if kind in FAKE:
                continue
            with made(kind) as odd:
                refused(send, odd, f"{name}: {kind}")
                refused(receive, odd, f"the receive of {name}: {kind}")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@pytest.mark.parametrize("hosts", [("", ""), ("h0", "h1")])
def test_every_operation_refuses_every_kind(hosts: tuple[str, str]) -> None:
    run("threads", 2, every_operation, hosts=hosts)


def test_every_kind_of_operation_is_among_them() -> None:
    """Those with tensors; messages are tried too, and a sparse all_reduce takes none of these."""
    tried = {operation.name for operation, _ in OPERATIONS}
    assert {kind.name for kind in Kind} - tried == {"barrier", "sparse_all_reduce", "send", "recv"}


def alone(like: Callable[[int], torch.Tensor]) -> None:
    """On rank 0 only: every operation on tensors that are all fake."""
    odd, whole, pair = like(COUNT), like(TWICE), [like(COUNT), like(COUNT)]
    group = dist.group.WORLD
    assert group is not None
    for call in (
        *(call for (_, where), call in OPERATIONS.items() if where in ("tensor", "queued")),
        *(call for message in MESSAGES.values() for call in message),
        lambda odd: dist.all_reduce(odd, dist.ReduceOp.premul_sum(2.0)),
        lambda odd: dist.all_reduce_coalesced([odd, *pair]),
        lambda odd: dist.all_gather(pair, odd),
        lambda odd: dist.all_gather_into_tensor(whole, odd),
        lambda odd: dist.gather(odd, pair, 0),
        lambda odd: dist.scatter(odd, pair, 0),
        lambda odd: dist.reduce_scatter(odd, pair),
        lambda odd: dist.reduce_scatter_tensor(odd, whole),
        lambda odd: dist.all_to_all(pair, [odd, odd]),
        lambda odd: dist.all_to_all_single(odd, pair[0]),
        lambda odd: group.allreduce([odd, pair[0]]),
        lambda odd: group.broadcast([odd, pair[0]]),
        lambda odd: group.allgather([[*pair, like(COUNT), like(COUNT)], [*pair, odd, odd]], pair),
    ):
        work = call(odd)
        assert not isinstance(work, dist.Work) or (work.wait() and work.is_success())
    work = dist.all_gather_into_tensor(whole, odd, async_op=True)
    assert work is not None
    (result,) = work.result()
    assert result is whole
    refused(lambda odd: dist.all_gather_into_tensor(odd, whole), odd, "a wrong shape")
    refused(lambda odd: dist.all_reduce(odd, dist.ReduceOp.BAND), odd, "what floats do not have")


def of_fakes() -> None:
    before = dist.group.WORLD.get_sequence_number_for_group()  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        mode = FakeTensorMode()

        def within(count: int) -> torch.Tensor:
            with mode:
                return torch.ones(count)

        for like in (within, lambda count: torch.ones(count, device="meta")):
            alone(like)
        with mode:
            alone(torch.ones)
    assert dist.group.WORLD.get_sequence_number_for_group() == before  # type: ignore[union-attr]
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


@pytest.mark.parametrize("hosts", [("", ""), ("h0", "h1")])
def test_operations_on_fake_tensors_send_nothing(hosts: tuple[str, str]) -> None:
    """As torch's fake kernels: one rank calls them, the arguments are checked, and shapes are the results."""
    run("threads", 2, of_fakes, hosts=hosts)


def has_bytes(kind: str) -> bool:
    """Return whether a kind can be pickled: its values are all there, or it has none."""
    return kind in (
        "quantized",
        "meta",
        "nested",
        "jagged",
        "csr",
        "bsr",
        "mkldnn",
        "masked",
        "wrapper",
        "lazy",
    )


def sparse_sum_of_fakes() -> None:
    with FakeTensorMode():
        odd = torch.eye(3).to_sparse()
    refused(dist.all_reduce, odd, "all_reduce of a fake sparse tensor")


def test_a_sparse_tensor_is_asked_for_its_parts() -> None:
    run("threads", 2, sparse_sum_of_fakes)


def negated() -> None:
    """The bit that says so lies beside the memory; views made by functions private to torch begin at 0."""
    rank = dist.get_rank()
    for _ in range(2):  # the general way, and the short one
        mine = torch.full((COUNT,), rank + 1.0)
        tensor = torch._neg_view(mine) if rank == 0 else mine
        dist.all_reduce(tensor)
        assert tensor.resolve_neg().tolist() == [1.0] * COUNT
        dist.broadcast(tensor, 0)
        assert tensor.resolve_neg().tolist() == [1.0] * COUNT
        if rank == 0:
            dist.send(torch._neg_view(torch.ones(COUNT)), 1)
        else:
            dist.recv(mine, 0)
            assert mine.tolist() == [-1.0] * COUNT


def test_negated_views_are_read_with_their_sign() -> None:
    run("threads", 2, negated)


def into_shared_memory() -> None:
    grid, whole = torch.zeros(COUNT, 2), torch.ones(4 * COUNT)
    dist.all_gather(
        list(grid.unbind(1)), torch.full((COUNT,), float(dist.get_rank()))
    )  # columns: interleaved
    assert grid.tolist() == [[0.0, 1.0]] * COUNT
    tensor = plain()
    for name, call in {
        "the same twice": lambda: dist.all_gather([tensor, tensor], plain()),
        "overlapping outputs": lambda: dist.all_gather([whole[:COUNT], whole[4 : 4 + COUNT]], plain()),
        "overlapping columns": lambda: dist.all_gather([grid[:, 0], grid.view(-1)[::2]], plain()),
        "the same for all_to_all": lambda: dist.all_to_all([tensor, tensor], [plain(), plain()]),
        "an expanded receive": lambda: dist.recv(torch.ones(1).expand(COUNT), other()),
        "windows": lambda: dist.all_reduce(whole.as_strided((4, 3), (2, 1))),
        "windows received": lambda: dist.irecv(whole.as_strided((4, 3), (2, 1)), other()),
    }.items():
        refused(lambda _, call=call: call(), tensor, name)  # type: ignore[misc]
    steps = whole.as_strided((3, 2), (2, 3))  # interleaved, but each element by itself
    dist.all_reduce(steps)
    assert steps.tolist() == [[2.0, 2.0]] * 3
    assert whole.sum() == 4 * COUNT + 6


def test_results_do_not_share_memory() -> None:
    """Which of two results would be left there is chance."""
    run("threads", 2, into_shared_memory)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not has_bytes(kind)])
@pytest.mark.parametrize("pack", [lambda item: PackedObjects.of([item]), encode], ids=["object", "rpc"])
def test_what_has_no_memory_is_not_pickled(pack: Callable[[object], Any], kind: str) -> None:
    """Neither for the collectives of objects nor for a call of another worker."""
    with (
        made(kind) as odd,
        pytest.raises((InvalidArgumentError, TypeError, RuntimeError, AttributeError, pickle.PicklingError)),
    ):
        pack({"inside": [odd]})
