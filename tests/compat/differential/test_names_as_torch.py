"""Types, control collectives and small names: torchestra.compat's behave as torch's."""

from __future__ import annotations

import copy
import importlib
import pickle
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from compared import SIDES, assert_same, outcome, quiet
from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra import compat
from torchestra.communicator.work import WorkResult
from torchestra.compat.testing import spawn_threads_and_init_comms

LONG = timedelta(seconds=100)


WITH_CONTROL_COLLECTIVES = [side for side in SIDES if hasattr(side, "_StoreCollectives")]


@pytest.mark.skipif(len(WITH_CONTROL_COLLECTIVES) < 2, reason="torch has none since 2.15")
@given(
    program=st.lists(
        st.one_of(
            st.tuples(st.just("barrier"), st.sampled_from("abc")),
            st.tuples(st.just("all_sum"), st.sampled_from("abc"), st.integers(-3, 3)),
            st.tuples(st.just("broadcast_send"), st.sampled_from("abc"), st.just("x")),
            st.tuples(st.just("gather_send"), st.sampled_from("abc"), st.just(b"x")),
            st.tuples(st.just("gather_recv"), st.sampled_from("abc"), st.just(b"y")),
            st.tuples(st.just("scatter_send"), st.sampled_from("abc"), st.just(["z"])),
            st.tuples(st.just("all_gather"), st.sampled_from("abc"), st.just("v")),
        ),
        max_size=8,
    )
)
@settings(max_examples=40, deadline=None)
def test_control_collectives(program: list[tuple[Any, ...]]) -> None:
    theirs, ours = (side._StoreCollectives(side.HashStore(), 0, 1) for side in SIDES)
    assert isinstance(ours, compat._ControlCollectives)
    with quiet():
        for name, *arguments in program:
            outcomes = [outcome(getattr(each, name), *arguments) for each in (theirs, ours)]
            assert_same(f"{program}: {name}{arguments}", *outcomes)


@pytest.mark.parametrize("side", WITH_CONTROL_COLLECTIVES)
def test_control_collectives_of_two_ranks(side: Any) -> None:
    store = side.HashStore()
    found: dict[int, Any] = {}

    def body(rank: int) -> None:
        own = side._StoreCollectives(store, rank, 2)
        own.barrier("barrier", LONG)
        first = rank == 0
        found[rank] = [
            own.all_sum("sum", rank + 1, LONG),
            own.broadcast_send("told", "x", LONG) if first else own.broadcast_recv("told", LONG),
            own.gather_recv("gathered", "y", LONG) if first else own.gather_send("gathered", "z", LONG),
            own.scatter_send("cast", ["0", "1"], LONG) if first else own.scatter_recv("cast", LONG),
            own.all_gather("every", str(rank), LONG),
        ]

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        0: [3, None, [b"y", b"z"], b"0", [b"0", b"1"]],
        1: [3, b"x", None, b"1", [b"0", b"1"]],
    }


def reduce_ops(side: Any) -> Any:
    ops = side.ReduceOp
    return [
        *[(int(op), op.value, op.name) for op in map(ops.RedOpType.__dict__.get, ["SUM", "AVG", "MAX"])],
        *[isinstance(op, ops.RedOpType) for op in (ops.SUM, ops.PREMUL_SUM)],
        ops(ops.MIN).op == ops.MIN,
        copy.deepcopy(ops.SUM) == ops.SUM,
        pickle.loads(pickle.dumps(ops.BXOR)) == ops.BXOR,
        ops.SUM == ops.MAX,
        outcome(ops.SUM, 2.0).errors[-1:],
    ]


def test_reduce_operations() -> None:
    theirs, ours = (outcome(reduce_ops, side) for side in SIDES)
    assert theirs.value is not None
    assert ours.value[:-1] == theirs.value[:-1]
    assert ours.value[-1]
    assert theirs.value[-1]


@pytest.mark.skipif(not callable(SIDES[0].ReduceOp.SUM), reason="torch 2.10 has none")
def test_a_sum_with_a_factor_is_a_reduce_operation() -> None:
    theirs, ours = (
        outcome(lambda ops: isinstance(ops.PREMUL_SUM(2.0), ops), side.ReduceOp) for side in SIDES
    )
    assert ours.value is theirs.value is True


@pytest.mark.parametrize("text", ["worker/cpu", "rank:1/cuda:0", "cpu", "worker", "a/b/c", "", "rank:x/cpu"])
def test_remote_devices(text: str) -> None:
    def parts(module: Any) -> Any:
        device = module._remote_device(text)
        same = device == module._remote_device(text)
        return device.worker_name(), device.rank(), device.device(), same, repr(device)

    modules = [importlib.import_module(f"{side.__name__}.remote_device") for side in SIDES]
    assert_same(text, *[outcome(parts, module) for module in modules])


def test_objects_as_tensors_and_small_functions() -> None:
    def found(side: Any) -> Any:
        own = importlib.import_module(f"{side.__name__}.distributed_c10d")
        data, size = own._object_to_tensor({"a": 1}, "cpu", None)
        return (
            own._tensor_to_object(data, size, None),
            (data.dtype, size.dtype, int(size) == data.numel()),
            outcome(own._check_valid_timeout, 3).errors,
            outcome(own._check_valid_timeout, LONG),
            own._get_default_timeout("gloo"),
            (own.PG_WRAPPER_STORE_PREFIX, own.STORE_BASED_BARRIER_PREFIX),
            importlib.import_module(f"{side.__name__}.constants").default_pg_timeout,
            [int(each) for each in (own.ErrorType.TIMEOUT, own.ErrorType.REMOTE_ERROR)]
            if side is compat
            else [1, 3],
        )

    theirs, ours = (outcome(found, side) for side in SIDES)
    assert ours.value[:2] == theirs.value[:2]
    assert ours.value[3:] == theirs.value[3:]
    assert set(theirs.value[2]) <= set(ours.value[2])


@spawn_threads_and_init_comms(world_size=2)
def test_how_an_operation_ended_is_a_future() -> None:
    tensor = torch.ones(2)
    work = compat.all_reduce(tensor, async_op=True)
    assert work.get_future_result().wait() == WorkResult.SUCCESS
    work.block_current_stream()
    assert work.wait(timedelta(0))
    if compat.get_rank() == 0:
        compat.send(tensor, 1)
    else:
        late = compat.irecv(torch.zeros(2), 0, tag=7)
        with pytest.raises(RuntimeError, match="not done after waiting"):
            late.wait(timedelta(milliseconds=20))
        compat.recv(tensor, 0)
    compat.barrier()
    if compat.get_rank() == 0:
        compat.send(tensor, 1, tag=7)
    else:
        late.wait()
